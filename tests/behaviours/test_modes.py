"""A user's modes around a region: what they see of it, and what becomes of one that changes results."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.utils.flop_counter
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt_hooks
from ckpt_hooks import checkpoint, checkpoint_region
from tests.behaviours.runs import same
from tests.measure import Log, leaf

aten = torch.ops.aten

CHECKS = ["default", "none", "values", lambda tensor: (tensor * 2).sum()]


class Counting(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not aten.detach.default:  # of which plain autograd makes others
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Doubling(TorchDispatchMode):
    """Makes products twice as large."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is aten.mul.Tensor else output


def three_operators(x):
    return (x * 3.0).sin().exp()


def frame(**options):
    return checkpoint(**options)


def nested_frame(**options):
    return lambda function: checkpoint(**options)(lambda x: checkpoint(**options)(function)(x))


def selective(**options):
    return checkpoint(policy=[aten.sin.default], **options)


def with_debug(**options):
    return checkpoint(debug=True, **options)


def recorded():
    return checkpoint_region()


def nested_recorded():
    return lambda function: checkpoint_region()(lambda x: checkpoint_region()(function)(x))


def recorded_with_policy():
    return checkpoint_region(policy=[aten.sin.default])


def recorded_in_frame():
    return lambda function: checkpoint()(lambda x: checkpoint_region()(function)(x))


def frame_in_recorded():
    return lambda function: checkpoint_region()(lambda x: checkpoint()(function)(x))


FRAMES = [frame, nested_frame, selective, with_debug]
RECORDED = [recorded, nested_recorded, recorded_with_policy, recorded_in_frame, frame_in_recorded]


def plain():
    return lambda function: function


def gradient(region, function, *, around=contextlib.nullcontext, backward=contextlib.nullcontext):
    torch.manual_seed(1)
    x = leaf(3)
    with around():
        y = region()(function)(x)
    with backward():
        y.sum().backward()
    return [y.detach(), x.grad]


def assert_as_plain(region, function, **modes):
    expected, found = gradient(plain, function, **modes), gradient(region, function, **modes)
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


# What they see


ALL = [
    *(functools.partial(kind, determinism_check=check) for kind in FRAMES for check in CHECKS),
    *RECORDED,
]


@pytest.mark.parametrize("region", ALL, ids=range(len(ALL)))
def test_a_mode_that_counts_sees_forward_once(region):
    """Nothing of what compares values, and nothing of the recompute in a backward without it."""
    expected, found = Counting(), Counting()
    gradient(plain, three_operators, around=lambda: expected)
    gradient(region, three_operators, around=lambda: found)
    assert found.seen == expected.seen == [aten.mul.Tensor, aten.sin.default, aten.exp.default]


@pytest.mark.parametrize("check", CHECKS[2:])
@pytest.mark.parametrize("kind", FRAMES)
def test_a_mode_that_counts_in_backward_sees_no_comparison(kind, check):
    seen = []
    for determinism_check in ("default", check):
        counting = Counting()
        gradient(lambda check=determinism_check: kind(determinism_check=check), three_operators, backward=lambda c=counting: c)
        seen.append(counting.seen)
    assert seen[0] == seen[1]
    assert aten.mul.Tensor in seen[0]


# One that changes results


@pytest.mark.parametrize("region", [*FRAMES, *RECORDED])
def test_a_mode_around_forward_that_changes_results_is_named(region):
    with pytest.raises(ckpt_hooks.DeterminismError, match=r"dispatch mode Doubling.*inside the region") as caught:
        gradient(region, three_operators, around=Doubling)
    assert caught.value.grad_fn in ("SinBackward0", "ExpBackward0")  # the first saved, or the first that is asked for
    assert caught.value.expected != caught.value.found


@pytest.mark.parametrize("region", [*FRAMES, *RECORDED])
def test_a_mode_inside_the_region_that_changes_results(region):
    def function(x):
        with Doubling():
            h = (x * 3.0).sin()
        return (h * 2.0).exp().cos()

    assert_as_plain(region, function)


# One that watches


def writes(x):
    h = x * 3.0
    h.add_(1)
    k = h.sin()
    k.mul_(2)
    return (h.exp() * k.cos()).tan()


def writes_past_versions(x):
    """What autograd saved is written to, and versions do not tell: plain autograd takes what was written, and so do regions."""
    h = (x * 3.0).sin()
    y = h.exp() * h.cos()
    h.data.mul_(2)
    return y * h


