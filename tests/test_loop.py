"""``checkpoint_loop``: few calls and few states, and everything as in a plain loop."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_hooks import checkpoint, checkpoint_loop, checkpoint_region, memory_ledger
from tests.measure import Calls, Log, leaf, same_bits


def fewest_calls(n, slots):
    """Griewank and Walther's formula, with the call of each step that backward uses."""
    repeats = next(r for r in itertools.count() if math.comb(slots + r, r) >= n)
    return repeats * n - math.comb(slots + repeats, slots + 1) + n


def plain_loop(step, state, n, slots=None):
    for _ in range(n):
        state = step(state)
    return state


def depth():
    frame, found = sys._getframe(1), 0
    while frame is not None:
        frame, found = frame.f_back, found + 1
    return found


@pytest.mark.parametrize(
    ("n", "slots"), [(1, 2), (2, 2), (3, 2), (7, 2), (20, 2), (10, 3), (25, 4), (60, 5), (40, 16), (8, 9), (9, 8)]
)
def test_calls_are_those_of_the_schedule(n, slots):
    w, x = leaf(4), leaf(4)
    step = Calls(lambda state: (state * w).sin())
    checkpoint_loop(step, x, n, slots).sum().backward()
    assert step.count == fewest_calls(n, slots)
    grads = x.grad, w.grad
    x.grad = w.grad = None
    plain_loop(step, x, n).sum().backward()
    assert all(map(same_bits, grads, (x.grad, w.grad)))


@pytest.mark.parametrize(("slots", "deepest"), [(16, 20), (2, 60)])
def test_256_steps(slots, deepest):
    """853 calls with 16 slots, and no deep stack of Python."""
    w, x, depths, here = leaf(4), leaf(4), Log(), depth()

    def step(state):
        depths.append(depth() - here)
        return (state * w).sin()

    checkpoint_loop(step, x, 256, slots).sum().backward()
    assert len(depths) == fewest_calls(256, slots)
    assert max(depths) <= deepest


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "most"), [(0.0, 22), (0.1, 30)])
def test_peak_is_of_slots_and_a_few_states(dropout, most):
    """With dropout a step saves a mask, and regions the states of the generator, of 5 KB each."""
    x = torch.randn(1 << 15, requires_grad=True)

    def step(state):
        return F.dropout(state.sin(), dropout)

    found = memory_ledger(lambda: checkpoint_loop(step, x, 256, 16).sum().backward())
    assert found.peak.nbytes / x.nbytes <= most


@dataclasses.dataclass
class State:
    """A state with a counter."""

    h: torch.Tensor
    t: int
    more: dict[str, list[torch.Tensor]]


Pair = collections.namedtuple("Pair", "h t")

STATES = {
    "tuple": (lambda h, t: (h, t), lambda s: s),
    "list": (lambda h, t: [h, t], lambda s: s),
    "named tuple": (Pair, lambda s: s),
    "dict": (lambda h, t: {"t": t, "h": h}, lambda s: (s["h"], s["t"])),
    "dataclass": (lambda h, t: State(h, t, {"a": [h * 1]}), lambda s: ((s.h + s.more["a"][0]) / 2, s.t)),
    "nested": (lambda h, t: ({"a": [h]}, (t, None)), lambda s: (s[0]["a"][0], s[1][0])),
}


class Rollout(nn.Module):
    """A recurrent cell over inputs, with dropout and running statistics, and the sum of its losses."""

    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.GRUCell(4, 4), nn.BatchNorm1d(4)
        self.inputs = torch.randn(24, 3, 4)

    def one(self, h, t):
        return F.dropout(self.norm(self.cell(self.inputs[t], h)), 0.3), t + 1


def run_rollout(loop, kind="tuple", slots=3):
    torch.manual_seed(0)
    model, h = Rollout(), torch.randn(3, 4, requires_grad=True)
    made, taken = STATES[kind]
    last, t = taken(loop(lambda state: made(*model.one(*taken(state))), made(h, 0), 24, slots))
    assert t == 24
    last.square().sum().backward()
    return [last, h.grad, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("kind", STATES)
def test_states_of_every_kind(kind):
    """Random numbers and running statistics are those of a plain loop."""
    assert all(map(same_bits, run_rollout(checkpoint_loop, kind), run_rollout(plain_loop, kind)))


FORMS = {
    "in checkpoint": lambda *given: checkpoint(lambda x: checkpoint_loop(given[0], x, *given[2:]), given[1]),
    "in a region": lambda *given: checkpoint_region()(checkpoint_loop)(*given),
    "of regions": lambda step, *given: checkpoint_loop(lambda state: checkpoint_region()(step)(state), *given),
    "of loops": lambda step, state, n, slots: checkpoint_loop(
        lambda one: checkpoint_loop(step, one, n // 6, slots), state, 6, slots
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nested(form):
    assert all(map(same_bits, run_rollout(form), run_rollout(plain_loop)))


def derivatives(loop):
    torch.manual_seed(0)
    w, x = leaf(3, 3), leaf(3)
    y = loop(lambda h: F.dropout((h @ w).tanh(), 0.2), x, 10, 3)
    first = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    again = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    (part,) = torch.autograd.grad(y[0], x, retain_graph=True)
    graph = torch.autograd.grad(y.sin().sum(), (x, w), create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in graph), (x, w))
    return [y, *first, *again, part, *graph, *second]


def test_every_way_of_backward():
    """``autograd.grad``, a second backward, one over a part, double backward."""
    assert all(map(same_bits, derivatives(checkpoint_loop), derivatives(plain_loop)))


def test_a_change_of_the_state_by_the_caller_is_not_seen():
    state = {"h": leaf(2), "scale": 2.0}
    expected = torch.autograd.grad(plain_loop(lambda s: {**s, "h": s["h"].sin() * s["scale"]}, state, 5)["h"].sum(), state["h"])
    y = checkpoint_loop(lambda s: {**s, "h": s["h"].sin() * s["scale"]}, state, 5, 2)["h"]
    state["scale"] = 3.0
    assert same_bits(torch.autograd.grad(y.sum(), state["h"])[0], expected[0])


def test_a_state_of_another_structure_in_each_step():
    def step(state):
        return [*state, (state[-1] * state[0]).sin()]

    state = [leaf(3)]
    expected = torch.autograd.grad(plain_loop(step, state, 6)[-1].sum(), state)
    assert same_bits(torch.autograd.grad(checkpoint_loop(step, state, 6, 2)[-1].sum(), state)[0], expected[0])
