"""Random draws: each kind in both kinds of region, and threads that draw from the default generator beside regions."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_hooks import DeterminismError, checkpoint, checkpoint_region, is_recomputing
from ckpt_hooks._function import words
from ckpt_hooks.policies import dots_saveable, save_ops
from ckpt_hooks.report import Reason
from tests.devices import FakeDevices, install  # noqa: F401 -- a fixture
from tests.measure import Log
from tests.test_threads import in_threads

GRU = nn.GRU(4, 4, num_layers=2, dropout=0.5)
RANDOM = {
    "rand_like": lambda x: torch.rand_like(x),
    "randint": lambda x: torch.randint(2, 9, (3, 4)) * x,
    "randperm": lambda x: x[torch.randperm(3)],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid().detach()),
    "bernoulli_": lambda x: torch.empty(3, 4).bernoulli_(0.5),
    "normal_": lambda x: torch.empty(3, 4).normal_(),
    "multinomial": lambda x: torch.multinomial(x.detach().sigmoid(), 2).repeat(1, 2),
    "dropout": lambda x: F.dropout(x),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    "gru": lambda x: GRU(x)[0],
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
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


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_draws_between_which_a_tensor_of_two_draws_twice(form):
    """How many numbers it takes does not follow from its shape."""
    two = TwoTensor(torch.ones(5), torch.ones(5))

    def function(x):
        y = F.dropout(x.sin()).exp()
        torch.rand_like(two)
        return F.dropout(y).exp()

    assert same(run(form, function), run(lambda function, x: function(x), function))


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
    monkeypatch.setattr(words, "other_threads_draw", False)


NO_DRAW = {
    "operators": lambda x: x.sin().exp().cos(),
    "dropout of nothing": lambda x: F.dropout(x.sin(), 0.0).exp(),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3)[0, 0].exp(),
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


@pytest.mark.usefixtures("idle_thread")
def test_a_draw_of_another_thread_is_told_once():
    """Forward tells that another thread draws: the region does not, and the streams moved. From then on reruns are watched."""
    x = leaf(3, 4)
    region = checkpoint()(draws_elsewhere(lambda x: x.sin().exp(), 2, 3))
    (expected,) = grad(x.sin().exp().sum(), x)
    with pytest.warns(UserWarning, match=r"give that thread a generator of its own"):
        assert torch.equal(grad(region(x).sum(), x)[0], expected)
    for in_forward in (0, 2):
        region = checkpoint()(draws_elsewhere(lambda x: x.sin().exp(), in_forward, 3))
        assert torch.equal(grad(region(x).sum(), x)[0], expected)
    with pytest.raises(DeterminismError, match=r"In the region, aten\.bernoulli"):
        grad(checkpoint(draws_elsewhere(lambda x: F.dropout(x.sin()).exp(), 2, 3), x).sum(), x)


@pytest.mark.usefixtures("idle_thread")
@pytest.mark.parametrize("after_a_warning", [False, True])
def test_a_table_that_a_recompute_makes_anew_is_no_draw_of_another_thread(after_a_warning, monkeypatch):
    """One more rerun finds the table that the first one has drawn. Nothing tells of another thread that draws."""
    monkeypatch.setattr(words, "other_threads_draw", after_a_warning)
    table = functools.lru_cache(maxsize=1)(torch.rand)
    table(4)
    y = checkpoint(lambda x: (x * table(4)).sin(), leaf(3, 4))
    table(5)
    with pytest.raises(DeterminismError, match="has drawn other random numbers"):
        y.sum().backward()


class Kernel(torch.autograd.Function):
    """A function whose kernels no operator tells of."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@torch.library.custom_op("ckpt_hooks_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """Has no tag that tells whether it draws."""
    return x / 2


UNKNOWN = {
    "kernels of the custom function Kernel may draw": lambda x: Kernel.apply(x.exp()).cos(),
    "ckpt_hooks_tests.halved.default may draw": lambda x: halved(x.exp()).cos(),
}


@pytest.mark.usefixtures("idle_thread")
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_draw_beside_a_thread_that_draws(name):
    y = checkpoint(draws_elsewhere(UNKNOWN[name], 2, 3), leaf(3, 4))
    with pytest.raises(DeterminismError, match=f"In the region, {name}"):
        y.sum().backward()


