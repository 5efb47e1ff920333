"""Regions in regions, in function frames, around function frames, and many in a row: how often operators run (Rule 13)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.autograd import grad
from torch.autograd.graph import save_on_cpu

from ckpt_hooks import CheckpointError, DeterminismError, checkpoint, checkpoint_region, is_recomputing
from ckpt_hooks.policies import dots_saveable
from tests.measure import CountOps, Log, leaf
from tests.regions import assert_as_eager, assert_same, plain, replayed


@contextlib.contextmanager
def little_stack(frames=60):
    """Leaves room for some more calls within each other, and no more."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


# Counts


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_long_region(count):
    """Operators of which each reads the one before, brought back in a loop and let go without recursion."""
    x = torch.ones(1, requires_grad=True)
    with checkpoint_region():
        y = x
        for _ in range(count):
            y = y.sin()
    with little_stack():
        (found,) = grad(y.sum(), x, retain_graph=True)
        del y
    y = x
    for _ in range(count):
        y = y.sin()
    assert torch.equal(found, grad(y.sum(), x)[0])


# Mixes of frames


def test_a_region_in_a_function_frame_costs_its_rerun_and_its_replay():
    """The rerun of the function makes a region anew, which nobody asks; the handles are those of forward."""
    x, calls = leaf(3), Log()

    def function(x):
        calls.append(1)
        h = x.sin()
        with checkpoint_region():
            h = h.exp().tan()
        return h.cos()

    y = checkpoint(function, x)
    with CountOps() as ops:
        (found,) = grad(y.sum(), x)
    assert len(calls) == 2
    assert torch.equal(found, grad(x.sin().exp().tan().cos().sum(), x)[0])
    # Once in the rerun, once in the replay.
    assert (ops.counts["exp"], ops.counts["tan"]) == (2, 2)


INNER = {
    "a region": lambda function, h, mask: _in_region(function, h, mask),
    "a region with a policy": lambda function, h, mask: _in_region(function, h, mask, policy=dots_saveable),
    "a call with a policy": lambda function, h, mask: checkpoint(policy=dots_saveable)(function)(h, mask),
    "a plain checkpoint": lambda function, h, mask: checkpoint(function, h, mask),
}


def _in_region(function, *args, **options):
    with checkpoint_region(**options):
        return function(*args)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("levels", [1, 2])
def test_a_cache_that_forward_fills_inside_of_a_plain_checkpoint(inner, levels):
    """The rerun of the outer one finds the tables there, which its regions then get from outside: it has no need of these."""

    def program(run, outer):
        @functools.lru_cache
        def table(scale):
            return (torch.arange(64.0, dtype=torch.float64).reshape(8, 8) * scale).cos()

        def block(h, mask):
            h = h.sin() @ w * table(0.5) + mask * 2
            return (h * table(0.25)).tanh()

        def layers(h):
            for _ in range(3):
                h = run(block, h, h.detach() > 0).exp().sin()
            return h

        y = outer(layers, x)
        return [y.detach(), *grad(y.sum(), [x, w])]

    def nested(function, h):
        for _ in range(levels - 1):
            function = functools.partial(checkpoint, function)
        return checkpoint(function, h)

    x, w = leaf(8, 8), leaf(8, 8)
    expected = program(lambda function, *args: function(*args), lambda function, h: function(h))
    assert_same(program(INNER[inner], nested), expected)


@pytest.mark.parametrize("learned", [False, True])
def test_a_table_may_be_all_that_a_region_gets_from_outside_in_a_rerun(learned):
    """But for a table with a graph, which would be another tensor's."""
    x = leaf(4)

    @functools.lru_cache
    def table():
        return torch.arange(4, dtype=x.dtype).requires_grad_(learned).cos()

    def function(x):
        with checkpoint_region():
            h = (x.sin() * table()).tanh()
        return h.exp().sin()

    y = checkpoint(function, x)
    with pytest.raises(DeterminismError, match="given other tensors") if learned else contextlib.nullcontext():
        assert torch.equal(*grad(y.sum(), x), *grad(function(x).sum(), x))


