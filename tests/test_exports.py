"""The public names."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
import torch.utils.checkpoint

import ckpt_hooks

# What torch.utils.checkpoint exports and this package does not: the reentrant engine.
REENTRANT = {"CheckpointFunction", "check_backward_validity", "detach_variable"}


def test_all_is_sorted_and_true():
    constants_first = sorted(ckpt_hooks.__all__, key=lambda name: (not name.isupper(), name))
    assert ckpt_hooks.__all__ == constants_first
    for name in ckpt_hooks.__all__:
        assert hasattr(ckpt_hooks, name)


def test_names_of_torch_are_there():
    """Code written for ``torch.utils.checkpoint`` finds its names."""
    assert set(torch.utils.checkpoint.__all__) - set(ckpt_hooks.__all__) == REENTRANT


@pytest.mark.parametrize("name", ckpt_hooks.__all__)
def test_public_names_are_documented(name):
    """Every public name has a docstring; functions that take something say what, and show it."""
    thing = getattr(ckpt_hooks, name)
    text = inspect.getdoc(thing)
    assert text or name.isupper()
    if inspect.isfunction(thing) and inspect.signature(thing).parameters:
        assert "Args:" in text


def test_every_module_imports_alone_and_has_a_docstring():
    """No module relies on another one having been imported first."""
    modules = [name for _, name, _ in pkgutil.walk_packages(ckpt_hooks.__path__, "ckpt_hooks.")]
    for name in modules:
        assert importlib.import_module(name).__doc__
    program = "import sys, importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, *reversed(modules)], check=True)


def test_the_package_is_typed():
    from importlib.resources import files

    assert files("ckpt_hooks").joinpath("py.typed").is_file()