@pytest.mark.usefixtures("idle_thread")
@pytest.mark.filterwarnings("ignore:.*give that thread a generator of its own")
def test_to_hand_memory_to_another_library_is_no_draw():
    def function(x):
        return x.sin().exp() * torch.from_dlpack(x.detach())

    x = leaf(3, 4)
    (expected,) = grad(function(x).sum(), x)
    assert torch.equal(grad(checkpoint(draws_elsewhere(function, 2, 3), x).sum(), x)[0], expected)


halved.register_autograd(lambda ctx, gradient: gradient / 2)


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
    with pytest.raises(DeterminismError, match=r"in a process group nothing tells who did"):
        y.sum().backward()
    assert list(reruns) == [False, True]


def plain_of(function, seed):
    return run(lambda function, x: function(x), function, seed)[1]


class Deaf(TwoTensor):
    """Draws from the default generator whatever it is given, as a ``DTensor`` on the CPU does."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kept = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        return super().__torch_dispatch__(func, types, args, kept)


BESIDE = {
    "dropout": lambda x: F.dropout(F.dropout(x.sin()).exp() * torch.rand_like(x)).cos(),
    "the default generator, named": lambda x: (x * torch.rand(3, 4, generator=torch.default_generator)).sin(),
    "a policy": lambda x: checkpoint(policy=[torch.ops.aten.native_dropout.default])(
        lambda x: torch.native_dropout(torch.native_dropout(x.sin(), 0.5, True)[0].exp(), 0.5, True)[0].cos()
    )(x).exp(),
    "a recorded region": lambda x: F.dropout(checkpoint_region()(lambda x: F.dropout(x.sin()).exp())(x)).cos(),
    "a region": lambda x: F.dropout(checkpoint(lambda x: F.dropout(x.sin()).exp(), x)).cos(),
    "backward": lambda x: F.dropout(x.sin() * grad(F.dropout(x.exp()).sum(), x, create_graph=True)[0]).cos(),
    "a wrapper": lambda x: (Deaf(torch.ones(3, 4), torch.ones(3, 4)).bernoulli_(0.5).b * x.sin()).exp(),
    "nothing": lambda x: x.sin().exp(),
}


@pytest.mark.parametrize("function", BESIDE.values(), ids=BESIDE)
def test_a_recompute_beside_that_of_another_thread(function):
    """It does not wait, and draws from generators of its own, in which forward's numbers come."""
    inside, leave = threading.Event(), threading.Event()

    def holds(x):
        x = F.dropout(x.sin())
        if is_recomputing():
            inside.set()
            leave.wait(10)
        return F.dropout(x).exp()

    torch.manual_seed(4)
    x, one = leaf(3, 4), leaf(3, 4)
    held = checkpoint(holds, one)
    torch.manual_seed(5)
    y = checkpoint(function, x)
    before = torch.get_rng_state()

    def second():
        try:
            assert inside.wait(10)
            assert torch.equal(grad((y * y).sum(), x)[0], expected)
        finally:
            leave.set()

    expected = plain_of(function, 5)
    torch.set_rng_state(before)
    in_threads((held * held).sum().backward, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.grad, plain_of(lambda x: F.dropout(F.dropout(x.sin())).exp(), 4))


@pytest.mark.usefixtures("idle_thread", "not_warned")
def test_a_thread_that_draws_on_another_device(install):  # noqa: F811
    """The region draws on the CPU, whose stream is where it was in forward."""
    devices = install("fake_one", FakeDevices(1))
    devices.default_generators[0].device = torch.device("hpu", 0)

    def function(x):
        if not is_recomputing():
            thread = threading.Thread(target=devices.default_generators[0].draw)
            thread.start()
            thread.join()
        return F.dropout(x.sin()).exp()

    expected = plain_of(lambda x: F.dropout(x.sin()).exp(), 5)
    with pytest.warns(UserWarning, match="give that thread a generator of its own"):
        assert torch.equal(run(checkpoint, function)[1], expected)


