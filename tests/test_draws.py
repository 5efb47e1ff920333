"""Random draws: each kind in both kinds of region, and threads that draw from the default generator beside regions."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

from ckpt_hooks import DeterminismError, checkpoint, checkpoint_region, is_recomputing
from ckpt_hooks._function import explain
from tests.measure import Log
from tests.test_threads import in_threads

GRU = nn.GRU(4, 4, num_layers=2, dropout=0.5)
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
    "multinomial": lambda x: torch.multinomial(x.detach().sigmoid(), 2).repeat(1, 2),
    "poisson": lambda x: torch.poisson(x.detach().exp()),
    "dropout": lambda x: F.dropout(x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "feature_dropout": lambda x: F.dropout1d(x[None], training=True)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    "gru": lambda x: GRU(x)[0],
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "beta": lambda x: torch.distributions.Beta(x.exp(), x.exp()).rsample(),
}
FORMS = {"checkpoint": checkpoint, "recorded": lambda function, x: checkpoint_region()(function)(x)}


def leaf(*size):
    """Returns a leaf with the same elements each time, for which nothing is drawn."""
    return torch.linspace(-1, 1, torch.Size(size).numel()).reshape(size).requires_grad_()


def run(form, function, seed=5, *, between=lambda: None):
    """Returns loss, gradient and the next random number, with something done between forward and backward."""
    x = leaf(3, 4)
    torch.manual_seed(seed)
    y = form(function, x)
    after = torch.get_rng_state()
    between()
    before = torch.get_rng_state()
    (gradient,) = grad((y * y).sum(), x)
    assert torch.equal(torch.get_rng_state(), before)
    return y, gradient, after


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_a_recompute_draws_the_numbers_of_forward_and_moves_no_stream(draw, form):
    def function(x):
        return (x.sin() * draw(x)).exp() * torch.rand_like(x)

    expected = run(lambda function, x: function(x), function)
    assert same(run(form, function, between=lambda: torch.rand(3)), expected)
    results = []
    in_threads(lambda: results.append(run(form, function)))
    assert same(results[0], expected)


@pytest.fixture
def drawing_thread():
    """A thread that draws all the time, as one that augments batches."""
    done, drawing = threading.Event(), threading.Event()

    def draw():
        while not done.is_set():
            torch.rand(64)
            drawing.set()

    thread = threading.Thread(target=draw)
    thread.start()
    drawing.wait()
    yield
    done.set()
    thread.join()


@pytest.fixture
def not_warned(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(explain, "_has_warned", False)


NO_DRAW = {
    "operators": lambda x: x.sin().exp().cos(),
    "dropout of nothing": lambda x: F.dropout(x.sin(), 0.0).exp(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0].exp(),
    "a generator of its own": lambda x: x.sin() * torch.rand(3, 4, generator=torch.Generator().manual_seed(1)),
    "a region": lambda x: checkpoint(lambda x: x.sin().exp(), x).cos(),
}


@pytest.mark.usefixtures("drawing_thread")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("function", NO_DRAW.values(), ids=NO_DRAW)
def test_a_thread_that_draws_all_the_time_beside_regions_that_draw_nothing(function, form):
    x = leaf(3, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "another thread draws")
        (expected,) = grad(function(x).sum(), x)
        for _ in range(60):
            assert torch.equal(grad(form(function, x).sum(), x)[0], expected)


def draws_elsewhere(function, in_forward, in_rerun):
    """Returns a function during which another thread draws, and is through before the function goes on."""

    def beside(x):
        count = in_rerun if is_recomputing() else in_forward
        if count:
            thread = threading.Thread(target=torch.rand, args=(count,))
            thread.start()
            thread.join()
        return function(x)

    return beside


@pytest.fixture
def idle_thread():
    """Another thread, which does nothing."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.usefixtures("idle_thread", "not_warned")
@pytest.mark.parametrize(("in_forward", "in_rerun"), [(0, 3), (2, 3)])
def test_a_draw_of_another_thread_is_told_once(in_forward, in_rerun):
    x = leaf(3, 4)
    function = draws_elsewhere(lambda x: x.sin().exp(), in_forward, in_rerun)
    (expected,) = grad(x.sin().exp().sum(), x)
    with pytest.warns(UserWarning, match=r"give that thread a generator of its own"):
        assert torch.equal(grad(checkpoint(function, x).sum(), x)[0], expected)
    assert torch.equal(grad(checkpoint(function, x).sum(), x)[0], expected)  # and nothing more is said


