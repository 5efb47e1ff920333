"""What all dispatch modes of the package owe to the operators that they pass on."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.autograd import grad

from ckpt_hooks import MutationError, checkpoint, checkpoint_region, checkpoint_sequential
from ckpt_hooks._core.modes import QuietDispatchMode
from tests.measure import Log, leaf

aten = torch.ops.aten


def modes(kind=QuietDispatchMode):
    """Yields the classes of the package's dispatch modes."""
    for one in kind.__subclasses__():
        if one.__module__.startswith("ckpt_hooks."):
            yield one
            yield from modes(one)


def test_no_handler_is_wrapped_by_the_compiler():
    """Torch wraps that of other modes, and imports Dynamo to do so, which takes a second."""
    found = {one.__torch_dispatch__.__code__.co_filename for one in modes() if "__torch_dispatch__" in vars(one)}
    assert len(found) > 5
    assert all("ckpt_hooks" in name for name in found)


def test_a_step_asks_for_no_compiler(monkeypatch):
    """As a first one does in a process of its own, in a slow test."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # to import it is an error
    x = leaf(4, 4)
    for policy in (None, [aten.mm.default]):
        y = checkpoint(policy=policy)(lambda x: (x @ x).sin().exp())(x)
        with checkpoint_region(policy=policy):
            y = torch.nn.functional.dropout(y @ x, 0.5).sin()
        with torch.autocast("cpu"):
            checkpoint_sequential([torch.sin] * 4, 2, y).sum().backward()


class Twice(HigherOrderOperator):
    """Runs a function twice: an operator of operators, as ``flex_attention`` is one."""

    def __init__(self):
        super().__init__("ckpt_hooks_tests_twice")

    def __call__(self, function, x):
        return super().__call__(function, x)


@pytest.fixture(scope="module")
def twice():
    operator = Twice()
    operator.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda function, x: function(function(x)))
    operator.py_impl(torch._C.DispatchKey.Autograd)(lambda function, x: operator(function, x))
    operator.fallthrough(torch._C.DispatchKey.AutogradCPU)
    return operator


class Reached(nn.Module):
    """Reaches a parameter that it does not read; once that was written to, a rerun is watched."""

    def __init__(self, function):
        super().__init__()
        self.unread = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, x):
        return self.function(x)


def plainly(function, x):
    return grad(function(x).sum(), x)[0]


def under_a_policy(function, x):
    return grad(checkpoint(policy=[aten.sin.default])(function)(x).sum(), x)[0]


def with_debug(function, x):
    return grad(checkpoint(function, x, debug=True).sum(), x)[0]


def watched(function, x):
    module = Reached(function)
    y = checkpoint(module, x)
    with torch.no_grad():
        module.unread.add_(1)
    return grad(y.sum(), x)[0]


def in_a_thread(function, x):
    results = Log()
    thread = threading.Thread(target=lambda: results.append(grad(checkpoint(function, x).sum(), x)[0]))
    thread.start()
    thread.join()
    return results[0]


def recorded(function, x):
    with checkpoint_region():
        y = function(x)
    return grad(y.sum(), x)[0]


WAYS = [under_a_policy, with_debug, watched, in_a_thread, recorded]


@pytest.mark.parametrize("way", WAYS)
def test_operators_of_operators(way, twice):
    """They go through every mode like others."""

    def function(x):
        return (twice(torch.cos, x.detach()) * x.sin()).exp()

    x = leaf(3)
    assert torch.equal(way(function, x), plainly(function, x))


@pytest.mark.parametrize("way", WAYS)
def test_writes_to_lists_are_counted(way):
    """As they are without a mode, under which torch does not count them; in forward, and in a rerun if there is one."""
    versions = Log()

    def function(x):
        h = x * 1
        torch._foreach_mul_([h], 2.0)
        versions.append(h._version)
        return h.sin().exp()

    x = leaf(3)
    expected = plainly(function, x)
    assert versions == [1]
    assert torch.equal(way(function, x), expected)
    assert set(versions) == {1}
    assert len(versions) == (2 if way is recorded else 3)


def test_parameters_in_one_memory():
    """A parameter that has not changed may be read though its neighbour has."""
    flat = torch.linspace(-1, 1, 8)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.empty(0)) for _ in range(2))
            self.one.data, self.other.data = flat[:4], flat[4:]

        def forward(self, x):
            return (x + self.one.view(2, 2).mT.reshape(4)).sin()

    for name in ("other", "one"):
        module, x = Flat(), torch.ones(4, requires_grad=True)
        expected = grad(module(x).sum(), x)[0]
        y = checkpoint(module, x)
        with torch.no_grad():
            getattr(module, name).mul_(3)
        if name == "other":
            assert torch.equal(grad(y.sum(), x)[0], expected)
        else:
            with pytest.raises(MutationError, match="the parameter 'one' of Flat"):
                y.sum().backward()