class Draws(TorchDispatchMode):
    """Counts the operators that draw, by name."""

    def __init__(self):
        super().__init__()
        self.number = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.number[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def _masked(x, made_by):
    return F.dropout(x, 0.3) if made_by == "dropout" else x * (torch.rand(x.shape) > 0.3)


def _residual(x, weights, made_by):
    """Draws each mask behind a product, as blocks do; backward asks for the last one first."""
    for weight in weights:
        x = x + _masked(torch.tanh(x @ weight), made_by)
    return x


def _masks_first(x, weights, made_by):
    """Draws all masks, of which backward asks for the second half first, each from its end."""
    masks = [_masked(torch.ones_like(x), made_by) for _ in weights]
    half = len(masks) // 2
    for weight, mask in zip(weights, masks[half:] + masks[:half], strict=True):
        x = x + torch.tanh(x @ weight) * mask
    return x


NUMBER = 24
MADE_BY = {"dropout": torch.ops.aten.bernoulli_, "rand": torch.ops.aten.rand}
WAYS = [(4, None, False), (4, dots_saveable, None), (4, save_ops(torch.ops.aten.tanh.default), False)]
WAYS += [(500, None, None), (500, None, False), (500, dots_saveable, False), (500, dots_saveable, True)]


@pytest.mark.parametrize(("rows", "policy", "whole"), WAYS)
@pytest.mark.parametrize("program", [_residual, _masks_first])
@pytest.mark.parametrize("made_by", MADE_BY)
def test_no_mask_is_drawn_twice_in_one_backward(made_by, program, rows, policy, whole):
    """Neither short draws, which share states, nor long ones."""
    weights = [(torch.eye(8) * (1 + step / 32)).requires_grad_() for step in range(NUMBER)]
    x = torch.linspace(-1, 1, rows * 8).reshape(rows, 8).requires_grad_()

    def run_in(region, seen):
        torch.manual_seed(3)
        with region:
            y = program(x, weights, made_by)
        after = torch.get_rng_state()
        with seen:
            gradients = grad((y * y).sum(), [x, *weights])
        return [y, after, torch.get_rng_state(), *gradients]

    expected = run_in(contextlib.nullcontext(), contextlib.nullcontext())
    seen = Draws()
    assert same(run_in(checkpoint_region(policy=policy, replay_whole=whole), seen), expected)
    assert seen.number == {MADE_BY[made_by]: NUMBER}


def test_short_draws_in_a_row_share_states():
    """24 small dropouts hold two states of 5 KB, not 24."""
    x = torch.randn(8, 8, requires_grad=True)
    with checkpoint_region() as region:
        y = x
        for _ in range(NUMBER):
            y = F.dropout(y.sin(), 0.5)
    states = [held.nbytes for held in region.kept() if held.reason is Reason.RANDOM_STATE]
    assert states == [torch.get_rng_state().nbytes] * 2
    y.sum().backward()


@pytest.mark.parametrize("whole", [None, True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_short_draws_with_others_between(order, whole):
    """Of nested regions, of other lengths and kinds, in other dtypes, after another seed."""

    def gradients(region, inner):
        torch.manual_seed(7)
        x, found = leaf(3, 5), []
        with region:
            y = x
            for step in range(40):
                y = F.dropout(y.sin(), 0.3)
                if step % 5 == 2:
                    y = y * torch.rand_like(y)
                if step % 7 == 3:
                    y = y + torch.randn(5)
                if step % 9 == 4:
                    with inner():
                        y = F.dropout(F.dropout(y).exp().cos())
                if step % 11 == 5:
                    torch.set_default_dtype(torch.float64)
                    y = y * torch.rand(3, 5).float() * torch.rand(400, 5).mean().float()
                    torch.set_default_dtype(torch.float32)
                if step == 30:
                    torch.manual_seed(7)
                found.append(y)
        return [grad(one.sum(), x, retain_graph=True)[0] for one in found[::order]] + [torch.rand(2)]

    expected = gradients(contextlib.nullcontext(), contextlib.nullcontext)
    assert same(gradients(checkpoint_region(replay_whole=whole), checkpoint_region), expected)
