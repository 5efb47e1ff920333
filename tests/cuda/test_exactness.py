"""The essentials of exactness on the device: precision, dropout, nesting, policies, state, several backwards."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from train_charlm import Block

from tests.cuda.device import DEVICE, UNDER_POLICIES, WAYS, assert_as_eager, each, needs_cuda, region, tensor
from tests.measure import CountOps

pytestmark = needs_cuda

ALL = {**WAYS, **UNDER_POLICIES}
SURROUNDINGS = {
    "float32": contextlib.nullcontext,
    "autocast to bfloat16": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "autocast to float16": lambda: torch.autocast(DEVICE, torch.float16),
    "autocast without a cache": lambda: torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False),
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@each(ALL)
def test_transformer(run, surroundings, dropout):
    """Two blocks, each a region."""

    def program(run):
        blocks = [Block(128, heads=4, dropout=dropout).to(DEVICE) for _ in range(2)]
        x = y = tensor(2, 64, 128)
        with SURROUNDINGS[surroundings]():
            for block in blocks:
                y = run(block, y)
        parameters = [parameter for block in blocks for parameter in block.parameters()]
        return [y, *grad(y.float().square().sum(), [x, *parameters])]

    assert_as_eager(program, run)


@each(ALL)
def test_convolutions_with_running_statistics(run):
    """Buffers are updated once, and a second backward finds what the first one did."""

    def program(run):
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            layers = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)]
            module = nn.Sequential(*layers).to(DEVICE)
            x = tensor(2, 4, 8, 8)
            y = run(module, run(module, x))
            inputs = [x, *module.parameters()]
            first, second = (grad(y.square().sum(), inputs, retain_graph=again) for again in (True, False))
            return [y, *first, *second, *module.buffers()]

    assert_as_eager(program, run)


@each(ALL)
def test_double_backward(run):
    """Gradients of gradients."""

    def program(run):
        module = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32)).to(DEVICE)
        x = tensor(8, 32)
        y = run(module, x)
        (gradient,) = grad(y.square().sum(), x, create_graph=True)
        return [y, gradient, *grad(gradient.square().sum(), [x, *module.parameters()], allow_unused=False)]

    assert_as_eager(program, run)


@each(ALL)
def test_steps_of_training(run):
    """Losses of a fused optimizer's steps, gradients accumulated."""

    def program(run):
        module = Block(64, heads=4, dropout=0.1).to(DEVICE)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        losses = []
        for _ in range(4):
            for _ in range(2):
                loss = run(module, tensor(2, 32, 64).detach()).square().mean()
                loss.backward()
                losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *module.parameters()]

    assert_as_eager(program, run)


@each(WAYS)
def test_generators_of_the_device(run):
    """One of the user's, besides the default one, and one of the host."""

    def program(run):
        device, host = torch.Generator(DEVICE).manual_seed(3), torch.Generator().manual_seed(4)
        x = tensor(50)

        def function(x):
            noise = torch.rand(x.shape, device=DEVICE, generator=device) + torch.rand(x.shape, generator=host).to(DEVICE)
            return F.dropout((x * noise).sin(), 0.5) * torch.rand(x.shape).to(DEVICE)

        y = run(function, x)
        between = torch.rand(5, device=DEVICE)
        return [y, between, *grad(y.sum(), x), device.get_state(), host.get_state()]

    assert_as_eager(program, run)


@each(WAYS)
def test_a_device_by_default(run):
    """``torch.set_default_device`` and blocks of it, which backward may be outside of."""

    def program(run):
        with torch.device(DEVICE):
            x = torch.randn(20).requires_grad_()
            y = run(lambda x: (x * torch.rand(20) + torch.arange(20)).sin().exp(), x)
        return [y, *grad(y.sum(), x)]

    assert_as_eager(program, run)


@pytest.mark.parametrize("kind", ["function", "region"])
@pytest.mark.parametrize("what", ["saved", "offloaded"])
def test_what_is_kept_does_not_run_again(what, kind):
    """A policy's operators, on the thread of the engine too; the others run again where they are needed."""
    run = UNDER_POLICIES[f"{kind}, products {what}"]
    module, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE), tensor(8, 64)

    def in_backward(run):
        y = run(module, x)
        with CountOps() as ops:
            y.sum().backward()
        return ops.counts

    plainly, found = in_backward(lambda function, x: function(x)), in_backward(run)
    assert (found["addmm"], found["mm"]) == (0, plainly["mm"])
    assert plainly["addmm"] == 0
    assert in_backward(region)["addmm"] >= 1  # the counter sees recomputes of the engine's thread
