"""Custom functions as operators of recorded regions: what runs again, what is kept and why, memory, kernels by themselves."""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import threading
import types
from collections import deque

import pytest
import torch
from torch.autograd import Function, grad

import ckpt_hooks
from ckpt_hooks import (
    CheckpointPolicy,
    DeterminismError,
    MutationError,
    checkpoint,
    checkpoint_region,
    is_recomputing,
    policies,
)
from tests import kernels as k
from tests import test_functions as programs
from tests.fake_device import note_comparisons
from tests.measure import Log, allocated
from tests.regions import assert_as_eager, assert_same, plain

aten = torch.ops.aten

#: Up to torch 2.14 a name bound to ``apply`` before the first region calls what regions divert.
IS_BOUND_EARLY = isinstance(vars(Function)["apply"], types.ClassMethodDescriptorType)


def tensors(*shape, count=2):
    return [torch.randn(shape).requires_grad_() for _ in range(count)]


class Counted(Function):
    """Counts the runs of its forward, and those in recomputes; what else it does comes with its arguments."""

    runs = reruns = 0

    @staticmethod
    def forward(ctx, x, act=None):
        Counted.runs += 1
        Counted.reruns += is_recomputing()
        out = torch.zeros_like(x)
        k.write(out, x.sin())
        if act is not None:
            act(x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, g):
        x, out = ctx.saved_tensors
        return g * x.cos() + 0 * out, None


@pytest.fixture(autouse=True)
def _uncounted():
    Counted.runs = Counted.reruns = 0


# What runs again


@pytest.mark.parametrize("whole", [False, True])
def test_a_forward_runs_once_more_for_each_backward(whole):
    x, w = tensors(3, 3)
    with checkpoint_region(replay_whole=whole):
        y = (Counted.apply((x @ w).add_(1)) * 2).sin()
    assert (Counted.runs, Counted.reruns) == (1, 0)
    grad(y.sum(), (x, w), retain_graph=True)
    assert (Counted.runs, Counted.reruns) == (2, 1)
    grad(y.sum(), (x, w))
    assert (Counted.runs, Counted.reruns) == (3, 2)
    assert not is_recomputing()


@pytest.mark.filterwarnings("always:the custom function:UserWarning")
def test_a_call_by_an_early_name_is_seen(recwarn):
    """Torch 2.15 binds such a name to its own function: a warning says so, once."""
    early = torch._C._FunctionBase.__dict__["apply"].__get__(None, Counted) if IS_BOUND_EARLY else None
    apply, (x, w) = early or Counted.apply, tensors(3, 3)
    for _ in range(2):
        with checkpoint_region():
            y = apply(x @ w).sin()
    y.sum().backward()
    assert Counted.runs == (2 if IS_BOUND_EARLY else 3)
    assert [str(one.message)[:27] for one in recwarn] == ["the custom function Counted"] * IS_BOUND_EARLY


@pytest.mark.skipif(torch.__version__ < "2.13", reason="autograd takes no arguments by name")
def test_arguments_by_name():
    def program(region):
        with region():
            return k.SetUp.apply(x @ w, y=x.sin(), options=(1.5, {"bias": 1.0}))[0].cos()

    x, w = tensors(3, 3)
    assert_as_eager(program, x, w)


def test_what_forward_sees_of_its_arguments():
    """Their ``requires_grad``, by ``ctx`` too; containers of its own; gradients off; the surroundings of the first run."""
    seen, word = [], contextvars.ContextVar("word", default="none")

    class Looks(Function):
        @staticmethod
        def forward(ctx, x, y, held):
            held["list"].append(1)
            seen.append(
                [
                    *(x.requires_grad, y.requires_grad, ctx.needs_input_grad, len(held["list"]), torch.is_grad_enabled()),
                    *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype(), word.get()),
                    *(torch.empty(0).device.type, is_recomputing()),
                ]
            )
            ctx.save_for_backward(x)
            return x * y

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0], None, None

    x, w = tensors(3, 3)
    word.set("forward")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"), checkpoint_region():
        y = Looks.apply(x * 2, w.detach(), {"list": [0]}).sin()
    word.set("backward")
    grad(y.sum(), x)
    first, again = seen
    assert first[:-1] == again[:-1]
    assert first[:5] == [True, False, (True, False, False), 2, False]
    assert first[5:] == [True, torch.bfloat16, torch.float32, "forward", "meta", False]


