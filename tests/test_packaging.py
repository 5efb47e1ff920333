"""What a package index, an installer and a later torch find: metadata, links, the parts of torch that the package stands on."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

import ckpt_hooks

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT, PACKAGE = pathlib.Path(__file__).parent.parent, pathlib.Path(ckpt_hooks.__file__).parent
#: Where private parts of torch are named.
ROOMS = {"_torch": ("autograd", "compiling", "functions", "modes", "profiling", "tensors"), "_ambient": ("switches",)}
GROUND = [f"{room}/{name}" for room, names in ROOMS.items() for name in names]


def metadata() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_links_of_the_long_description_are_absolute():
    """README's own are relative to the repository; those of the package page begin with the project's address."""
    project, hook = metadata()["project"], metadata()["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    readme = (ROOT / hook["fragments"][0]["path"]).read_text()
    relative = re.findall(r"\]\((?!https?://|#)([^)]+)\)", readme)
    assert len(relative) > 5
    page = readme
    for substitution in hook["substitutions"]:
        page = re.sub(substitution["pattern"], substitution["replacement"], page)
    assert not re.findall(r"\]\((?!https?://|#)", page)
    assert page.count(f"]({project['urls']['Repository']}/") >= len(relative)
    assert len(re.findall(r"!\[[^\]]*\]\([^)]*/raw/", page)) == page.count("/raw/") > 0
    assert all(url.startswith(project["urls"]["Repository"]) for url in project["urls"].values())


def test_the_version_stands_in_one_place():
    assert "version" in metadata()["project"]["dynamic"]
    assert ckpt_hooks.__version__ == "0.1.0"
    texts = (path.read_text() for path in PACKAGE.rglob("*.py"))
    assert sum("__version__ =" in text for text in texts) == 1


def test_packages_that_are_imported_are_dependencies():
    """Or extras, but for ``tqdm``, which is used where it is there."""
    project, imported = metadata()["project"], {"tqdm"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported |= {alias.name.partition(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            imported |= {node.module.partition(".")[0]} if isinstance(node, ast.ImportFrom) and not node.level else set()
    named = [*project["dependencies"], *project["optional-dependencies"]["plot"], "tqdm"]
    assert imported - sys.stdlib_module_names - {"ckpt_hooks"} == {
        re.split(r"\W*>=", name.replace("-", "_"))[0] for name in named
    }


SNIPPETS = """
import re, sys
import warnings
sys.modules.update(dict.fromkeys(sys.argv[2:]))
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
text = open(sys.argv[1]).read()
exec(compile("\\n".join(re.findall(r"^```python\\n(.*?)^```", text, re.M | re.S)), "README.md", "exec"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "absent"),
    [(["-W", "error"], []), (["-O", "-X", "dev"], []), ([], ["numpy", "triton", "matplotlib", "pytest"])],
    ids=["errors of warnings", "no assertions", "torch alone"],
)
def test_snippets_of_the_readme_elsewhere(flags, absent):
    """With warnings for errors; without assertions, in Python's development mode; with torch alone, and no compiler."""
    command = [sys.executable, *flags, "-c", SNIPPETS, str(ROOT / "README.md"), *absent]
    environment = {**os.environ, "CC": "/nowhere", "CXX": "/nowhere"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "forward" in done.stdout


def hook_points() -> list[str]:
    """Returns the private parts of torch that are named on import, but for those of some versions or builds."""
    found = set()
    for name in GROUND:
        tree = ast.parse((PACKAGE / f"{name}.py").read_text().replace("_c.", "torch._C."))
        optional = {
            part
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.IfExp, ast.Lambda)) or getattr(node, "decorator_list", None)
            for part in ast.walk(node)
        }
        paths = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in optional}
        found |= {path for path in paths if path.startswith("torch.") and path.split(".")[-2:-1] != ["torch"]}
    private = re.compile(r"^torch(\.\w+)*\._\w+(\.\w+)*$")
    longest = {path for path in found if not any(other.startswith(f"{path}.") for other in found)}
    return sorted(path for path in longest if private.match(path) and not path.endswith(("__code__", "__dict__")))


WITHOUT = """
import importlib, json, sys
import torch, ckpt_hooks
ckpt_hooks.checkpoint
found = {}
for path in json.loads(sys.argv[1]):
    *outer, name = path.split(".")
    owner = sys.modules["torch"]
    for part in outer[1:]:
        owner = getattr(owner, part)
    rooms = "ckpt_hooks._torch", "ckpt_hooks._ambient"
    held = {key: sys.modules.pop(key) for key in list(sys.modules) if key.startswith(rooms)}
    part = getattr(owner, name)
    try:
        delattr(owner, name)
    except (AttributeError, TypeError):
        continue
    try:
        importlib.import_module("ckpt_hooks._ambient")
        found[path] = "imported"
    except BaseException as error:
        found[path] = f"{type(error).__name__}: {error}"
    finally:
        setattr(owner, name, part)
        sys.modules.update(held)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_parts_of_torch_that_are_gone_are_named_on_import():
    points = hook_points()
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, json.dumps(points)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) > 30
    for path, words in found.items():
        assert words.startswith("ImportError: ckpt_hooks works with torch 2.11 to 2.15, and this is torch "), path
        assert path.rpartition(".")[2] in words


OF_ANOTHER_VERSION = """
import sys, warnings
import torch
torch.__version__ = torch.torch_version.TorchVersion(sys.argv[1])
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from ckpt_hooks import checkpoint, checkpoint_region
    checkpoint(torch.sin, torch.ones(3, requires_grad=True)).sum().backward()
print(*{str(one.message) for one in seen if "ckpt_hooks" in str(one.message)} or ["no warning"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.10.1", "ImportError: ckpt_hooks works with torch 2.11 to 2.15, and this is torch 2.10.1"),
        ("2.16.0a0+git12", "ckpt_hooks is tested with torch 2.11 to 2.15, and this is torch 2.16.0a0+git12"),
        ("2.15.1", "no warning"),
    ],
)
def test_other_versions_of_torch(version, words):
    command = [sys.executable, "-W", "ignore", "-c", OF_ANOTHER_VERSION, version]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout or done.stderr.strip().splitlines()[-1]
    assert said.startswith(words)
