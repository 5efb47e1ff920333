"""Regions where operators are traced into a graph: they keep everything, and the graph is that of the program without them."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.autograd import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_hooks import checkpoint, checkpoint_region, checkpoint_sequential, create_selective_checkpoint_contexts, policies
from ckpt_hooks.offload import offload_saved_tensors

pytestmark = pytest.mark.compile

aten = torch.ops.aten


def in_offload(function):
    def run(*args):
        with offload_saved_tensors():
            return function(*args)

    return run


REGIONS = {
    "function": lambda f: functools.partial(checkpoint, f),
    "function with a policy": lambda f: checkpoint(policy=policies.dots_saveable)(f),
    "function with torch's form of a policy": lambda f: functools.partial(
        checkpoint, f, context_fn=functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])
    ),
    "function, with logs": lambda f: checkpoint(debug=True)(f),
    "function, values compared": lambda f: checkpoint(determinism_check="values")(f),
    "function, to its end": lambda f: checkpoint(early_stop=False)(f),
    "function in a function": lambda f: checkpoint()(checkpoint()(f)),
    "sequence": lambda f: lambda x, w: checkpoint_sequential([lambda p: (f(*p), p[1]), lambda p: p[0]], 2, (x, w)),
    "recorded": lambda f: checkpoint_region()(f),
    "recorded with a policy": lambda f: checkpoint_region(policy=policies.dots_saveable)(f),
    "recorded in recorded": lambda f: checkpoint_region()(checkpoint_region()(f)),
    "recorded in a function": lambda f: checkpoint()(checkpoint_region()(f)),
    "function in offload": lambda f: in_offload(checkpoint()(f)),
    "recorded in offload": lambda f: in_offload(checkpoint_region()(f)),
}


def block(x, w):
    return (x @ w).sin().exp()


def dropout(x, w):
    return torch.nn.functional.dropout((x @ w).sin(), 0.5).exp()


def in_place(x, w):
    h = x @ w
    h[0].mul_(2)
    return h.sigmoid_() * x


def partly_without_grad(x, w):
    with torch.no_grad():
        scale = (x @ w).exp().mean()
    return (x * scale).sin() @ w


FUNCTIONS = {"block": block, "dropout": dropout, "in place": in_place, "partly without grad": partly_without_grad}


def step(function):
    """Returns forward and backward of a function twice, as a function of its arguments."""

    def run(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = function(function(x, w), w)
        return [y.detach(), *grad(y.square().sum(), (x, w))]

    return run


def traced(function, mode, **options):
    torch.manual_seed(0)
    return make_fx(step(function), tracing_mode=mode, **options)(torch.randn(4, 4), torch.randn(4, 4))


@functools.cache
def expected_code(name, mode, pre_dispatch=False):
    return traced(FUNCTIONS[name], mode, pre_dispatch=pre_dispatch).code


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("region", list(REGIONS))
def test_the_graph_is_that_of_the_program_without_regions(region, mode):
    """And comes to the same for other arguments, from the same random numbers."""
    for name, function in FUNCTIONS.items():
        graph = traced(REGIONS[region](function), mode)
        assert graph.code == expected_code(name, mode)
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        torch.manual_seed(1)
        found = graph(x, w)
        torch.manual_seed(1)
        expected = step(function)(x, w)
        assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 3


@pytest.mark.parametrize("region", list(REGIONS))
def test_a_symbolic_graph_takes_other_shapes(region):
    graph = traced(REGIONS[region](block), "symbolic")
    x, w = torch.randn(7, 7), torch.randn(7, 7)
    assert [torch.equal(a, b) for a, b in zip(graph(x, w), step(block)(x, w), strict=True)] == [True] * 3


class Doubles(TorchDispatchMode):
    """Makes each sine twice as large."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is aten.sin.default else out


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_a_context_for_forward_is_entered(policy):
    """What a policy keeps is of no use; what the user has in ``context_fn`` is part of the program."""

    def contexts():
        entered.append("forward")
        return Doubles(), contextlib.nullcontext()

    entered = []
    region = checkpoint(policy=policy, context_fn=contexts)(block)

    def by_hand(x, w):
        with Doubles():
            return block(x, w)

    assert traced(region, "fake").code == traced(by_hand, "fake").code
    assert entered == ["forward"] * 2
