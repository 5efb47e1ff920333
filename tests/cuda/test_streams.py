"""Regions and streams: on which one a recompute runs, what waits for it, and tensors that other streams use."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_region
from tests.cuda.device import (
    DEVICE,
    UNDER_POLICIES,
    WAYS,
    assert_as_eager,
    delay,
    differing,
    each,
    expected_of,
    needs_cuda,
    outcome,
    poison,
    tensor,
    under_policy,
)
from tests.cuda.device import region as as_region
from tests.measure import CountOps

pytestmark = [*needs_cuda, pytest.mark.usefixtures("unchecked")]

SIDE = 1024


@pytest.fixture(scope="module")
def side():
    """A stream besides the default one."""
    return torch.cuda.Stream()


def fork(side, *, late=False):
    """Returns a function whose results are made on two streams, from a tensor of the first; and what has it waited for."""

    def function(x):
        main = torch.cuda.current_stream()
        if late:
            delay()
        h = (x @ x).mul(1e-2).tanh()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            a = h.cos().sin()
            h.record_stream(side)
        return a, h.exp()

    return function


def through(function, side):
    """Returns a program that sends a gradient through both results of a function."""

    def program(run):
        x = tensor(SIDE, SIDE)
        torch.cuda.current_stream().wait_stream(side)
        poison(SIDE, SIDE)
        a, b = run(function, x)
        torch.cuda.current_stream().wait_stream(side)
        poison(SIDE, SIDE)
        found = grad([b, a], x, [torch.ones_like(b), torch.ones_like(a)])
        torch.cuda.synchronize()
        return [a, b, *found]

    return program


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@each({**WAYS, **UNDER_POLICIES})
def test_a_region_on_two_streams(run, late, side):
    """Twenty times, with not-a-number in all memory that is free: what is used too early, or let go of too early, shows."""
    program = through(fork(side, late=late), side)
    expected = expected_of(program)
    for _ in range(20):
        poison(SIDE, SIDE, count=6)
        assert differing(outcome(program, run), expected) == []


@each({**WAYS, **UNDER_POLICIES})
def test_a_region_wholly_on_another_stream(run, side):
    """The stream of forward is also that of backward."""

    def function(x):
        delay()
        return (x @ x).mul(1e-2).tanh().exp()

    def program(run):
        x = tensor(SIDE, SIDE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = run(function, x)
        torch.cuda.current_stream().wait_stream(side)
        found = grad(y.sum(), x)
        torch.cuda.synchronize()
        return [y, *found]

    expected = expected_of(program)
    for _ in range(5):
        poison(SIDE, SIDE, count=6)
        assert differing(outcome(program, run), expected) == []


@pytest.mark.parametrize("backward_there", [False, True], ids=["backward elsewhere", "backward there"])
@pytest.mark.parametrize("place", ["default", "side", "forked"])
def test_a_rerun_is_on_the_stream_of_forward(place, backward_there, side):
    """Whichever stream backward is called on, and whichever the node is of that asks first."""
    seen = []

    def function(x):
        seen.append(torch.cuda.current_stream())
        h = x.sin()
        if place != "forked":
            return h.exp()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return h.exp()

    def on(there):
        return torch.cuda.stream(side) if there else contextlib.nullcontext()

    x = tensor(64, 64)
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with on(place == "side"):
        y = checkpoint(function, x)
        forward = torch.cuda.current_stream()
    main.wait_stream(side)
    with on(backward_there):
        grad(y.sum(), x)
    main.wait_stream(side)
    assert seen == [forward] * 2
    assert torch.cuda.current_stream() == main


@each(WAYS)
def test_results_on_the_host(run, side):
    """Nodes whose outputs are on the host run on the thread that calls backward, with its stream."""

    def function(x):
        h = (x @ x).tanh()
        return (h.cpu() * 2).sin(), h.exp()

    def program(run):
        x = tensor(64, 64)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a, b = run(function, x)
        torch.cuda.synchronize()
        return [a, b, *grad(a.sum() + b.sum().cpu(), x)]

    assert_as_eager(program, run)


def products_of(x, other, *, recorded):
    """Returns a product, on another stream too where that is to be recorded."""
    y = x @ x
    if recorded:
        y.record_stream(other)
    return y.cos().exp()


@pytest.mark.parametrize("kind", ["function", "region"])
def test_recording_a_stream_runs_nothing_again(kind, side):
    """It is no write: what a policy keeps is kept, with it and without."""
    run = under_policy([torch.ops.aten.mm.default], recorded=kind == "region")
    counts = []
    for recorded in (False, True):
        x = tensor(SIDE, SIDE)
        y = run(lambda x, recorded=recorded: products_of(x, side, recorded=recorded), x)
        with CountOps() as ops:
            grad(y.sum(), x)
        counts.append(ops.counts["mm"])
    assert counts == [2, 2]  # those of backward


def test_recording_a_stream_keeps_nothing(side):
    """A region has no copy of an input for it."""
    kept, held = [], []
    for recorded in (False, True):
        h = tensor(SIDE, SIDE) * 2
        before = torch.cuda.memory_allocated()
        with checkpoint_region() as region:
            z = h.cos()
            if recorded:
                h.record_stream(side)
            w = z.exp()
        del z
        kept.append(region.kept())
        held.append(torch.cuda.memory_allocated() - before)
        del w, h
    assert kept[0] == kept[1]
    assert held[0] == held[1] == SIDE * SIDE * 4  # the result


@pytest.mark.parametrize("recorded", [False, True])
def test_recording_a_stream_is_right(recorded, side):
    """Bit for bit, in both kinds of region."""

    def program(run):
        x = tensor(SIDE, SIDE)
        y = run(lambda x: products_of(x * 1e-2, side, recorded=recorded), x)
        return [y, *grad(y.sum(), x)]

    for run in (checkpoint, as_region):
        assert_as_eager(program, run)


@each(WAYS)
def test_dropout_on_another_stream(run, side):
    """The generator of the device is one for all its streams."""

    def function(x):
        h = torch.nn.functional.dropout(x.sin(), 0.5)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = torch.nn.functional.dropout(h.cos(), 0.5)
            h.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        return a * torch.rand(a.shape, device=DEVICE), h.exp()

    assert_as_eager(through(function, side), run)
