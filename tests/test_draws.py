"""Draws of regions that run in several threads: each from a generator of the region's own."""

from __future__ import annotations

import _thread
import queue
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_region
from ckpt_hooks._ambient.threaded_draws import RecordDraws, ReplayDraws, num_draw_modes
from ckpt_hooks._core import threads
from ckpt_hooks._core.threads import RECENT
from tests.measure import CountOps, Log

RANDOM = {
    "rand": lambda x: torch.rand(3, 4),
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn(3, 4),
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(2, 9, (3, 4)) * x,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randperm": lambda x: x[torch.randperm(3)],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid().detach()),
    "bernoulli_": lambda x: torch.empty(3, 4).bernoulli_(0.5),
    "normal": lambda x: torch.normal(x.detach(), 0.5),
    "normal_": lambda x: torch.empty(3, 4).normal_(),
    "uniform_": lambda x: torch.empty(3, 4).uniform_(),
    "exponential_": lambda x: torch.empty(3, 4).exponential_(),
    "multinomial": lambda x: torch.multinomial(x.detach().sigmoid(), 2),
    "poisson": lambda x: torch.poisson(x.detach().exp()),
    "dropout": lambda x: F.dropout(x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "feature_dropout": lambda x: F.dropout1d(x[None], training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "gru": nn.GRU(4, 4, num_layers=2, dropout=0.5),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "beta": lambda x: torch.distributions.Beta(x.exp(), x.exp()).rsample(),
}


def leaf(size):
    """Returns a leaf with the same elements each time, for which nothing is drawn."""
    return torch.linspace(-1, 1, size, dtype=torch.float64).requires_grad_()


def value_of(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_recording_changes_nothing_and_replaying_gives_the_same_without_touching_the_stream(draw):
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    torch.manual_seed(5)
    expected, after = value_of(draw(x)), torch.get_rng_state()
    torch.manual_seed(5)
    with RecordDraws() as record:
        assert torch.equal(value_of(draw(x)), expected)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(6)
    state = torch.get_rng_state()
    with ReplayDraws(record.states):
        assert torch.equal(value_of(draw(x)), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert record.states


def test_explicit_generators_are_left_to_themselves():
    generator = torch.Generator().manual_seed(1)
    with RecordDraws() as record:
        found = torch.rand(3, generator=generator)
    assert record.states == []
    assert torch.equal(found, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def in_a_thread(function):
    """Runs a function on a thread of its own; returns what it returns."""
    results = Log()
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def draws_are_noted():
    """Whether a region that this thread runs now would note its draws one by one."""
    found = Log()
    checkpoint(lambda x: found.append(num_draw_modes()) or x.sin(), leaf(2))
    return found == [1]


class Worker:
    """A thread that runs one function after the other."""

    def __init__(self):
        self.tasks, self.results = queue.Queue(), queue.Queue()
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self):
        while (task := self.tasks.get()) is not None:
            self.results.put(task())
            del task

    def start(self, task):
        self.tasks.put(task)

    def run(self, task):
        self.start(task)
        return self.results.get(timeout=60)

    def stop(self):
        self.tasks.put(None)
        self.thread.join()


@pytest.fixture
def worker():
    """A worker, in a program whose main thread begins anew: a graph that another test has left counts no more."""
    threads._local.seat = None
    worker = Worker()
    yield worker
    worker.stop()


def pass_by(count):
    for _ in range(count):
        checkpoint(torch.sin, leaf(2))


def test_a_thread_alone_notes_no_draws(worker):
    def many():
        pass_by(RECENT)  # the main thread ran some
        return [draws_are_noted() for _ in range(3)]

    assert worker.run(many) == [False] * 3


def test_an_idle_thread_stops_counting(worker):
    worker.run(lambda: pass_by(1))
    assert draws_are_noted()
    pass_by(RECENT - 1)
    assert not draws_are_noted()
    worker.run(lambda: pass_by(1))
    assert draws_are_noted()


def test_a_thread_that_has_ended_does_not_count(worker):
    worker.run(lambda: pass_by(1))
    worker.stop()
    assert not draws_are_noted()


@pytest.mark.parametrize("region", [checkpoint, lambda function, x: checkpoint_region()(function)(x)])
def test_a_thread_counts_as_long_as_its_graph_is_alive(worker, region):
    ys = []
    worker.run(lambda: ys.append(region(lambda x: x.sin().exp(), leaf(2))))
    pass_by(RECENT)
    assert draws_are_noted()
    ys.pop().sum().backward()
    assert not draws_are_noted()


@pytest.mark.parametrize("region", [checkpoint, lambda function, x: checkpoint_region()(function)(x)])
def test_a_thread_counts_as_long_as_it_is_in_a_region(worker, region):
    inside, leave = threading.Event(), threading.Event()

    def function(x):
        inside.set()
        leave.wait(60)
        return x.sin()

    worker.start(lambda: region(function, leaf(2)) is not None)
    assert inside.wait(60)
    pass_by(RECENT)
    assert draws_are_noted()
    leave.set()
    assert worker.results.get(timeout=60)
    assert not draws_are_noted()


def test_a_thread_that_runs_backward_for_another_one_does_not_count(worker):
    found = Log()

    def function(x):
        return checkpoint(lambda x: found.append(num_draw_modes()) or x.sin().exp(), x).exp()

    y = checkpoint(function, leaf(2))
    worker.run(lambda: y.sum().backward())
    assert set(found) == {0}
    assert len(found) > 1
    assert not draws_are_noted()


class EngineThread:
    """A thread that Python has not started and that runs backward, as autograd has one for each device; it never ends."""

    def __init__(self):
        self.tasks, self.results = queue.Queue(), queue.Queue()
        _thread.start_new_thread(self._work, ())

    def _work(self):
        while (loss := self.tasks.get()) is not None:
            loss.backward()
            del loss
            self.results.put(None)

    def start(self, loss):
        self.tasks.put(loss)

    def wait(self):
        self.results.get(timeout=60)

    def run(self, loss):
        self.start(loss)
        self.wait()


@pytest.fixture
def engine_thread():
    """One, in a program whose main thread begins anew."""
    threads._local.seat = None
    thread = EngineThread()
    yield thread
    thread.tasks.put(None)


class Reentrant(torch.autograd.Function):
    """Runs a function as a region in backward, as regions in torch's reentrant checkpoint are run."""

    @staticmethod
    def forward(ctx, x, region, function):
        ctx.save_for_backward(x)
        ctx.region, ctx.function = region, function
        return function(x.detach())

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.region(ctx.function, x)
        return grad(y, x, gradient)[0], None, None


REGIONS = [checkpoint, lambda function, x: checkpoint_region()(function)(x)]


@pytest.mark.parametrize("region", REGIONS)
def test_a_thread_of_the_engine_does_not_count_when_its_backward_has_ended(engine_thread, region):
    for _ in range(3):
        x = leaf(2)
        assert not draws_are_noted()
        engine_thread.run(Reentrant.apply(checkpoint(lambda x: x.sin().exp(), x), region, lambda x: x.exp().sin()).sum())
        assert torch.equal(x.grad, grad(x.sin().exp().exp().sin().sum(), x)[0])
    assert len(threads._threads) >= 2  # it is there still
    assert not draws_are_noted()


@pytest.mark.parametrize("region", REGIONS)
def test_a_thread_of_the_engine_counts_as_long_as_a_graph_of_its_is_alive(engine_thread, region):
    kept = []

    def keeping(function, x):
        kept.append(region(lambda x: function(x.exp()), x))
        return kept[0]

    def run():
        engine_thread.run(Reentrant.apply(leaf(2).exp(), lambda f, x: (keeping(f, x), f(x))[1], torch.sin).sum())

    run()
    assert draws_are_noted()
    kept.clear()
    assert not draws_are_noted()


def test_a_thread_of_the_engine_counts_as_long_as_it_is_in_a_region(engine_thread):
    inside, leave = threading.Event(), threading.Event()

    def function(x):
        if not x.requires_grad:
            return x.sin()
        inside.set()
        leave.wait(60)
        return x.sin()

    engine_thread.start(Reentrant.apply(leaf(2), checkpoint, function).sum())
    assert inside.wait(60)
    assert draws_are_noted()
    leave.set()
    engine_thread.wait()
    assert not draws_are_noted()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_region_of_another_thread_gives_what_it_gives_on_the_main_one(depth):
    def function(x, left=depth):
        x = F.dropout(x.sin()).exp() * torch.rand_like(x)
        return x if left == 1 else F.dropout(checkpoint(function, x, left - 1))

    def run():
        x = leaf(8)
        torch.manual_seed(2)
        y = checkpoint(function, x)
        between = torch.rand(2)
        (gradient,) = grad(y.sum(), x)
        return y, between, gradient, torch.rand(2)

    assert all(map(torch.equal, run(), in_a_thread(run)))


def test_seeding_inside_of_a_region():
    def function(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            x = F.dropout(x.sin())
        return F.dropout(x.exp()).cos()

    def run():
        x = leaf(8)
        torch.manual_seed(2)
        return grad(checkpoint(function, x).sum(), x)[0]

    x = leaf(8)
    torch.manual_seed(2)
    expected = grad(function(x).sum(), x)[0]
    assert torch.equal(run(), expected)
    assert torch.equal(in_a_thread(run), expected)


def test_backward_inside_of_forward():
    def function(x):
        h = F.dropout(x.sin())
        (inner,) = grad(h.exp().sum(), x, create_graph=True)
        return F.dropout(h * inner).cos()

    def run(call):
        x = leaf(8)
        torch.manual_seed(2)
        return (*grad(call(function, x).sum(), x), torch.rand(1))

    expected = run(lambda function, x: function(x))
    assert all(map(torch.equal, run(checkpoint), expected))
    assert all(map(torch.equal, in_a_thread(lambda: run(checkpoint)), expected))


def test_a_program_of_one_thread_runs_without_a_mode():
    with CountOps() as ops:
        checkpoint(F.dropout, leaf(3))
    assert ops.counts["bernoulli_"] == 1
    x = leaf(3)
    y = checkpoint(lambda x: F.dropout(x.sin()).exp(), x)
    frame = next(n for n, _ in y.grad_fn.next_functions)
    assert frame is not None
    assert y.grad_fn._raw_saved_result.data[0].call.draws is None


KEPT = {
    "dropout": [torch.ops.aten.native_dropout.default],
    "rand": [torch.ops.aten.rand_like.default],
    "all": [torch.ops.aten.native_dropout.default, torch.ops.aten.rand_like.default, torch.ops.aten.bernoulli.default],
}


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a region"])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_a_policy_keeps_draws_where_several_threads_draw(worker, kept, nested):
    """What is skipped has drawn, for what draws after it."""

    def function(x):
        y = torch.native_dropout(x.sin(), 0.5, True)[0]
        z = torch.rand_like(y) * y.exp()
        return torch.native_dropout(z.cos() + torch.bernoulli(x.sigmoid().detach()), 0.5, True)[0].exp()

    inner = checkpoint(policy=kept)(function)
    region = (lambda x: checkpoint(lambda x: inner(x.cos()).sin(), x)) if nested else inner
    plain = (lambda x: function(x.cos()).sin()) if nested else function
    checkpoint(torch.sin, leaf(2))
    worker.run(lambda: checkpoint(torch.sin, leaf(2)))
    x = leaf(6)
    torch.manual_seed(5)
    y, after = region(x), torch.get_rng_state()
    worker.run(lambda: torch.rand(3))
    before = torch.get_rng_state()
    (found,) = grad(y.sum(), x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(found, grad(plain(x).sum(), x)[0])
    assert torch.equal(torch.get_rng_state(), after)
