"""Promises about the source itself: who calls private torch, how long modules are, who imports what at import time."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import ckpt_hooks

PACKAGE = pathlib.Path(ckpt_hooks.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def names(module: pathlib.Path) -> str:
    return str(module.relative_to(PACKAGE))


@pytest.mark.parametrize("module", MODULES, ids=names)
def test_private_torch_is_called_in_one_place(module):
    """``torch._x`` and names imported from such modules occur in ``_torch`` alone."""
    if names(module).startswith("_torch/"):
        return
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            private = [part for part in parts if part.startswith("_")]
            assert not private, ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            base = ast.unparse(node.value)
            assert base.partition(".")[0] != "torch", ast.unparse(node)


@pytest.mark.parametrize("module", MODULES, ids=names)
def test_modules_have_room_for_one_idea(module):
    """Most have 150 to 400 lines, and none over 700."""
    assert len(module.read_text().splitlines()) <= 700


@pytest.mark.slow
def test_the_core_imports_torch_and_typing_extensions_only():
    """Nothing else outside of the standard library, and of torch one small module that it had not loaded already."""
    program = (
        "import sys, torch, typing_extensions\n"
        "before = set(sys.modules)\n"
        "import ckpt_hooks\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names) - {'ckpt_hooks', 'torch'}))\n"
        "print(*sorted(name for name in set(sys.modules) - before if name.startswith('torch')))\n"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.split() == []
