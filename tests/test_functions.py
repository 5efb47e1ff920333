"""Custom functions whose kernels write where no operator sees it: in regions of both kinds, and under policies."""

from __future__ import annotations

import functools

import pytest
import torch

import ckpt_hooks
from ckpt_hooks import checkpoint, checkpoint_region
from ckpt_hooks.policies import dots_saveable, everything_saveable
from tests import kernels as k
from tests.measure import in_turns

# Programs: functions of an input of shape [6, 8] and of two weights [8, 8].


def atomic_sum(x, w, v):
    return k.AtomicSum.apply((x * 1.5) @ w, v).sin().sum()


def atomic_sum_of_input(x, w, v):
    return k.AtomicSum.apply(x, v).sin() @ w


def heads(x, w):
    return (x @ w).view(1, len(x), 2, 4)


def tables(x):
    angles = torch.arange(2.0)
    return angles.cos(), angles.sin()


def rope(x, w, v):
    q, key = k.Rope.apply(heads(x, w), heads(x, v), *tables(x))
    return (q * key).sin().sum()


def swiglu(x, w, v):
    return k.SwiGLU.apply(x @ w, x @ v).sin() @ w


def swiglu_forward(x, w, v):
    return k.ForwardSwiGLU.apply(x @ w, x @ v).sin() @ w


def rms_norm(x, w, v):
    return x + k.RMSNorm.apply(x, w[0]).sin() @ v


def rms_norm_inside(x, w, v):
    h = x + (x @ w).sin()
    return h + k.RMSNorm.apply(h, v[0]).tanh() @ w


def pure_block(x, w, v):
    return block(x, w, v, k.PureRMSNorm, k.PureRope, k.PureSwiGLU)


def kernel_block(x, w, v):
    return block(x, w, v, k.RMSNorm, k.Rope, k.SwiGLU)


def block(x, w, v, norm, rope, swiglu):
    h = norm.apply(x, w[0])
    q, key = rope.apply(heads(h, w), heads(h, v), *tables(x))
    q, key, value = q.transpose(1, 2), key.transpose(1, 2), heads(h, w * v).transpose(1, 2)
    x = x + ((q @ key.mT).softmax(-1) @ value).transpose(1, 2).reshape(x.shape) @ v
    h = norm.apply(x, v[0])
    return x + swiglu.apply(h @ w, h @ v) @ w


def statistics(x, w, v):
    out, buffer = k.Statistics.apply(x @ w, torch.zeros(8))
    return out.sin() @ v + buffer.detach()


def unmarked_statistics(x, w, v):
    buffer = torch.zeros(8)
    out = k.UnmarkedStatistics.apply(x @ w, buffer)
    return out.sin() @ v * (buffer * 2).cos()


def dirty(x, w, v):
    return (k.Dirty.apply(x @ w) * v[0]).exp()


def dirty_view(x, w, v):
    h = (x @ w) * 2
    view = h.detach()[:3]
    k.Dirty.apply(h)
    return h.sin() + (view * 2).cos().sum()


def unmarked(x, w, v):
    h = x @ w
    return k.Unmarked.apply(h) @ v + (h * 3).sin()


def unmarked_view(x, w, v):
    h = (x @ w).view(2, 3, 8)
    part = h[1]
    return k.Unmarked.apply(part) @ v + (h * 3).sin().sum(0)


def several(x, w, v):
    out, none, view, seven, other = k.Several.apply(x @ w, x @ v, 3.0)
    assert none is None
    return out.sin() + (view.view(6, 8) * seven).cos() + other.exp()


def function_in_function(x, w, v):
    h = x @ w
    return k.Outer.apply(h).sin() + (h * 2).cos()


def random_numbers(x, w, v):
    h = torch.dropout(x @ w, 0.5, True)
    return k.Drops.apply(h, 0.3).sin() + torch.rand(8) * k.Drops.apply(h * 2, 0.5).sin()


def autocast(x, w, v):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = k.Cast.apply((x @ w).sin(), v)
        return k.Cast.apply(h.relu(), v).float().sin()


def set_up(x, w, v):
    out, gate = k.SetUp.apply((x @ w).sin(), x @ v, (2.0, {"bias": 0.25}))
    return out.sin() * gate


def lists(x, w, v):
    return k.Lists.apply(x @ w, {"scale": (x.detach() * 2).sin(), "shifts": [x.detach().cos(), v[0].detach()]}).sin()


def identity(x, w, v):
    h = (x @ w).sin()
    return k.Identity.apply(h).exp() + h.cos()


def asks_for_gradients(x, w, v):
    return k.AsksForGradients.apply(x.detach() @ w.detach(), (x @ v).sin()).exp()


PROGRAMS = [
    *(atomic_sum, atomic_sum_of_input, rope),
    *(swiglu, swiglu_forward, rms_norm, rms_norm_inside),
    *(pure_block, kernel_block, statistics, unmarked_statistics, dirty, dirty_view, unmarked),
    *(unmarked_view, several, function_in_function, random_numbers, autocast, set_up),
    *(lists, identity, asks_for_gradients),
]


# Forms