def test_random_numbers_may_be_new():
    """With ``preserve_rng_state=False``; the stream outside stays where it is."""
    x, w = tensors(4, 8)
    found = []
    for preserve in (True, False):
        torch.manual_seed(0)
        with checkpoint_region(preserve_rng_state=preserve):
            y = (k.Drops.apply(x * w, 0.5) * 3).sin()
        state = torch.get_rng_state()
        found += torch.autograd.grad(y.sum(), x)
        assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(*found)


def test_sources_that_are_tracked_draw_again():
    import random

    class Scaled(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.full_like(x, random.random()))
            return x * ctx.to_save[0]

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    def program(region):
        random.seed(3)
        with ckpt_hooks.track_rng("python"), region():
            return Scaled.apply(x @ w).sin() * random.random()

    x, w = tensors(3, 3)
    assert_as_eager(program, x, w)


def test_attention_without_dropout_draws_nothing():
    class Attends(Function):
        @staticmethod
        def forward(ctx, x):
            found = torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3)[0, 0]
            ctx.save_for_backward(torch.rand_like(x))
            return found * ctx.to_save[0]

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    def program(region):
        with region():
            return Attends.apply(x @ w).sin()

    x, w = tensors(3, 3)
    assert_as_eager(program, x, w)


def test_more_draws_are_an_error():
    class Draws(Function):
        counts = iter((1, 2))

        @staticmethod
        def forward(ctx, x):
            mask = sum(torch.rand_like(x) for _ in range(next(Draws.counts)))
            ctx.save_for_backward(mask)
            return x * mask

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    x, w = tensors(3, 3)
    with checkpoint_region():
        y = Draws.apply(x @ w)
    with pytest.raises(DeterminismError, match=r"another draw by aten\.rand_like"):
        y.sum().backward()


def test_an_error_in_the_first_run_is_the_callers():
    class Fails(Function):
        @staticmethod
        def forward(ctx, x):
            k.write(x, x * 2)
            raise RuntimeError("planned")

        @staticmethod
        def backward(ctx, g):
            return g

    def program(region):
        with region():
            h = x @ w
            with pytest.raises(RuntimeError, match="planned"):
                Fails.apply(h)
            return (h * 3).sin()

    x, w = tensors(3, 3)
    assert_as_eager(program, x, w)


def test_two_regions_around_are_both_told():
    def program(region):
        with region():
            h = x * 2
            h = checkpoint(lambda h: inner(h, region), h) if region is not plain else inner(h, region)
            return k.AtomicSum.apply(h, w).sin()

    def inner(h, region):
        with region():
            return k.Unmarked.apply(h @ w).sin() + k.ForwardSwiGLU.apply(h * 2, h @ w)

    x, w = tensors(3, 3)
    assert_as_eager(program, x, w)


# What is kept instead, and why


def _region_of(act):
    """A region with one function that does something else besides; returns its output and the kept results."""
    x, w = tensors(3, 3)
    with checkpoint_region() as region:
        y = (Counted.apply(x @ w, act) * 2).sin()
    return y, [kept.why for kept in region.kept() if "Counted.apply" in kept.why]


_buffer = torch.zeros(3)


def _in_a_region(x):
    with torch.enable_grad(), checkpoint_region():
        x.detach().requires_grad_().sin()


def _closure(held):
    return lambda x: held


class _Once:
    """An iterator that may be called, and does nothing."""

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration

    def __call__(self, x):
        pass