@pytest.mark.usefixtures("idle_thread")
@pytest.mark.parametrize("in_forward", [0, 2, 3])
def test_a_recompute_that_moves_no_stream_is_right_whatever_forward_did(in_forward):
    x = leaf(3, 4)
    (expected,) = grad(x.sin().exp().sum(), x)
    function = draws_elsewhere(lambda x: x.sin().exp(), in_forward, 0)
    assert torch.equal(grad(checkpoint(function, x).sum(), x)[0], expected)


@pytest.mark.usefixtures("idle_thread")
def test_dropout_beside_an_idle_thread():
    def function(x):
        return F.dropout(F.dropout(x.sin()).exp() * torch.rand_like(x))

    expected = run(lambda function, x: function(x), function)
    assert same(run(checkpoint, function), expected)


@pytest.mark.usefixtures("idle_thread")
def test_a_region_that_draws_beside_another_thread_that_draws():
    function = draws_elsewhere(lambda x: F.dropout(x.sin()).exp(), 1, 3)
    y = checkpoint(name="block")(function)(leaf(3, 4))
    with pytest.raises(DeterminismError, match=r"a generator of its own.*The region runs aten\.bernoulli") as caught:
        y.sum().backward()
    assert caught.value.region == ("block",)


class Kernel(torch.autograd.Function):
    """A function whose kernels no operator tells of."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.usefixtures("idle_thread")
def test_kernels_that_may_draw_beside_a_thread_that_draws():
    y = checkpoint(draws_elsewhere(lambda x: Kernel.apply(x.exp()).cos(), 0, 3), leaf(3, 4))
    with pytest.raises(DeterminismError, match=r"The region runs the custom function Kernel, whose kernels may draw"):
        y.sum().backward()


@pytest.mark.usefixtures("idle_thread")
def test_in_a_process_group_no_rank_runs_once_more(monkeypatch):
    """Its collectives would wait for the other ranks."""
    reruns = Log()

    def function(x):
        reruns.append(is_recomputing())
        return x.sin().exp()

    y = checkpoint(draws_elsewhere(function, 0, 3), leaf(3, 4))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(DeterminismError, match=r"In a process group it cannot be found out"):
        y.sum().backward()
    assert list(reruns) == [False, True]


@pytest.mark.parametrize("draws", [False, True])
def test_recomputes_of_two_threads(draws):
    """Those that draw nothing do not wait for each other; of those that draw, the second one waits."""
    barrier = threading.Barrier(2)

    def function(x):
        if is_recomputing() and not draws:
            barrier.wait(10)
        return F.dropout(x.sin(), 0.5 if draws else 0.0).exp() * x.cos()

    expected = [run(lambda function, x: function(x), lambda x: function(x), seed)[:2] for seed in (1, 2)]
    for _ in range(20):
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            x = leaf(3, 4)
            found.append((checkpoint(function, x), x))
        gradients = {}
        in_threads(*(lambda i=i, y=y, x=x: gradients.update({i: grad((y * y).sum(), x)[0]}) for i, (y, x) in enumerate(found)))
        assert [torch.equal(gradients[i], expected[i][1]) for i in range(2)] == [True, True]


def test_a_function_that_catches_everything_beside_a_recompute_of_another_thread():
    """The end of a recompute that has to wait is met again at the next draw, and no value is wrong."""
    inside, leave = threading.Event(), threading.Event()

    def holds(x):
        if is_recomputing():
            inside.set()
            leave.wait(10)
        return x.sin().exp()

    def swallows(x):
        for _ in range(2):
            try:
                x = F.dropout(x.sin())
            except BaseException:
                leave.set()
        return x.exp()

    expected = run(lambda function, x: function(x), swallows)
    held, x = checkpoint(holds, leaf(3, 4)), leaf(3, 4)
    torch.manual_seed(5)
    y = checkpoint(swallows, x)

    def second():
        inside.wait(10)
        assert torch.equal(grad((y * y).sum(), x)[0], expected[1])

    in_threads(held.sum().backward, second)
    assert leave.is_set()


def test_seeding_inside_of_a_region():
    def function(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            x = F.dropout(x.sin())
        return F.dropout(x.exp()).cos()

    assert same(run(checkpoint, function), run(lambda function, x: function(x), function))


def test_backward_inside_of_forward():
    def function(x):
        h = F.dropout(x.sin())
        (inner,) = grad(h.exp().sum(), x, create_graph=True)
        return F.dropout(h * inner).cos()

    assert same(run(checkpoint, function), run(lambda function, x: function(x), function))