@pytest.mark.parametrize("size", [None, 1])
def test_tables_that_are_not_to_be_told_from_what_the_region_had(size):
    """Where tensors of one kind are read at one place, any might be meant; what a cache has thrown out is missing."""

    @functools.lru_cache(size)
    def table(number):
        return torch.full((3,), 1.0 + number, dtype=torch.float64)

    def function(x):
        with checkpoint_region():
            return ((x.detach() * 2 * table(0)) * table(1)) * x

    table(0)
    y = checkpoint(function, leaf(3))
    with pytest.raises(DeterminismError, match=r"given other tensors|different number of tensors"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["region in checkpoint", "checkpoint in region", "sandwich"])
def test_torchs_own_checkpoint(order, reentrant):
    """Its frames around a region and in one, of both of its kinds."""
    x, w = leaf(4, 4), leaf(4, 4)

    def program(region):
        def checkpointed(function, *args):
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=reentrant)

        def in_region(x, w):
            with region():
                return F.dropout((x @ w).sin(), 0.5).mul_(2).exp()

        if order == "region in checkpoint":
            return checkpointed(in_region, x.tanh(), w).cos()
        with region():
            if order == "checkpoint in region":
                return checkpointed(lambda x, w: F.dropout((x @ w).sin(), 0.5), x.tanh(), w).cos()
            return checkpointed(lambda x, w: checkpointed(in_region, x.tanh(), w).cos(), x.exp(), w).tanh()

    def run(region):
        torch.manual_seed(0)
        y = program(region)
        y.sum().backward()
        found = [y.detach(), x.grad, w.grad]
        x.grad = w.grad = None
        return found

    assert_same(run(checkpoint_region), run(plain))


# Left out of order


@pytest.mark.parametrize("count", [2, 5])
def test_regions_open_in_several_tasks_at_once(count):
    """One that is left while others within are open goes on around these, which changes no result."""
    x = leaf(4)

    def program(region):
        async def task(number):
            h = x * number
            with region():
                h = h.sin()
                await asyncio.sleep(0)
                h = h.exp()
                for _ in range(number % 3):
                    await asyncio.sleep(0)
                h = h.cos()
            h = h.tanh()
            with contextlib.suppress(ValueError), region():
                await asyncio.sleep(0)
                h = h.sin()
                if number == 2:
                    raise ValueError
            await asyncio.sleep(0)
            return h, *grad(h.exp().sum(), x, retain_graph=True)

        async def tasks():
            return await asyncio.gather(*map(task, range(1, 1 + count)))

        return torch.stack([tensor for found in asyncio.run(tasks()) for tensor in found])

    assert_as_eager(program, x)
    assert_nothing_open()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("other", [checkpoint_region, CountOps, save_on_cpu], ids=str)
def test_generators_in_turns_with_something_else_open(other, enabled):
    """Hooks and modes of the user's that began within stay; so do regions that began inside a region entered without grad."""
    x = leaf(4)

    def steps(manager, number):
        with manager():
            h = (x * number).sin()
            yield
            h = h.exp().cos()
            yield
        yield h.tanh()

    def program(region):
        first, second = steps(region, 1), steps(plain if other is checkpoint_region and region is plain else other, 2)
        with torch.set_grad_enabled(enabled):
            next(first)
        next(second), next(first)
        h = next(first)
        h = h.sin().exp()
        next(second)
        return h * next(second)

    assert_as_eager(program, x)
    assert_nothing_open()


def test_a_region_left_inside_of_a_function_frame_ends_behind_it():
    x, results = leaf(4), []

    def steps():
        with checkpoint_region():
            yield x.sin().exp()
        yield None

    def function(h):
        if not is_recomputing():
            next(generator)
        return h.cos().exp()

    generator = steps()
    results.append(checkpoint(function, next(generator)))
    assert_nothing_open()
    assert torch.equal(*grad(results[0].sum(), x), *grad(x.sin().exp().cos().exp().sum(), x))


def leave_twice(inner):
    leave = inner.__exit__
    inner.__enter__()
    leave(None, None, None)
    leave(None, None, None)


def leave_unentered(inner):
    inner.__exit__(None, None, None)


