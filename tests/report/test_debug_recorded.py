"""Debug mode of recorded regions: errors name the operator which needs a tensor, and its line in forward."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from ckpt_hooks import DeterminismError, MutationError, checkpoint_region, set_checkpoint_debug_enabled
from ckpt_hooks.policies import save_ops
from ckpt_hooks.report import trace
from tests.measure import leaf

from .test_debug import place

pytestmark = pytest.mark.usefixtures("no_gc")

aten = torch.ops.aten


def debugged(function, *args, policy=None, whole=None):
    with set_checkpoint_debug_enabled(True), checkpoint_region(name="block", policy=policy, replay_whole=whole):
        return function(*args)


def message_of(y):
    with pytest.raises(MutationError) as caught:
        y.sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("whole", [True, False])
def test_a_tensor_that_a_replay_reads(whole):
    def block(x, mask):
        h = x.sin().exp()
        h = h + mask  # reads it
        return h.cos().exp()

    mask = torch.ones(3, dtype=torch.float64)
    y = debugged(block, leaf(3), mask, whole=whole)
    mask.zero_()
    message = message_of(y)
    assert "needs (from outside of the region) has been modified by an inplace operation" in message.split("\n")[0]
    assert "is read by aten.add.Tensor(float64[3] on cpu, float64[3] on cpu) -> float64[3] on cpu" in message.split("\n")[1]
    assert message.split("\n")[2].startswith(f"  at {place(block, '# reads it')} in block()")


def test_a_parameter_and_its_module():
    """As a step of an optimizer before backward does."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ModuleList([Scale(), Scale()])

        def forward(self, x):
            with checkpoint_region():
                return self.scales[1](self.scales[0](x).sin()).exp()

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return x * self.weight  # saves it

    model = Model()
    with set_checkpoint_debug_enabled(True):
        y = model(leaf(3))
    with torch.no_grad():
        model.scales[1].weight.mul_(2)
    message = message_of(y)
    assert "aten.mul.Tensor(float64[3] on cpu, float64[3] on cpu)" in message
    assert f"{place(Scale, '# saves it')} in forward(), module scales.1 (Scale)" in message


def test_a_module_that_a_module_of_torch_calls():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Tanh()).double()
    y = debugged(model, leaf(3).exp())
    with torch.no_grad():
        model[0][0].weight.mul_(2)
    assert ", module Linear:" in message_of(y)


@pytest.mark.parametrize("calls", [1, 5, 6])
def test_a_module_that_calls_functions(calls):
    """It is searched among six callers of the line: each operator pays for that."""

    def add(x, other, calls):
        return x + other if calls == 1 else add(x, other, calls - 1)

    class Calling(nn.Module):
        def forward(self, x, other):
            return add(x, other, calls).sin().exp()

    module, other = Calling(), torch.ones(3, dtype=torch.float64)
    y = debugged(module, leaf(3).exp(), other)
    other.zero_()
    assert (f"{place(add, 'x + other')} in add(), module Calling" in message_of(y)) == (calls < 6)


def test_a_result_kept_by_a_policy():
    def block(x):
        h = x.sin()
        h = h.exp()  # kept
        return h, h.cos().exp()

    h, y = debugged(block, leaf(3), policy=save_ops(aten.exp.default))
    with torch.no_grad():
        h.detach().mul_(2)
    message = message_of(y)
    assert "The tensor is the result of aten.exp.default(float64[3] on cpu) -> float64[3] on cpu" in message
    assert place(block, "# kept") in message


@pytest.mark.parametrize("observed", [True, False])
def test_a_leaf_that_autograd_saved(observed):
    """Another object stands for a leaf in the graph while observers watch."""

    def block(x, w):
        h = x * 2
        return h * w  # saves it

    w = leaf(3)
    with trace() if observed else contextlib.nullcontext():
        y = debugged(block, leaf(3), w)
    with torch.no_grad():
        w.zero_()
    message = message_of(y)
    assert "Autograd saved the tensor for aten.mul.Tensor(float64[3] on cpu, float64[3] on cpu)" in message
    assert place(block, "# saves it") in message


def test_a_result_of_another_shape():
    def block(x):
        rows = (x > 0).nonzero()  # chooses
        return x.sin()[rows].exp()

    x = torch.tensor([1.0, 2.0, -3.0], requires_grad=True)
    y = debugged(block, x)
    x.data.neg_()
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    assert "In forward the operator was aten.nonzero.default(bool[3] on cpu) -> int64[2, 1] on cpu" in str(caught.value)
    assert place(block, "# chooses") in str(caught.value)


def test_values_are_the_same_and_modes_are_left():
    def block(x):
        return (x * 2).sin().exp().cos()

    x = leaf(3)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(torch.autograd.grad(debugged(block, x).sum(), x)[0], expected)
    with pytest.raises(KeyError), set_checkpoint_debug_enabled(True), checkpoint_region():
        raise KeyError
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
