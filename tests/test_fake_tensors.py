"""Regions over fake tensors: what is kept and what runs again is the same as with values, so that memory can be predicted."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ckpt_hooks import checkpoint, checkpoint_name, checkpoint_region, policies
from tests.measure import in_turns


def in_region(**options):
    def run(function, x):
        with checkpoint_region(**options):
            return function(x)

    return run


REGIONS = {
    "none": lambda function, x: function(x),
    "checkpoint": checkpoint,
    "policy": lambda function, x: checkpoint(policy=policies.dots_saveable)(function)(x),
    "region": in_region(),
    "region with a policy": in_region(policy=policies.dots_saveable),
    "region with names": in_region(policy=policies.save_only_these_names("hidden")),
    "region in a region": lambda function, x: in_region()(lambda x: in_region()(function, x) * 1, x),
    "checkpoint in a region": lambda function, x: in_region()(lambda x: checkpoint(function, x) * 1, x),
    "region in a checkpoint": lambda function, x: checkpoint(lambda x: in_region()(function, x) * 1, x),
}


class Block(nn.Module):
    """Operators of many kinds: views, writes, memory that is made of nothing, random draws, running statistics."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.BatchNorm1d(size)
        self.first, self.second = nn.Linear(size, 2 * size), nn.Linear(size, size)
        self.register_buffer("scale", torch.ones(size))

    def forward(self, x):
        h = checkpoint_name(self.first(self.norm(x)), "hidden")
        one, other = h.chunk(2, -1)
        weights = torch.empty_like(one).uniform_().masked_fill_(other > 1, 0.5)
        weights[:, 0].mul_(2)
        noise = torch.zeros(x.shape) + torch.rand_like(x) + torch.full_like(x, 0.5)
        h = self.second(nn.functional.relu(one.sin() * weights, inplace=True)) + noise.tanh() * other * self.scale
        return x + nn.functional.dropout(h, 0.2)


def model_and_input(size=8, layers=2, batch=5):
    return nn.Sequential(*[Block(size) for _ in range(layers)]), torch.randn(batch, size)


def run_through(model, region, x):
    for block in model:
        x = region(block, x)
    return x.sin().sum()


@pytest.mark.parametrize("policy", [None, policies.dots_saveable, policies.save_only_these_names("hidden")])
@pytest.mark.parametrize("hooks", [False, True])
def test_the_same_is_kept(policy, hooks):
    def kept(mode):
        around = torch.autograd.graph.save_on_cpu() if hooks else contextlib.nullcontext()
        with mode, around:
            model, x = model_and_input()
            with checkpoint_region(policy=policy) as region:
                y = run_through(model, lambda block, x: block(x), x)
            found = [kept[:3] for kept in region.kept()]
            y.backward()
        assert region.kept() == []
        return found

    expected = kept(contextlib.nullcontext())
    assert expected
    assert kept(FakeTensorMode()) == expected


@pytest.mark.parametrize(
    ("region", "backward", "forward"),
    in_turns(
        ["none", "checkpoint", "policy", "region", "region with a policy", "checkpoint in a region"],
        ["in the mode", "outside of it", "in the mode entered again", "twice", "alone"],
        ["in the mode", "with the mode in the region", "outside of it"],
    ),
)
@pytest.mark.slow
def test_wherever_the_mode_is(region, forward, backward):
    """What is made of nothing in a recompute is as fake as in forward, whether its mode is active or not."""
    mode = FakeTensorMode()
    with mode:
        model, x = model_and_input()

    class Inside(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            with mode:
                return self.block(x)

    class WithoutFactories(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            h = self.block.second(self.block.norm(x))
            return torch.empty_like(h).uniform_().mul_(h).sin() + torch.zeros_like(h) + h.exp()

    if forward == "with the mode in the region":
        model = nn.Sequential(*map(Inside, model))
    elif forward == "outside of it":
        model = nn.Sequential(*map(WithoutFactories, model))
    stack = contextlib.ExitStack()
    with stack:
        if forward == "in the mode":
            stack.enter_context(mode)
        y = run_through(model, REGIONS[region], x)
        if backward == "in the mode":
            stack.enter_context(mode)
            y.backward()
    if backward == "in the mode entered again":
        with mode:
            y.backward()
    elif backward == "outside of it":
        y.backward()
    elif backward == "twice":
        y.backward(retain_graph=True)
        y.backward()
    elif backward == "alone":
        node = y.grad_fn.next_functions[0][0]  # of the sine, which saved the last region's output
        assert type(node._saved_self) is FakeTensor
        y.backward()
    gradients = [parameter.grad for block in model for parameter in block.parameters()]
    assert {type(gradient) for gradient in gradients} <= {FakeTensor, type(None)}
    assert any(gradient is not None for gradient in gradients)
    assert num_active_modes() == 0


def num_active_modes():
    return torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("region", ["checkpoint", "policy", "region", "region with a policy"])
def test_values_and_none_in_one_region(region):
    """A region that enters a mode for a part of what it does brings back each part as it was."""

    def program(region):
        torch.manual_seed(0)
        mode, x = FakeTensorMode(), torch.randn(3, 4, requires_grad=True)
        with mode:
            fake_model, fake_x = model_and_input(4, 1, 3)

        def function(x):
            h = x.sin().exp()
            with mode:
                fake = fake_model(fake_x).tanh() * torch.ones(4)
            return (h + torch.ones(4)).cos().tan(), fake.sin()

        h, fake = region(function, x)
        fake.sum().backward()
        h.sum().backward()
        return x.grad

    assert torch.equal(program(REGIONS[region]), program(REGIONS["none"]))


@pytest.mark.parametrize("options", [{"determinism_check": "values"}, {"debug": True}, {"early_stop": False}], ids=str)
def test_options(options):
    def region(block, x):
        return checkpoint(**options)(block)(x)

    for leave_first in (False, True):
        mode = FakeTensorMode()
        with mode:
            model, x = model_and_input()
            y = run_through(model, region, x)
            if not leave_first:
                y.backward()
        if leave_first:
            y.backward()
        assert [(type(p.grad), p.grad.shape) for p in model.parameters()] == [(FakeTensor, p.shape) for p in model.parameters()]
