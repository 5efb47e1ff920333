"""Operators with an ordered effect: they run once where operators are recorded, in blocks and under a policy."""

from __future__ import annotations

import ctypes
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks import checkpoint, checkpoint_region
from tests.behaviours.runs import same
from tests.measure import Frames, leaf

MUST_RECOMPUTE, PREFER_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE

RAN: list[str] = []


@functools.cache
def effect(name):
    """Returns an operator with an ordered effect, which notes that it ran."""

    def define(kernel, gradient):
        def noting(x):
            RAN.append(name)
            return kernel(x)

        noting.__annotations__ = kernel.__annotations__
        schema = torch.library.infer_schema(noting, mutates_args=())
        operator = torch.library.custom_op(f"ckpt_hooks_tests::{name}", noting, mutates_args=(), schema=schema)
        if gradient is not None:
            operator.register_autograd(gradient)
        torch.library._register_effectful_op(f"ckpt_hooks_tests::{name}", torch.library.EffectType.ORDERED)
        return operator

    def send(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def tell(x: torch.Tensor) -> None:
        return None

    def draw(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand((), dtype=x.dtype)

    def split(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * 2, x * 3]

    kernels = {
        "send": (send, lambda ctx, grad: grad * 2),
        "tell": (tell, None),
        "draw": (draw, lambda ctx, grad: grad),
        "split": (split, lambda ctx, grads: grads[0] * 2 + grads[1] * 3),
    }
    return define(*kernels[name])


@pytest.fixture(autouse=True)
def _count_anew():
    RAN.clear()


def recorded(policy=None):
    return checkpoint_region(policy=policy)


def selective(policy=None):
    return checkpoint(policy=policy or (lambda ctx, op, *args, **kwargs: PREFER_RECOMPUTE))


def selective_by_list(policy=None):
    return checkpoint(policy=policy or [torch.ops.aten.exp.default])


def with_debug(policy=None):
    return checkpoint(policy=policy or [torch.ops.aten.exp.default], debug=True)


KINDS = [recorded, selective, selective_by_list]


def alone(outer, inner, function, x):
    return outer()(function)(x)


def nested(outer, inner, function, x):
    return outer()(lambda x: inner()(function)(x))(x)


def no_region(policy=None):
    return lambda function: function


def once(y, x):
    y.sum().backward()
    return [x.grad]


def twice(y, x):
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return [x.grad]


def outcome(program, backward):
    torch.manual_seed(1)
    x = leaf(3)
    y = program(x)
    return [y.detach(), *backward(y, x), torch.get_rng_state()]


def assert_runs_once(function, backward, place, outer, inner):
    RAN.clear()
    expected = outcome(lambda x: place(no_region, no_region, function, x), backward)
    names = list(RAN)
    RAN.clear()
    found = outcome(lambda x: place(outer, inner, function, x), backward)
    assert names == RAN
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def sends(x):
    return effect("send")(x.sin()).exp().cos()


def tells(x):
    h = x.sin()
    effect("tell")(h)
    h = h.exp()
    effect("tell")(h)
    return h.cos()


def draws(x):
    """Numbers of which a replayed dropout between them must not draw any."""
    h = F.dropout(effect("draw")(x.sin()).exp(), 0.5)
    return F.dropout(effect("draw")(h).exp(), 0.5).cos()


def splits(x):
    one, other = effect("split")(x.sin())
    return (one.exp() * other.cos()).tan()


def writes_to_the_result(x):
    h = effect("send")(x.sin())
    h.add_(1)
    return h.exp().cos()


def saves_what_it_made_and_writes(x):
    """To what autograd has not saved: only the copy of it."""
    h = effect("send")(x.sin())
    y = h.clone().exp()
    h.zero_()
    return y.sin() * (h + 1)


def ends_with_an_effect(x):
    y = x.sin().exp()
    effect("tell")(y)
    return effect("send")(y)


FUNCTIONS = [
    sends,
    tells,
    draws,
    splits,
    writes_to_the_result,
    saves_what_it_made_and_writes,
    ends_with_an_effect,
]


@pytest.mark.parametrize("kind", [*KINDS, with_debug])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_effects_happen_once(function, kind):
    assert_runs_once(function, once, alone, kind, kind)


@pytest.mark.parametrize("kind", [recorded, selective])
@pytest.mark.parametrize(
    "decision", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD]
)
def test_effects_that_a_policy_keeps(kind, decision):
    region = functools.partial(kind, lambda ctx, op, *args, **kwargs: decision)
    for function in (sends, draws, tells):
        assert_runs_once(function, twice, nested, region, region)


def must_recompute(ctx, op, *args, **kwargs):
    return MUST_RECOMPUTE


@pytest.mark.parametrize("kind", [recorded, selective])
@pytest.mark.parametrize("function", [sends, draws, writes_to_the_result])
def test_effects_happen_again_where_a_policy_insists(function, kind):
    expected = outcome(function, once)
    names = list(RAN)
    RAN.clear()
    found = outcome(kind(must_recompute)(function), once)
    assert names * 2 == RAN
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_in_the_middle_of_forward(kind):
    def program(region):
        def function(x):
            h = effect("send")(x.sin()).exp()
            (grad,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
            return effect("send")(h * grad.detach()).exp().cos()

        return region()(function)

    expected = outcome(program(no_region), once)
    RAN.clear()
    found = outcome(program(kind), once)
    assert RAN == ["send", "send"]
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_printing(kind, capfd):
    """Torch's own operators: one of ATen, one that is an operator of operators and takes no tensors."""

    def function(x):
        torch.ops.aten._print("from ATen")
        ctypes.CDLL(None).fflush(None)  # of C's buffer, which Python does not know
        torch._higher_order_ops.print("number {}", 3)
        return x.sin().exp().cos()

    kind()(function)(leaf(3)).sum().backward()
    assert capfd.readouterr().out.split("\n")[:-1] == ["from ATen", "number 3"]


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_goes_with_the_graph(kind, retain):
    frames = Frames()
    gc.disable()
    try:
        with frames:
            y = kind()(writes_to_the_result)(leaf(3)).sum()
        y.backward(retain_graph=retain)
        assert frames.alive() == [retain]
        del y
        assert frames.alive() == [False]
    finally:
        gc.enable()


@functools.cache
def peek():
    """Returns an operator with an ordered effect that returns its argument's memory, which its schema denies."""
    torch.library.define("ckpt_hooks_tests::peek", "(Tensor x) -> Tensor")

    def kernel(x):
        RAN.append("peek")
        return x.detach()[:]

    torch.library.impl("ckpt_hooks_tests::peek", "CPU", kernel)
    torch.library._register_effectful_op("ckpt_hooks_tests::peek", torch.library.EffectType.ORDERED)
    return torch.ops.ckpt_hooks_tests.peek


def test_an_effect_that_returns_its_argument():
    """The result cannot be kept by itself, and to have it again would repeat the effect."""

    def function(x):
        h = x.detach() * 2
        with torch.no_grad():
            found = peek()(h)
        return (x * found).sin()

    RAN.clear()
    x = torch.arange(4.0, requires_grad=True)
    found = torch.autograd.grad(recorded()(function)(x).sum(), x)[0]
    assert RAN == ["peek"]
    assert torch.equal(found, torch.autograd.grad(function(x).sum(), x)[0])