def draws(x):
    h = torch.nn.functional.dropout(x * 3.0, 0.5).sin()
    return torch.rrelu(h, 0.1, 0.9, training=True).exp() * torch.nn.functional.dropout(h, 0.5).cos()


def hands_out_views(x):
    h = (x * 3.0).sin()
    return h[1:].exp().sum() * h.t().cos() + h.unbind()[0].tan()


@pytest.mark.parametrize("function", [three_operators, writes, draws, hands_out_views])
@pytest.mark.parametrize("region", [*FRAMES, *RECORDED])
def test_a_mode_that_watches_does_no_harm(region, function):
    for around in (Counting, functools.partial(torch.utils.flop_counter.FlopCounterMode, display=False)):
        assert_as_plain(region, function, around=around)
        assert_as_plain(region, function, around=around, backward=around)
        assert_as_plain(region, function, backward=around)


@pytest.mark.parametrize("region", [recorded, nested_recorded, recorded_with_policy])
def test_writes_past_versions_are_no_other_values(region):
    assert_as_plain(region, writes_past_versions, around=Counting)


# Torch's own modes


@pytest.mark.parametrize("region", [*(functools.partial(frame, determinism_check=check) for check in CHECKS), *RECORDED])
def test_nothing_is_compared_among_fake_tensors(region):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(3, requires_grad=True)
        region()(three_operators)(x).sum().backward()
        assert x.grad.shape == (3,)


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_compared_in_a_trace(check):
    """A traced forward has the operators of the program, and no others."""

    def program(region):
        return make_fx(lambda x: region(three_operators)(x))(torch.randn(3, requires_grad=True))

    found, expected = (
        [node.target for node in program(region).graph.nodes if node.target not in (aten.detach.default, aten.alias.default)]
        for region in (frame(determinism_check=check), plain())
    )
    assert found == expected


# What the modes of regions owe to the operators that they pass on


class Reached(torch.nn.Module):
    """Reaches a parameter that it does not read; once that was written to, a rerun is watched."""

    def __init__(self, function):
        super().__init__()
        self.unread = torch.nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, x):
        return self.function(x)


def watched_frame():
    def region(function):
        def run(x):
            module = Reached(function)
            y = checkpoint(module, x)
            with torch.no_grad():
                module.unread.add_(1)
            return y

        return run

    return region


class Twice(HigherOrderOperator):
    """Runs a function twice: an operator of operators, as ``flex_attention`` is one."""

    def __init__(self):
        super().__init__("ckpt_hooks_tests_twice")

    def __call__(self, function, x):
        return super().__call__(function, x)


@pytest.fixture(scope="module")
def twice():
    operator = Twice()
    operator.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda function, x: function(function(x)))
    operator.py_impl(torch._C.DispatchKey.Autograd)(lambda function, x: operator(function, x))
    operator.fallthrough(torch._C.DispatchKey.AutogradCPU)
    return operator


@pytest.mark.parametrize("region", [*FRAMES, *RECORDED, watched_frame])
def test_operators_of_operators(region, twice):
    """They go through every mode like others."""
    assert_as_plain(region, lambda x: (twice(torch.cos, x.detach()) * x.sin()).exp())


@pytest.mark.parametrize("region", [*FRAMES, *RECORDED, watched_frame])
def test_writes_to_lists_are_counted(region):
    """As they are without a mode, under which torch does not count them; in forward, and in a rerun if there is one."""
    versions = Log()

    def function(x):
        h = x * 1
        torch._foreach_mul_([h], 2.0)
        versions.append(h._version)
        return h.sin().exp()

    assert_as_plain(region, function)
    assert set(versions) == {1}


def test_bilinear_under_autocast():
    """Autocast ends above a mode: so recorded regions and debug mode round, and a checked pass is an error."""
    torch.manual_seed(0)
    layer, x, y = torch.nn.Bilinear(4, 3, 6), torch.rand(5, 4), torch.rand(5, 3)

    def step(run, mode=None):
        with torch.autocast("cpu", torch.bfloat16), mode or contextlib.nullcontext():
            result = run(lambda x: layer(x, y).sin())(x)
        return torch.cat([result.detach().flatten(), torch.autograd.grad(result.sum(), layer.weight)[0].flatten()])

    plain, below = step(lambda function: function), step(lambda function: function, Counting())
    assert not same(plain, below)
    with ckpt_hooks.set_self_check(False):
        assert same(step(frame()), plain)
    with pytest.raises(ckpt_hooks.DeterminismError):
        step(frame())
    for region in (frame(debug=True), checkpoint_region()):
        assert same(step(region), below)