def called(function, *args, **options):
    return checkpoint(**options)(function)(*args)


def region(function, *args, **options):
    with checkpoint_region(**options):
        return function(*args)


def nested(outer, inner, function, *args):
    return outer(lambda *args: inner(function, *args).sin() * 1.5, *args)


def halves(function, *args):
    with checkpoint_region(replay_whole=False):
        x = args[0] * 1.25
        with checkpoint_region(replay_whole=False):
            y = function(x, *args[1:]).sin()
        return (y * x.sum()).exp()


def plain_halves(function, *args):
    x = args[0] * 1.25
    return (function(x, *args[1:]).sin() * x.sum()).exp()


_parts, _whole = (functools.partial(region, replay_whole=whole) for whole in (False, True))
_dots, _all = functools.partial(region, policy=dots_saveable), functools.partial(region, policy=everything_saveable)
_called_dots = functools.partial(called, policy=dots_saveable)

#: Each with what it is without regions.
FORMS = {
    "checkpoint": called,
    "checkpoint, dots": _called_dots,
    "checkpoint, everything": functools.partial(called, policy=everything_saveable),
    "parts": _parts,
    "whole": _whole,
    "parts, dots": functools.partial(_dots, replay_whole=False),
    "whole, dots": functools.partial(_dots, replay_whole=True),
    "everything": _all,
    "split": functools.partial(region, split_backward=True),
    "debug": lambda function, *args: _debugged(function, *args),
    "region in region": functools.partial(nested, _parts, _parts),
    "region in dots": functools.partial(nested, _dots, _whole),
    "dots in region": functools.partial(nested, _parts, _dots),
    "region in checkpoint": functools.partial(nested, called, _parts),
    "checkpoint in region": functools.partial(nested, _parts, called),
    "dots in checkpoint, dots": functools.partial(nested, _called_dots, _dots),
    "checkpoint, dots in dots": functools.partial(nested, _dots, _called_dots),
    "checkpoint, dots in checkpoint": functools.partial(nested, called, _called_dots),
    "halves": halves,
}


def _debugged(function, *args):
    with ckpt_hooks.set_checkpoint_debug_enabled(True):
        return region(function, *args)


def plain(function, *args):
    return function(*args)


def _plain_form(form):
    if form == "halves":
        return plain_halves
    return functools.partial(nested, plain, plain) if " in " in form else plain


def leaves():
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=draw).requires_grad_() for size in ((6, 8), (8, 8), (8, 8))]


def once(run, function):
    x, w, v = leaves()
    torch.manual_seed(5)
    out = run(function, x * 1, w, v).sum()
    return [out.detach(), *torch.autograd.grad(out, (x, w, v), allow_unused=True), torch.rand(1)]


def twice(run, function):
    x, w, v = leaves()
    torch.manual_seed(5)
    out = run(function, x * 1, w, v).sum()
    first = torch.autograd.grad(out, (x, w, v), retain_graph=True, allow_unused=True)
    return [*first, *torch.autograd.grad(out, (x, w, v), allow_unused=True)]


def double(run, function):
    x, w, v = leaves()
    torch.manual_seed(5)
    out = run(function, x * 1, w, v).sum()
    first = torch.autograd.grad(out, (x, w, v), create_graph=True, allow_unused=True)
    return list(torch.autograd.grad(sum(one.square().sum() for one in first if one is not None), (x, w, v), allow_unused=True))


def in_parts(run, function):
    x, w, v = leaves()
    torch.manual_seed(5)
    out = run(function, x * 1, w, v).sum()
    return [
        *torch.autograd.grad(out, (x,), retain_graph=True, allow_unused=True),
        *torch.autograd.grad(out, (w, v), allow_unused=True),
    ]


#: Functions whose backward overwrites what they saved: in a second backward plain autograd reads gradients.
OVERWRITING = {swiglu, kernel_block}


def same(one, other):
    if one is None or other is None:
        return one is other
    return (
        torch.equal(one.view(torch.int32), other.view(torch.int32)) if one.dtype is torch.float32 else torch.equal(one, other)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_those_without_regions(program, form):
    check(program, once, form)


@pytest.mark.parametrize(
    ("program", "way", "form"),
    in_turns([program for program in PROGRAMS if program not in OVERWRITING], (twice, double, in_parts), FORMS),
)
def test_other_backwards_give_what_they_give_without_regions(program, way, form):
    check(program, way, form)


def check(program, way, form):
    expected = way(_plain_form(form), program)
    found = way(FORMS[form], program)
    assert list(map(same, found, expected)) == [True] * len(expected)


def test_a_backward_in_inference_mode_gets_copies_of_tensors_still_needed():
    """Inference tensors, which have no version."""

    def program(x, w, v):
        h = (x @ w).sin()
        return k.RMSNorm.apply(h, v[0]) * h.exp() * k.RMSNorm.apply(h, v[1])

    def way(run, function):
        x, w, v = leaves()
        out = run(function, x * 1, w, v).sum()
        with torch.inference_mode():
            return torch.autograd.grad(out, (x, w, v))

    check(program, way, "parts")
