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

# What torch.utils.checkpoint exports and this package hands through: the reentrant engine.
REENTRANT = {"CheckpointFunction", "check_backward_validity", "detach_variable"}


def test_all_is_sorted_and_true():
    constants_first = sorted(ckpt_hooks.__all__, key=lambda name: (not name.isupper(), name))
    assert ckpt_hooks.__all__ == constants_first
    for name in ckpt_hooks.__all__:
        assert hasattr(ckpt_hooks, name)


def public_names_of_torch():
    """The names that the installed torch exports, and others that its module defines."""
    module = torch.utils.checkpoint
    defined = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    return {*module.__all__, *(name for name in defined if not name.startswith("_"))}


def test_names_of_torch_are_there():
    """Code written for ``torch.utils.checkpoint`` finds its names."""
    names = public_names_of_torch()
    assert names - set(ckpt_hooks.__all__) == REENTRANT
    for name in names:
        assert getattr(ckpt_hooks, name) is not None
        assert name in dir(ckpt_hooks)


@pytest.mark.parametrize("name", sorted(REENTRANT))
def test_names_of_the_reentrant_engine_are_torchs_own(name):
    assert getattr(ckpt_hooks, name) is getattr(torch.utils.checkpoint, name)
    assert name not in vars(ckpt_hooks)
    assert name not in ckpt_hooks.__all__


def test_the_reentrant_engine_in_a_program():
    from ckpt_hooks import CheckpointFunction, check_backward_validity, detach_variable

    x = torch.rand(3, requires_grad=True)
    check_backward_validity((x,))
    y = CheckpointFunction.apply(lambda x: x.sin().cos(), True, *detach_variable((x,)))
    y.sum().backward()
    assert x.grad is None  # which belongs to the detached one
    (expected,) = torch.autograd.grad(x.sin().cos().sum(), x)
    CheckpointFunction.apply(lambda x: x.sin().cos(), True, x).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.slow
def test_the_reentrant_engine_is_not_asked_for_on_import():
    program = (
        "import torch.utils.checkpoint as theirs\n"
        f"for name in {sorted(REENTRANT)}:\n"
        "    delattr(theirs, name)\n"
        "import ckpt_hooks\n"
        "assert 'CheckpointFunction' in dir(ckpt_hooks)\n"
        "assert not hasattr(ckpt_hooks, 'CheckpointFunction')\n"
        "from ckpt_hooks import *\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="module 'ckpt_hooks' has no attribute 'nothing'"):
        _ = ckpt_hooks.nothing
    assert {"checkpoint", *REENTRANT, "__version__"} <= set(dir(ckpt_hooks))
    assert sorted(dir(ckpt_hooks)) == dir(ckpt_hooks)


@pytest.mark.parametrize(
    ("version", "has_lock"),
    [
        ("3.14.0 free-threading build (main) [GCC]", None),
        ("3.13.0 experimental free-threading build (main) [GCC]", True),
        ("3.13.0", False),
    ],
)
def test_python_without_a_global_lock_is_refused(monkeypatch, version, has_lock):
    monkeypatch.setattr(sys, "version", version)
    if has_lock is not None:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_lock, raising=False)
    message = r"ckpt_hooks does not support free-threaded Python: .* Use the default build of Python\.$"
    with pytest.raises(ImportError, match=message):
        exec(inspect.getsource(ckpt_hooks), {"__name__": "ckpt_hooks"})


@pytest.mark.parametrize("name", ckpt_hooks.__all__)
def test_public_names_are_documented(name):
    """Every public name has a docstring; functions that take something say what, and show it."""
    thing = getattr(ckpt_hooks, name)
    text = inspect.getdoc(thing)
    assert text or name.isupper()
    if inspect.isfunction(thing) and inspect.signature(thing).parameters:
        assert "Args:" in text


@pytest.mark.slow
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