REASONS = {
    "an object": (functools.partial(torch.sin), "takes an object that it may change"),
    "an iterator": (_Once(), "takes an iterator, which can be read only once"),
    "a default": (lambda x, by=[2.0]: x * by[0], "takes an object that it may change"),
    "a closure": (_closure(1), "takes an object that it may change"),
    "a tensor from elsewhere": (lambda x: x + _buffer, "reads a tensor that is neither an argument"),
    "nothing but that": (lambda x: _buffer.sin(), "reads a tensor that is neither an argument"),
    "a buffer": (lambda x: _buffer.add_(1), "a tensor that is neither an argument"),
    "a graph": (lambda x: _with_grad(x).sum(), "records a graph of its own"),
    "a backward": (lambda x: grad(_with_grad(x), _leaf[0], torch.ones_like(x)), "records a graph of its own"),
    "a region": (_in_a_region, "records a graph of its own"),
    "another shape": (lambda x: x.t_().t_(), "gives an argument another shape"),
    "another storage": (lambda x: x.detach().set_(x.clone()), "gives an argument another shape"),
    "nothing": (lambda x: x * torch.tensor(2.0) + torch.scalar_tensor(3), ""),
    "a collective": (lambda x: torch.ops._c10d_functional.wait_tensor(x), "runs _c10d_functional.wait_tensor"),
}
_leaf = []


class Scales:
    """An object with a tensor somewhere in it."""

    __slots__ = ("by", "steps")

    def __init__(self):
        self.by, self.steps = {"all": [torch.tensor(2.0)]}, 0

    def __call__(self, x):
        return x * self.by["all"][0]


class Counting(Scales):
    """Changes with each run."""

    def __call__(self, x):
        self.steps += 1
        return x * self.steps


class Gathered(Scales):
    """Has its tensor in containers of other kinds."""

    def __init__(self):
        super().__init__()
        self.by = {"all": deque([torch.tensor(2.0)], 3)}
        self.names, self.both = {"all"}, frozenset({("all", self.by["all"][0])})


class Related(Scales):
    """Has a reference to itself, and such as do not change."""

    def __init__(self):
        super().__init__()
        self.others = [self, Scales, len, torch, CheckpointPolicy.MUST_SAVE, [self.by]]


class Adding(Gathered):
    """Adds to a set."""

    def __call__(self, x):
        self.names.add("more")
        return super().__call__(x)


@pytest.mark.parametrize("kind", [Scales, Counting, Gathered, Related, Adding])
def test_an_object_that_the_function_leaves_as_it_is_may_be_read_again(kind):
    y, reasons = _region_of(kind())
    assert bool(reasons) == (kind in (Counting, Adding))
    y.sum().backward()
    assert Counted.runs == 2 - bool(reasons)


def _other_number(scales):
    scales.steps = 1


def _other_tensor(scales):
    scales.by["all"][0] = torch.tensor(2.0)


def _written_to(scales):
    scales.by["all"][0].add_(1)


def _other_entry(scales):
    if isinstance(scales, Gathered):
        scales.names.clear()
    else:
        scales.by["more"] = 1


@pytest.mark.parametrize("change", [_other_number, _other_tensor, _written_to, _other_entry])
@pytest.mark.parametrize("kind", [Scales, Gathered])
def test_an_object_that_has_been_changed_since_is_an_error(kind, change):
    scales = kind()
    y, _ = _region_of(scales)
    change(scales)
    with pytest.raises(MutationError if change is _written_to else DeterminismError, match=r"modified by|objects .* changed"):
        y.sum().backward()


def test_an_object_that_leads_to_a_graph_is_not_held():
    scales = Scales()
    scales.by["all"][0] = torch.tensor(2.0, requires_grad=True) * 1
    assert len(_region_of(scales)[1]) == 1


def _with_grad(x):
    with torch.enable_grad():
        _leaf[:] = [x.detach().requires_grad_()]
        return _leaf[0].sin()


@pytest.mark.parametrize("name", REASONS)
def test_results_are_kept_with_a_reason(name):
    act, reason = REASONS[name]
    y, reasons = _region_of(act)
    assert bool(reasons) is bool(reason)
    assert all(reason in found for found in reasons)
    y.sum().backward()
    assert Counted.runs == (1 if reason else 2)


