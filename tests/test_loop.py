"""``checkpoint_loop``: few calls and few states, and everything as in a plain loop."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from ckpt_hooks import checkpoint, checkpoint_loop, checkpoint_region, create_selective_checkpoint_contexts, memory_ledger
from ckpt_hooks.policies import nothing_saveable
from tests.measure import Calls, CountOps, Log, leaf, same_bits


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


# Inputs and outputs


def scan(step, state, n=None, slots=None, *, xs):
    """The plain loop, with the words of ``jax.lax.scan``."""
    rows = xs if isinstance(xs, list) else None
    outputs = []
    for t in range(len(xs) if rows else n):
        state, y = step(state, rows[t] if rows else at(xs, t))
        outputs.append(y)
    return state, stacked(outputs)


def at(xs, t):
    if isinstance(xs, torch.Tensor):
        return xs[t]
    if isinstance(xs, dict):
        return {name: at(entry, t) for name, entry in xs.items()}
    if isinstance(xs, tuple):
        entries = [at(entry, t) for entry in xs]
        return type(xs)(*entries) if hasattr(xs, "_fields") else tuple(entries)
    if dataclasses.is_dataclass(xs):
        return type(xs)(*(at(getattr(xs, field.name), t) for field in dataclasses.fields(xs)))
    return xs


def stacked(outputs):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(outputs)
    if isinstance(first, dict):
        return {name: stacked([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(map(stacked, zip(*outputs, strict=True)))
    return None if first is None else outputs


@dataclasses.dataclass
class Inputs:
    """Inputs with something for each step."""

    x: torch.Tensor
    scale: float


INPUTS = {
    "tensor": (lambda x: x, lambda one: one),
    "tuple": (lambda x: (x, x.square()), lambda one: one[0] + one[1]),
    "named tuple": (lambda x: Pair(x, x.square()), lambda one: one.h + one.t),
    "dict": (lambda x: {"a": x, "b": (x, 2.0)}, lambda one: one["a"] * one["b"][1] + one["b"][0]),
    "dataclass": (lambda x: Inputs(x, 3.0), lambda one: one.x * one.scale),
    "list": (lambda x: [*x.unbind(0)], lambda one: one),
    "list of dicts": (lambda x: [{"x": row, "t": t} for t, row in enumerate(x)], lambda one: one["x"] * one["t"]),
}
OUTPUTS = {
    "tensor": lambda h, x: h.square().mean(),
    "tuple": lambda h, x: (h.sin(), x.cos()),
    "dict": lambda h, x: {"h": h * 1, "more": (h.sum(), None), "n": 3},
    "nothing": lambda h, x: None,
    "numbers": lambda h, x: 2.5,
}


class Scanned(nn.Module):
    """A cell with dropout and running statistics, whose steps have inputs and outputs."""

    def __init__(self, taken, output):
        super().__init__()
        self.cell, self.norm = nn.GRUCell(4, 4), nn.BatchNorm1d(4)
        self.taken, self.output = taken, output

    def forward(self, h, given):
        x = self.taken(given)
        h = F.dropout(self.norm(self.cell(x, h)), 0.3)
        return h, self.output(h, x)


def run_scan(loop, inputs="tensor", output="tensor", n=11, slots=3, wrap=lambda step: step):
    torch.manual_seed(0)
    made, taken = INPUTS[inputs]
    model, h = Scanned(taken, OUTPUTS[output]), torch.randn(3, 4, requires_grad=True)
    x = torch.randn(n, 3, 4, requires_grad=True)
    last, ys = loop(wrap(model), h, n, slots, xs=made(x))
    tensors = [part for part in flat(ys) if isinstance(part, torch.Tensor)]
    sum(tensor.square().sum() for tensor in (last, *tensors)).backward()
    others = [part for part in flat(ys) if not isinstance(part, torch.Tensor)]
    gradients = [x.grad, h.grad, *(parameter.grad for parameter in model.parameters())]
    return [last, *tensors, *gradients, *model.buffers(), torch.get_rng_state()], others


def flat(value):
    if isinstance(value, dict):
        return [part for entry in value.values() for part in flat(entry)]
    return [part for entry in value for part in flat(entry)] if isinstance(value, (list, tuple)) else [value]


def assert_as_scan(**given):
    found, others = run_scan(checkpoint_loop, **given)
    given.pop("wrap", None)
    expected, expected_others = run_scan(scan, **given)
    assert all(map(same_bits, found, expected))
    assert others == expected_others


@pytest.mark.parametrize("inputs", INPUTS)
def test_inputs_of_every_kind(inputs):
    assert_as_scan(inputs=inputs)


@pytest.mark.parametrize("output", OUTPUTS)
def test_outputs_of_every_kind(output):
    assert_as_scan(output=output)


@pytest.mark.parametrize(("n", "slots"), [(1, 2), (2, 2), (5, None), (16, None), (16, 16), (16, 40), (256, 16)])
def test_numbers_of_steps_and_slots(n, slots):
    assert_as_scan(n=n, slots=slots)


WRAPS = {
    "a policy": lambda step: checkpoint(policy=[torch.ops.aten.addmm.default])(step),
    "on the host": lambda step: checkpoint(offload_inputs=True)(step),
    "values": lambda step: checkpoint(determinism_check="values")(step),
    "a function": lambda step: checkpoint(name="step")(lambda h, x: step(h, x)),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_options_of_the_regions_of_a_loop(wrap):
    assert_as_scan(wrap=wrap)


def test_calls_with_inputs_are_those_of_the_schedule():
    w, x = leaf(4), leaf(60, 4)
    step = Calls(lambda state, row: ((state * w + row).sin(), state.sum()))
    _, ys = checkpoint_loop(step, leaf(4), xs=x, slots=5)
    ys.sum().backward()
    assert step.count == fewest_calls(60, 5)
    assert ys.shape == (60,)


def test_a_policy_is_for_the_steps():
    """What it keeps does not run again in the backward of a step; without a policy a step is in no region of its own."""
    w, x, products = leaf(4, 4), leaf(9, 4), []
    kept = [torch.ops.aten.mv.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    for options in ({}, {"policy": kept}, {"context_fn": contexts}, {"policy": nothing_saveable}):
        step = checkpoint(**options)(lambda h, row: ((w @ h + row).sin(), None))
        with CountOps() as ops:
            h, _ = checkpoint_loop(step, leaf(4), xs=x, slots=3)
        before = ops.counts["mv"]
        with ops:
            h.sum().backward()
        products.append((before, ops.counts["mv"]))
    assert [before for before, _ in products] == [9, 9, 9, 9]
    (_, plain), *kept, (_, nothing) = products
    assert [plain - nothing, *(after - nothing for _, after in kept)] == [-9, -9, -9]


def test_no_steps():
    x = torch.ones(0, 3)
    assert checkpoint_loop(lambda state, row: (state, row), 1.5, xs=x) == (1.5, None)
    assert checkpoint_loop(lambda state, row: (state, row), 1.5, xs=[]) == (1.5, None)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_error_says_in_which_step(when):
    calls = Log()

    def step(h, x):
        calls.append(int(x[1]))
        if int(x[1]) == 5 and (when == "forward" or [*calls].count(5) > 1):
            raise RuntimeError("planned")
        return (h * x[0]).sin(), None

    x = torch.stack([torch.ones(9), torch.arange(9.0)], 1)
    with pytest.raises(RuntimeError, match="planned") as caught:
        checkpoint_loop(step, leaf(3), xs=x, slots=2)[0].sum().backward()
    notes = [note for note in caught.value.__notes__ if "checkpoint_loop." in note]
    assert notes == ["In step 5 of checkpoint_loop."]


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["ours", "torch's checkpoint"])
def test_peaks_with_inputs_and_outputs(loop):
    """Of a loop of torch's checkpoint for each step all states are held; here the slots, and a few in transit."""
    x = torch.randn(64, 1 << 12)
    state = torch.randn(1 << 12, requires_grad=True)

    def step(h, row):
        return (h * row).sin().cos(), h.mean()

    def run():
        if loop == "ours":
            h, ys = checkpoint_loop(step, state, xs=x, slots=8)
        else:
            h, ys = state, []
            for row in x:
                h, y = torch.utils.checkpoint.checkpoint(step, h, row, use_reentrant=False)
                ys.append(y)
            ys = torch.stack(ys)
        (h.sum() + ys.sum()).backward()

    states = memory_ledger(run).peak.nbytes / state.nbytes
    assert states <= 16 if loop == "ours" else states >= 64