def leave_elsewhere(inner):
    """Begins a generator on another thread, which has a region again after the attempt to leave the first one here."""

    def steps():
        with inner:
            yield

    def begin():
        next(generator)
        begun.set()
        assert left.wait(60)
        with checkpoint_region():
            pass
        clean.append(torch._C._len_torch_dispatch_stack() == 0)

    generator, clean, begun, left = steps(), [], threading.Event(), threading.Event()
    thread = threading.Thread(target=begin)
    thread.start()
    assert begun.wait(60)
    try:
        next(generator)
    finally:
        left.set()
        thread.join()
        assert clean == [True]


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (leave_twice, "was exited before"),
        (leave_unentered, "never entered"),
        (leave_elsewhere, "entered on another thread"),
    ],
)
def test_to_leave_a_region_wrongly_is_an_error_and_leaves_others_open(leave, words):
    x = leaf(4)

    def program(region):
        with region():
            h = x.sin().exp()
            if region is checkpoint_region:
                with pytest.raises(CheckpointError, match=rf"region '.*inner'.*{words}"):
                    leave(checkpoint_region(name="inner"))
            h = h.cos().exp()
        return h.tanh()

    assert_as_eager(program, x)
    assert replayed(program, x) == {"sin": 1, "exp": 2, "cos": 1}
    assert_nothing_open()


def on_another_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("call", [lambda function: function(), on_another_thread], ids=["here", "on another thread"])
def test_a_function_that_returns_with_a_region_open_is_an_error(call):
    """What comes after it would be the region's, and no rerun of the function has that. Others may still end in any order."""
    x = leaf(4)

    def steps():
        with checkpoint_region(name="inner"):
            yield x.sin().exp()
            yield x.cos()

    generator, outer, later = steps(), checkpoint_region(), checkpoint_region()
    outer.__enter__()
    h = x.exp()
    with pytest.raises(CheckpointError, match=r"region 'region/.*lambda>'.*without exiting region '.*/inner'"):
        checkpoint(lambda x: next(generator) * x, x)
    h = h.sin().exp()
    next(generator)
    call(generator.close)
    later.__enter__()
    outer.__exit__(None, None, None)
    h = h.tanh()
    later.__exit__(None, None, None)
    assert_nothing_open()
    assert torch.equal(*grad(h.sum(), x), *grad(x.exp().sin().exp().tanh().sum(), x))


def test_a_generator_closed_on_another_thread_says_nothing_and_keeps_its_exception():
    x = leaf(4)

    def steps():
        with checkpoint_region():
            yield x.sin().exp()

    generator = steps()
    h = next(generator)
    on_another_thread(generator.close)
    h = h.cos().exp()
    with checkpoint_region():
        h = h.tanh()
    assert_nothing_open()
    assert torch.equal(*grad(h.sum(), x), *grad(x.sin().exp().cos().exp().tanh().sum(), x))


def assert_nothing_open():
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


# Saved-tensor hooks of others


@pytest.mark.parametrize("pack", [torch.clone, lambda tensor: tensor], ids=["copying", "handing back"])
@pytest.mark.parametrize("where", ["around all", "between", "around each"])
def test_hooks_around_a_region_whose_statistics_are_written_without_a_version(where, pack):
    """Autograd saves running statistics in eval mode, and batch norm moves no version of theirs: hooks may have copied them."""
    x, other = leaf(4, 2), leaf(3, 2)

    def hooks(place):
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t) if where == place else contextlib.nullcontext()

    def program(region):
        norm = torch.nn.BatchNorm1d(2).double().eval()
        with hooks("around all"), region(), hooks("between"):
            with hooks("around each"), region():
                y = norm(x)
            norm.train()
            with hooks("around each"), region():
                norm(other)
        return y.square()

    assert_as_eager(program, x)


def test_a_region_inside_reads_what_the_region_around_overwrites_later():
    """A replay of the outer region writes again, and the inner one asks for what was there before."""
    x = leaf(4)

    def program(region):
        with region():
            h = x * 3
            with region():
                y = (h * 2).exp()
            h.add_(1)
            return y + h * x

    assert_as_eager(program, x)


def test_a_saved_tensor_that_is_looked_at_outside_of_a_backward():
    """The regions around bring back what it is made of, for this once."""
    x = leaf(4)
    with checkpoint_region():
        h = x.sin()
        with checkpoint_region():
            y = (h * h.cos()).exp()
            z = y.sin()
    expected = (x.sin() * x.sin().cos()).exp()
    assert torch.equal(z.grad_fn._saved_self, expected)
