"""Forward-mode differentiation around regions: tangents of their inputs, results and gradients."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from ckpt_hooks import checkpoint, checkpoint_region, policies

# Torch loads formulas for tangents by TorchScript.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]


def recorded(function, x):
    with checkpoint_region():
        return function(x)


FORMS = {
    "region": checkpoint,
    "to the end": checkpoint(early_stop=False),
    "policy": checkpoint(policy=policies.dots_saveable),
    "recorded": recorded,
    "nested": lambda function, x: checkpoint(lambda x: checkpoint(function, x), x),
}


def call(form, function, x):
    return form(function)(x) if form in (FORMS["to the end"], FORMS["policy"]) else form(function, x)


def plain(function, x):
    return function(x)


def stack(form, x, layers, *, is_leaf, reverse):
    """Returns the results of a stack of regions of a dual number, gradients and tangents, that of the gradient included."""
    found = []
    with forward_ad.dual_level():
        h = forward_ad.make_dual(x if is_leaf else x * 1, torch.full_like(x, 0.5))
        for layer in layers:
            h = call(form, functools.partial(lambda layer, h: layer(h.sin()).tanh(), layer), h)
        found += forward_ad.unpack_dual(h)
        if reverse == "backward":
            h.sum().backward()
            found += [x.grad, *(layer.weight.grad for layer in layers)]
        else:
            (gradient,) = torch.autograd.grad(h.sum(), x, create_graph=reverse == "graph")
            found += forward_ad.unpack_dual(gradient)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("reverse", ["backward", "gradient", "graph"])
def test_backward_in_a_dual_level(form, is_leaf, reverse):
    def found(form):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(3)]
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        return [found.clone() for found in stack(form, x, layers, is_leaf=is_leaf, reverse=reverse) if found is not None]

    expected, results = found(plain), found(FORMS[form])
    assert len(results) == len(expected) >= 4
    assert list(map(torch.equal, results, expected)) == [True] * len(expected)