class Taking(nn.Module):
    """Takes its next input from an iterator."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.scale = rows, nn.Parameter(torch.full((3,), 0.5))

    def forward(self, h):
        return (h * self.scale + next(self.rows)).sin()


TAKES = {
    "module": lambda model: lambda h: checkpoint(model, h),
    "closure": lambda model: lambda h, rows=model.rows: checkpoint(lambda x: (x * model.scale + next(rows)).sin(), h),
    "recorded": lambda model: checkpoint_region()(model),
}


ITERATORS = {
    "list": lambda rows: iter([*rows]),
    "tuple": lambda rows: iter((*rows,)),
    "reversed list": lambda rows: reversed([*rows]),
    "reversed tuple": lambda rows: reversed((*rows,)),
    "map of bytes": lambda rows: map(rows.__getitem__, iter(bytes(range(len(rows))))),
    "map of digits": lambda rows: map(rows.__getitem__, map(int, "01234567")),
    "filter": lambda rows: filter(torch.any, iter([*rows])),
    "map of zip": lambda rows: map(sum, zip(iter([*rows]), reversed([*rows]), strict=True)),
}


@pytest.mark.parametrize("kind", ITERATORS)
@pytest.mark.parametrize("form", [*TAKES, "loop"])
def test_an_iterator_is_set_back(form, kind):
    """For the rerun, and then where the program has it; it may go on between forward and backward."""

    def run(is_plain):
        model, h = Taking(ITERATORS[kind](torch.arange(24.0).view(8, 3))), torch.ones(3, requires_grad=True)
        if form == "loop":
            y = (plain_loop if is_plain else checkpoint_loop)(model, h, 5, 2)
        else:
            y = plain_loop(model if is_plain else TAKES[form](model), h, 5)
        after = next(model.rows)
        y.sum().backward()
        return [y, h.grad, model.scale.grad, after, next(model.rows)]

    for _ in range(3):
        assert all(map(same_bits, run(False), run(True)))