class Recipe:
    """Has what a function scales by, and writes to."""

    def __init__(self):
        self.history, self.scale, self.twice = torch.zeros(4, 3), torch.ones(3), torch.zeros(1)


class Scaled(Function):
    """Scales by what a recipe tells, and writes to the recipe."""

    runs = 0

    @staticmethod
    def forward(ctx, x, recipe, how):
        Scaled.runs += 1
        ctx.save_for_backward(x * recipe.scale)
        write = k.write if how == "by pointer" else torch.Tensor.copy_
        write(recipe.history, torch.cat([recipe.history[1:], x.abs().amax(0, keepdim=True)]))
        write(recipe.scale, 1 / (1 + recipe.history.amax(0)))
        if how == "both":
            k.write(recipe.twice, recipe.twice + 1)
            recipe.twice.mul_(2)
        return (x * recipe.scale).sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos(), None, None


@pytest.mark.parametrize("how", ["by operators", "by pointer", "both"])
def test_an_object_that_the_function_writes_to_is_lent_as_it_was(how):
    """Three layers share it: each rerun finds what its forward found, and leaves what forward left."""

    def program(region):
        recipe, h = Recipe(), x
        for _ in range(3):
            with region():
                h = Scaled.apply(h @ w, recipe, how).tanh()
        left = [recipe.history.clone(), recipe.scale.clone(), recipe.twice.clone()]
        versions = [one._version for one in vars(recipe).values()]
        found = grad(h.sum(), [x, w], retain_graph=True) + grad(h.sum(), [x, w])
        assert versions == [one._version for one in vars(recipe).values()]
        return [h.detach(), *found, *left, *vars(recipe).values()]

    x, w = tensors(3, 3)
    expected, Scaled.runs = program(plain), 0
    assert_same(program(checkpoint_region), expected)
    assert Scaled.runs == (3 if how == "both" else 9)


@pytest.mark.parametrize("function", [k.Statistics, k.UnmarkedStatistics])
def test_an_argument_from_outside_that_is_written_to_is_lent_as_it_was(function):
    def program(region):
        buffer = torch.full((3,), 0.5)
        with region():
            found = function.apply(x @ w, buffer)
            y = found if function is k.UnmarkedStatistics else found[0]
            y = y.sin() * 2
        return [y.detach(), *grad(y.exp().sum(), [x, w]), buffer.detach()]

    x, w = tensors(3, 3)
    assert_same(program(checkpoint_region), program(plain))


def test_a_kernel_writes_to_an_argument_that_is_on_the_host(transfers):
    def program(region):
        with region():
            buffer = w.detach().sin()
            y = x * (buffer * 2).cos()
            return y.sin() + k.UnmarkedStatistics.apply(x * 1, buffer).sin()

    x, w = torch.randn(2, 300).requires_grad_(), torch.rand(300)
    policy = policies.offload_ops(aten.sin.default)
    assert_as_eager(program, x, region=functools.partial(checkpoint_region, policy=policy))
    assert transfers.count("fetch") == 1


class WritesToMemory(Function):
    """Writes to its argument, unmarked, and hands on another."""

    @staticmethod
    def forward(ctx, x, y):
        k.write(x, x * 3)
        return y * 2

    @staticmethod
    def backward(ctx, g):
        return None, g * 2


@pytest.mark.parametrize("kind", ["leaf", "result", "weight", "view", "transposed"])
@pytest.mark.parametrize("inner", [False, True])
def test_a_write_to_memory_from_outside_is_not_repeated(kind, inner):
    """Reads before and after it find what there was; in a region inside, memory of the region around is from outside too."""

    def program(region):
        start = torch.arange(9.0).view(3, 3) / 9
        base = start.clone() if kind == "weight" else start.clone().requires_grad_() * 1
        if kind == "leaf":
            base = start.clone().requires_grad_()
        with region() if inner else plain():
            h = base * 1 if inner else base
            with region():
                target = {"view": lambda: h[1:], "transposed": lambda: h.t()}.get(kind, lambda: h)()
                before = (h.detach() * 2).cos() * (x @ w)
                out = WritesToMemory.apply(target, (x @ w).sin())
                return before.sin() + out.cos() + (h.detach() * 2).tanh() * x

    x, w = tensors(3, 3)
    assert_as_eager(program, x, w)


