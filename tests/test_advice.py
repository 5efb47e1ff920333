"""Advice of messages, followed to the letter: each error says what to do, and what it says then works."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ckpt_hooks
from ckpt_hooks import (
    DeterminismError,
    MutationError,
    checkpoint,
    checkpoint_region,
)
from tests.measure import leaf

# Torch uses what it deprecates: at import of its decompositions, which forward mode needs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]


def recorded(function, *args):
    with checkpoint_region():
        return function(*args)


def plain(function, *args):
    return function(*args)


def layer(kind=nn.Linear, *args, **kwargs):
    torch.manual_seed(0)
    return kind(*(args or (4, 4)), **kwargs)


def same(one, other):
    return all(map(torch.equal, one, other))


# A buffer or a parameter that changes after a recorded region


class Contrast(nn.Module):
    """MoCo: logits from a queue, to which each step writes."""

    def __init__(self, *, clone_before):
        super().__init__()
        self.encoder = layer()
        self.register_buffer("queue", torch.linspace(-1, 1, 32).view(4, 8).clone())
        self.clone_before = clone_before

    def forward(self, x, region):
        queue = self.queue.clone() if self.clone_before else self.queue
        with region:
            keys = F.normalize(self.encoder(x))
            loss = F.cross_entropy(keys @ (queue if self.clone_before else queue.clone()), torch.zeros(2, dtype=torch.long))
        self.queue[:, :2] = keys.detach().t()
        return loss


def test_a_queue_is_cloned_before_the_region():
    def gradients(region, *, clone_before):
        model = Contrast(clone_before=clone_before)
        loss = model(torch.linspace(-1, 1, 8).view(2, 4), region)
        return torch.autograd.grad(loss, list(model.parameters()))

    with pytest.raises(MutationError) as caught:
        gradients(checkpoint_region(), clone_before=False)
    assert str(caught.value).startswith("the buffer 'queue' of Contrast, a float32[4, 8] tensor, that region 'region' needs")
    assert "use a clone of it in the region" in str(caught.value)
    assert caught.value.tensor == "the buffer 'queue' of Contrast, a float32[4, 8] tensor"
    expected = gradients(contextlib.nullcontext(), clone_before=False)
    assert same(gradients(checkpoint_region(), clone_before=True), expected)


# What forward takes away


def test_a_backward_of_what_has_gone_runs_in_a_recorded_region():
    def gradient(form):
        x = torch.linspace(-1, 1, 3).requires_grad_()
        h = x.sin()
        loss = h.exp().sum()
        y = form(lambda h, loss: torch.autograd.grad(loss, h, retain_graph=True)[0] * h.cos(), h, loss).sum()
        del h, loss
        return torch.autograd.grad(y, x)

    with pytest.raises(RuntimeError, match="appears to not have been used in the graph") as caught:
        gradient(checkpoint)
    if hasattr(caught.value, "add_note"):
        assert "which a backward inside of the region started" in caught.value.__notes__[0]
    assert same(gradient(recorded), gradient(plain))


# Transforms of torch.func inside of a region


@pytest.mark.parametrize("form", [checkpoint, recorded])
def test_gradients_in_a_region_by_autograd(form):
    def inside(x):
        return torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)[0].exp()

    x = leaf(3)
    assert same(torch.autograd.grad(form(inside, x).sum(), x), torch.autograd.grad(inside(x).sum(), x))
    left_out = form(torch.exp, torch.func.grad(lambda z: (z.sin() * z).sum())(x)).sum()
    assert same(torch.autograd.grad(left_out, x), torch.autograd.grad(inside(x).sum(), x))


@pytest.mark.parametrize("form", [plain, recorded])
def test_nested_regions_say_it_once(form):
    with pytest.raises(RuntimeError) as caught:
        checkpoint(lambda x: form(torch.func.grad(lambda z: z.sin().sum()), x), leaf(3))
    assert str(caught.value).count("A region works by such hooks.") == 1


# Debug mode


@pytest.mark.parametrize("debug", [True, False])
def test_debug_mode_is_asked_for_only_without_it(debug):
    def function(x):
        return x.cos() if ckpt_hooks.is_recomputing() else x.sin().exp()

    with pytest.raises(DeterminismError) as caught:
        checkpoint(function, leaf(3), debug=debug).sum().backward()
    errors = [caught.value]
    while errors[-1].__cause__ is not None:
        errors.append(errors[-1].__cause__)
    assert any("Pass `debug=True`" in str(error) for error in errors) is not debug


# TorchScript


def test_other_exceptions_of_recomputes_have_no_such_note():
    def function(x):
        if ckpt_hooks.is_recomputing():
            raise MemoryError
        return x.sin().exp()

    with pytest.raises(MemoryError) as caught:
        checkpoint(function, leaf(3)).sum().backward()
    assert not getattr(caught.value, "__notes__", [])


def test_parameters_in_one_memory_are_told_apart():
    model = nn.Sequential(layer(), layer())
    flat = torch.cat([model[0].weight.detach().flatten(), model[1].weight.detach().flatten()])
    model[0].weight.data, model[1].weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)
    x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    with checkpoint_region():
        y = model(x).exp() * 2
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(MutationError, match=r"^the parameter '1\.weight' of Sequential, "):
        y.sum().backward()
