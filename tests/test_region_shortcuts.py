"""Ways written out for speed, in recorded regions: what they leave is what the long way leaves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint_region
from ckpt_hooks._recorded import replay, writes
from ckpt_hooks._recorded.tape import Tape
from ckpt_hooks._recorded.values import Store, Value
from ckpt_hooks._tensors.held_tensors import HeldTensor
from tests.regions import plain


def slots_in(thing):
    return {name: getattr(thing, name) for name in type(thing).__slots__ if name != "__weakref__" and hasattr(thing, name)}


def described(value, tables):
    """Returns all that a value, its storage and its held tensor consist of, without identities."""
    parts = {**slots_in(value), "store": slots_in(value.store), "saved": slots_in(value.saved)}
    assert type(value) is Value
    assert type(value.store) is Store
    assert type(value.saved) is HeldTensor
    parts["saved"]["memory"] = parts["saved"]["memory"].data_ptr(), parts["saved"]["memory"].requires_grad
    parts["counter"] = parts["counter"] is value.store
    parts["tensor"] = parts["tensor"]()
    parts["store"]["members"] = [member() for member in parts["store"]["members"]]
    parts["store"]["held"] = [holder() is value for holder in parts["store"]["held"]]
    tensor = parts["tensor"]
    return parts, tables.inputs[id(tensor)]() is value, tables.stores[value.store.address] is value.store


def values_of(monkeypatch, parameters, *, is_short):
    """Returns the values of parameters in a region, by the short way or by the long way."""
    found, leaf, value_of = [], Tape._leaf, Tape.value_of
    shorts = []

    def noting_leaf(self, parameter, key):
        value = leaf(self, parameter, key) if is_short else None
        shorts.append(value is not None)
        return value

    def noting(self, tensor, *args):
        value = value_of(self, tensor, *args)
        if isinstance(tensor, nn.Parameter):
            found.append(described(value, self.tables))
        return value

    monkeypatch.setattr(Tape, "_leaf", noting_leaf)
    monkeypatch.setattr(Tape, "value_of", noting)
    with checkpoint_region():
        kept = [function(parameter) for parameter in parameters for function in (torch.sin, torch.cos)]
    monkeypatch.undo()
    del kept
    return found, sum(shorts)


def test_parameters_of_a_region(monkeypatch):
    both = nn.Parameter(torch.ones(4))
    parameters = [
        nn.Parameter(torch.ones(2, 3)),
        nn.Parameter(torch.ones(3, 2).t()),
        nn.Parameter(torch.ones(3), requires_grad=False),
        both,
        nn.Parameter(both.data[1:]),  # in the same memory
    ]
    short, count = values_of(monkeypatch, parameters, is_short=True)
    long, none = values_of(monkeypatch, parameters, is_short=False)
    assert short == long
    assert len(short) == 2 * len(parameters)
    assert (count, none) == (3, 0)


@pytest.mark.parametrize("kind", ["sparse", "in place"])
def test_parameters_for_the_long_way(kind):
    if kind == "sparse":
        parameter = nn.Parameter(torch.eye(3).to_sparse())
    else:
        parameter = nn.Parameter(torch.eye(3))
        parameter.detach_().requires_grad_()
        with torch.inference_mode():
            parameter = nn.Parameter(torch.eye(3))
    tapes, enter = [], Tape.__init__

    def noting(self, *args, **kwargs):
        enter(self, *args, **kwargs)
        tapes.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "__init__", noting)
        with checkpoint_region():
            assert tapes[0]._leaf(parameter, id(parameter)) is None


class Counting(nn.Module):
    """A layer with statistics, a count of batches, and one of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.first = self.steps[:1]

    def forward(self, x):
        self.steps.add_(1)
        x = self.norm(self.layer(x)).sin()
        count = self.steps[0]
        self.first.mul_(2)  # the tape has met the memory
        return x * self.first + count


def step_of(region):
    torch.manual_seed(0)
    model, x = Counting(), torch.randn(8, 4, requires_grad=True)
    for _ in range(2):
        with region():
            y = model(x)
        y.square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()], [
        buffer._version for buffer in model.buffers()
    ]


def test_writes_to_buffers_that_the_tape_has_not_met(monkeypatch):
    expected, versions = step_of(plain)
    met = []
    is_unmet = writes._is_unmet
    for answer in (lambda *args: met.append(is_unmet(*args)) or met[-1], lambda *args: False):
        monkeypatch.setattr(writes, "_is_unmet", answer)
        found, their_versions = step_of(checkpoint_region)
        assert all(map(torch.equal, found, expected))
        assert their_versions == versions
    assert met.count(True) == 4  # the counts of batches and of steps, in two steps
    assert met.count(False) == 2


def test_new_memory_for_statistics_keeps_no_order(monkeypatch):
    """A replay normalizes into memory of its own, which nothing else reads."""
    plans, plan_for = [], replay.plan_for

    def noting(*args, **kwargs):
        plan, work = plan_for(*args, **kwargs)
        plans.append((plan.in_order, plan.written, plan.asked))
        return plan, work

    monkeypatch.setattr(replay, "plan_for", noting)
    step_of(checkpoint_region)
    assert plans
    assert all(plan == (False, set(), set()) for plan in plans)


class Doubled(torch.autograd.Function):
    """Saves what it is given, and returns twice as much."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2 + 0 * ctx.saved_tensors[0]


def test_a_write_to_what_a_custom_function_has_made():
    """The memory is looked at as that of operators is."""
    found = []
    for region in (plain, checkpoint_region):
        x = torch.linspace(-1, 1, 6).requires_grad_()
        with region():
            h = Doubled.apply(x * 2)
            part = h[1:3]
            h.add_(part.sum())
            y = h.sin() * 2
        y.exp().sum().backward()
        found.append([y, x.grad])
    assert all(map(torch.equal, *found))