class SparseProduct(Function):
    """Takes a sparse tensor, as of a graph's edges."""

    @staticmethod
    def forward(ctx, edges, x):
        ctx.save_for_backward(edges)
        return torch.sparse.mm(edges, x)

    @staticmethod
    def backward(ctx, g):
        return None, torch.sparse.mm(ctx.saved_tensors[0].t(), g)


def test_sparse_arguments():
    def program(region):
        with region():
            return SparseProduct.apply(torch.eye(3).to_sparse(), (x @ w).sin()).sin()

    x, w = tensors(3, 3)
    assert_as_eager(program, x, w)


class IntoBuffer(Function):
    """Has a kernel fill a part of a buffer handed in."""

    @staticmethod
    def forward(ctx, x, out):
        k.write(out, x.tanh())
        ctx.save_for_backward(out)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, g):
        (out,) = ctx.saved_tensors
        return g * (1 - out * out), None


def test_whether_a_write_counts_is_not_left_to_chance():
    """A rerun finds other contents in unfilled memory, and arguments which are not contiguous are compared unseen."""

    def function(x, w, v):
        h = x @ w
        with checkpoint_region() as region:
            unfilled = torch.empty(2, 4, 4)
            for part in range(2):
                h = h + IntoBuffer.apply(h, unfilled[part]) @ v + k.Lists.apply(h, {"scale": w.t(), "shifts": [v.t()]})
            h = h.sin()
        reasons.append(sorted({kept.why for kept in region.kept() if ".apply" in kept.why}))
        return h.sum()

    reasons = Log()
    for size in range(40):
        x, w, v = tensors(4, 4, count=3)
        y = checkpoint(function, x, w, v)
        junk = [torch.randn(4 + size % 5) for _ in range(size)]
        del junk[::2]
        grad(y, (x, w, v))
    assert len(reasons) == 80
    assert all(found == reasons[0] for found in reasons)
    assert not any("Lists" in reason for reason in reasons[0])


def test_a_device_is_not_waited_for(monkeypatch):
    """On a device the answer comes when backward asks, and then once; it is an error, since nothing was kept."""
    compared = note_comparisons(monkeypatch)
    for function, fails in ((k.PureSwiGLU, False), (k.ForwardSwiGLU, True)):
        x, w = (one * 1 for one in tensors(3, 3))
        with checkpoint_region(name="block"):
            y = function.apply(x, w).sin()
        assert len(compared) == 2
        compared.clear()
        for _ in range(2):
            if fails:
                with pytest.raises(
                    MutationError, match=r"^region 'block'.*ForwardSwiGLU\.apply` wrote.*Pass a clone to the function"
                ):
                    grad(y.sum(), (x, w), retain_graph=True)
            else:
                grad(y.sum(), (x, w), retain_graph=True)


# What backward gets


