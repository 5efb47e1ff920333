"""Tensors on their way to the host and back: what goes, how often, and that it comes back as it was."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_region, policies
from ckpt_hooks.offload import offload_saved_tensors
from tests.cuda.device import (
    DEVICE,
    UNDER_POLICIES,
    assert_as_eager,
    delay,
    differing,
    each,
    expected_of,
    needs_cuda,
    outcome,
    poison,
    step,
    tensor,
    under_policy,
)

pytestmark = [*needs_cuda, pytest.mark.usefixtures("unchecked")]

SIDE = 1024
MIB4 = SIDE * SIDE * 4


def hooked(function, *args):
    """Runs a function with what it saves on the host."""
    with offload_saved_tensors():
        return function(*args)


def region_in_hooks(function, *args):
    """Runs a function as a recorded region whose inputs go to the host."""
    with offload_saved_tensors(), checkpoint_region():
        return function(*args)


def mlp():
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Linear(SIDE, SIDE)).to(DEVICE)


OFFLOADING = {
    "hooks": hooked,
    "hooks around a function": lambda function, *args: hooked(checkpoint, function, *args),
    "hooks in a function": lambda function, *args: checkpoint(hooked, function, *args),
    "function, products": under_policy(policies.offload_ops(torch.ops.aten.addmm.default), recorded=False),
    "region, products": under_policy(policies.offload_ops(torch.ops.aten.addmm.default), recorded=True),
}


@pytest.mark.parametrize("part", ["conjugate", "negative"])
@each({name: run for name, run in OFFLOADING.items() if "products" not in name} | {"hooks around a region": region_in_hooks})
def test_views_that_are_conjugates_or_negatives(run, part):
    """Torch's own copy to the host conjugates at once what the device has yet to write, so these stay or go as they are."""

    def function(one, other):
        return one * other * (one * other).conj()

    def program(run):
        x, w = (tensor(512, 512, dtype=torch.complex64) for _ in range(2))
        delay()
        other = (x * w).conj()
        one = x * 1
        if part == "negative":
            one, other = one.imag, other.imag
        y = run(function, one, other)
        poison(512, 512, 2)
        return [y, *grad(torch.view_as_real(y).square().sum() if y.is_complex() else y.square().sum(), [x, w])]

    expected = expected_of(program)
    for _ in range(10):
        assert differing(outcome(program, run), expected) == []


@each(OFFLOADING)
def test_offloading(run):
    """Bit for bit, while the device is late and its free memory holds not-a-number."""

    def program(run):
        modules = [mlp() for _ in range(4)]
        x = y = tensor(SIDE, SIDE)
        for module in modules:
            delay()
            y = run(module, y)
            poison(SIDE, SIDE)
        found = grad(y.sum(), [x, *(parameter for module in modules for parameter in module.parameters())])
        return [y, *found]

    expected = expected_of(program)
    for _ in range(5):
        assert differing(outcome(program, run), expected) == []


@each(OFFLOADING)
def test_a_graph_that_is_retained(run):
    """Two backwards fetch the same; when the graph is gone, so is all that they fetched."""
    module, x = mlp(), tensor(SIDE, SIDE)
    inputs = [x, *module.parameters()]

    def twice(run):
        y = run(module, x)
        return [*grad(y.sum(), inputs, retain_graph=True), *grad(y.sum(), inputs)]

    assert_as_eager(twice, run)
    before = torch.cuda.memory_allocated()
    twice(run)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_memory_of_the_device_is_free_meanwhile():
    """After forward the device holds the result; the rest is on the host, or on its way."""
    modules = [mlp() for _ in range(4)]

    def held_after_forward(block):
        x = y = tensor(SIDE, SIDE)
        before = torch.cuda.memory_allocated()
        with block:
            for module in modules:
                y = module(y)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        y.sum().backward()
        torch.cuda.synchronize()
        del x
        return held

    for _ in range(2):  # the workspaces of cuBLAS, one for each thread and stream, and gradients, come in the first run
        kept = held_after_forward(contextlib.nullcontext())
        moved = held_after_forward(offload_saved_tensors())
    assert kept == 12 * MIB4
    assert moved < 8 * MIB4


def test_memory_of_the_device_is_what_it_was():
    """Steps leave nothing behind, whatever moves."""
    module, x = mlp(), tensor(SIDE, SIDE)
    for name, run in {**OFFLOADING, **UNDER_POLICIES}.items():
        held = []
        for _ in range(3):
            grad(run(module, x).sum(), x)
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
        assert held[1] == held[2], name


@each({"hooks": hooked, "hooks around a function": OFFLOADING["hooks around a function"]})
def test_mixed_precision(run):
    """Casts of weights and of activations, under autocast."""

    def program(run):
        module, x = mlp(), tensor(SIDE, SIDE)
        with torch.autocast(DEVICE, torch.bfloat16):
            y = run(module, x)
        return [y, *grad(y.float().sum(), [x, *module.parameters()])]

    assert_as_eager(program, run)


@each(OFFLOADING)
def test_attention_and_dropout(run):
    """Small tensors that stay among large ones that go; masks are tensors like others."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(512), nn.Linear(512, 1536), nn.Linear(512, 512)

        def forward(self, x):
            query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1)

    def program(run):
        module = Block().to(DEVICE)
        return step(run, module, tensor(4, 100, 512))

    assert_as_eager(program, run)


def test_a_region_offloads_while_its_input_is_written_to():
    """A copy on its way is of what was saved: backward complains as plain autograd does, and no value is wrong."""
    x = tensor(SIDE, SIDE)
    h = x * 1
    with checkpoint_region(), offload_saved_tensors():
        y = h.sin()
    delay()
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        grad(y.sum(), x)