def test_backward_gets_memory_of_its_own():
    """A copy only where a replay, a policy or another tensor still needs it."""
    given = []

    class Saves(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            out = g * x.cos()
            given.append(x.detach().clone())
            k.write(x, torch.full_like(x, 7))
            return out

    def program(region, **options):
        given.clear()
        outside = x - 1
        with region(**options):
            h = x @ w
            y = (outside * 2).cos() + Saves.apply(outside)
            return y * Saves.apply(h) * (h.detach() * 2).sin() * (h.detach() * 3).cos()

    x, w = tensors(3, 3)
    for options in ({}, {"replay_whole": False}, {"policy": policies.dots_saveable}, {"split_backward": True}):
        given.clear()
        with checkpoint_region(**options):
            h = x @ w
            y = (Saves.apply(h) * (h.detach() * 2).sin() * (h.detach() * 3).cos()).sum()
        grad(y, (x, w), retain_graph=True)
        grad(y, (x, w), retain_graph=True)
        assert torch.equal(given[0], given[1])
        assert_as_eager(functools.partial(program, **options) if options else program, x, w)


# Policies


class Asked:
    """A policy that notes what it is asked about, and keeps some."""

    def __init__(self, *kept):
        self.kept, self.asked = kept, []

    def __call__(self, ctx, op, *args, **kwargs):
        self.asked.append((ctx.index, str(op)))
        return CheckpointPolicy.MUST_SAVE if op in self.kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_policies_are_asked_about_the_operators_of_functions():
    x, w = tensors(4, 4)
    asked = []
    for run in (programs.region, programs.called):
        policy = Asked()
        run(lambda x, w: k.PureSwiGLU.apply(x @ w, x).sin(), x, w, policy=policy).sum().backward()
        asked.append(policy.asked)
    names = ["aten.mm.default", "aten.silu.default", "aten.mul.Tensor", "aten.sin.default"]
    assert asked[0] == asked[1] == list(enumerate(names))


def test_what_a_policy_keeps_of_a_function_counts_where_it_is_saved_or_returned():
    class Products(Function):
        @staticmethod
        def forward(ctx, x, w):
            Counted.runs += 1
            a, b, c = x @ w, w @ x, x @ x  # the last is neither saved nor returned
            ctx.save_for_backward(a.view(-1), b)
            return b + 0 * c, b

        @staticmethod
        def backward(ctx, g, other):
            return g * ctx.saved_tensors[0].view_as(g), other

    x, w = tensors(4, 4)
    with checkpoint_region(policy=[aten.mm.default]) as region:
        y, z = Products.apply(x * 2, w * 2)
        z = z.sin()
    kept = [held.nbytes for held in region.kept() if "Products.apply" in held.why]
    assert kept == [64, 64]
    grad(z.sum(), (x, w), retain_graph=True)
    assert Counted.runs == 1  # all that was wanted was kept
    grad(y.sum(), (x, w))


# Memory and lifetime


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_live_bytes_of_a_block_of_functions(policy):
    """After forward: those of operators take no more than ``checkpoint``, those of kernels one and a half activations."""
    x, w, v = torch.randn(64, 8).requires_grad_(), *tensors(8, 8)
    activation = x.nbytes

    def live(run, program):
        for _ in range(2):
            run(program, x * 1, w, v, policy=policy).sum().backward()
        z = x * 1
        y, nbytes = allocated(lambda: run(program, z, w, v, policy=policy))
        return nbytes - y.nbytes

    of_function = live(programs.called, programs.pure_block)
    assert live(programs.region, programs.pure_block) <= of_function
    assert live(programs.region, programs.kernel_block) <= of_function + 1.5 * activation


@pytest.mark.usefixtures("no_gc")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["parts", "whole, dots", "checkpoint, dots", "region in checkpoint", "split"])
def test_300_steps_keep_nothing(form):
    """Neither tensors nor objects, with the garbage collector off."""
    x, w, v = torch.randn(6, 8).requires_grad_(), *tensors(8, 8)

    def steps(count):
        for _ in range(count):
            programs.FORMS[form](programs.kernel_block, x * 1, w, v).sum().backward()
            x.grad = w.grad = v.grad = None

    steps(30)
    before = len(gc.get_objects())
    steps(300)
    assert len(gc.get_objects()) - before < 10
    assert allocated(lambda: steps(5))[1] == 0


def test_threads():
    """Two backwards over one region, and regions of two threads."""
    x, w, v = torch.randn(6, 8).requires_grad_(), *tensors(8, 8)
    with checkpoint_region():
        y = programs.random_numbers(x, w, v).sum() + programs.rms_norm_inside(x, w, v).sum()
    expected = grad(y, (x, w, v), retain_graph=True)
    found, failed = [], []

    def work():
        try:
            for _ in range(10):
                found.append(grad(y, (x, w, v), retain_graph=True))
                out = programs.region(programs.kernel_block, x * 1, w, v)
                found.append(grad(out.sum() * 0 + y, (x, w, v), retain_graph=True))
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(1e-6)  # a replay of one thread often ends while another looks at it
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
    assert not failed
    assert len(found) == 80
    assert all(torch.equal(one, other) for those in found[::2] for one, other in zip(those, expected, strict=True))


# Kernels outside of functions


class JITFunction:
    """Stands for Triton's class: ``kernel[grid](*args)`` is a call of ``run``."""

    def __init__(self, function):
        self.function, self.__name__ = function, function.__name__

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args, grid, warmup, **kwargs):
        if not warmup:
            self.function(*args, **kwargs)
        return self


@JITFunction
def double_in_place(x, scale=2.0):
    k.write(x, x * scale)


@pytest.fixture
def triton(monkeypatch):
    """The kernels of this module, as if they were Triton's."""
    module = types.ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    run = JITFunction.run
    yield
    JITFunction.run = run


FORMS = {
    "region": programs.region,
    "parts": functools.partial(programs.region, replay_whole=False),
    "dots": functools.partial(programs.region, policy=policies.dots_saveable),
    "everything": functools.partial(programs.region, policy=policies.everything_saveable),
    "checkpoint": programs.called,
    "checkpoint, dots": functools.partial(programs.called, policy=policies.dots_saveable),
    "checkpoint, everything": functools.partial(programs.called, policy=policies.everything_saveable),
}


def _launch(x, w):
    h = x @ w
    double_in_place[1](h)
    buffer = torch.zeros(3)
    double_in_place[(1, 2)](buffer, scale=3.0)
    double_in_place[1](buffer)
    return (h * 3).sin() @ w + (h * 2).cos() + buffer


def _launch_in_a_function(x, w):
    return LaunchesInside.apply((x @ w) * 2).sin() @ w


class LaunchesInside(Function):
    """Launches a kernel on memory of its own."""

    @staticmethod
    def forward(ctx, x):
        out = torch.ones_like(x)
        double_in_place[1](out)
        ctx.save_for_backward(out)
        return x * out

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


def _apply_and_map(x, w):
    with torch.no_grad():
        h = x @ w
        h.apply_(lambda value: value * 2)
        other = (w * 1).map_(h, lambda one, two: one - two)
        third = (w * 2).map2_(h, other, lambda one, two, three: one + two * three)
    return (x * 2 + (h * 3).sin() + (other * 2).cos() + third.tanh()).sin() @ w


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("program", [_launch, _launch_in_a_function, _apply_and_map])
def test_kernels_by_themselves(program, form):
    x, w = tensors(3, 3)
    expected = grad(program(x, w).sum(), (x, w))
    y = FORMS[form](program, x * 1, w)
    assert all(map(torch.equal, grad(y.sum(), (x, w)), expected))


@pytest.mark.usefixtures("triton")
def test_arguments_of_a_kernel_are_kept_from_then_on():
    x, w = tensors(3, 3)
    with checkpoint_region() as region:
        h = x @ w
        double_in_place[1](h)
        y = (h * 2).sin()
    assert "handed to the Triton kernel double_in_place" in [kept.why for kept in region.kept()]
    y.sum().backward()


@pytest.mark.usefixtures("triton")
def test_a_launch_to_compile_writes_nothing_and_one_in_an_operator_is_the_operators():
    @torch.library.custom_op("ckpt_hooks_tests::launches", mutates_args=())
    def launches(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        double_in_place[1](out)
        return out

    x, w = tensors(3, 3)
    with checkpoint_region() as region:
        h = x @ w
        JITFunction.run(double_in_place, h.detach(), grid=1, warmup=True)
        y = (launches(h.detach()) * x).sin() * h
    assert not [kept for kept in region.kept() if "Triton" in kept.why]
    y.sum().backward()


@pytest.mark.compile  # since the plain command does without Triton; see conftest.py
def test_real_triton():
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction as Real

    with checkpoint_region():
        assert Real.run.is_diverted
