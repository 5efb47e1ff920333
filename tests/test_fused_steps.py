"""Steps of fused optimizers, which no version counter tells of: noticed by recomputes, and by nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

from ckpt_hooks import MutationError, checkpoint, checkpoint_region
from tests.measure import leaf

REGIONS = {"function": checkpoint, "recorded": lambda function, *args: checkpoint_region()(function)(*args)}
OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]

regions = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)


def stepped(*parameters, optimizer=torch.optim.SGD):
    """Takes a step of a fused optimizer that moves parameters."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer(parameters, lr=0.1, fused=True).step()


@pytest.fixture(autouse=True)
def _a_region_has_run():
    checkpoint(torch.sin, leaf(2)).sum().backward()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_program_without_regions_is_left_alone(optimizer):
    """Plain autograd reads what the step wrote, as it does where no region ever ran."""
    x, weight = leaf(3).float().detach().requires_grad_(), torch.rand(3, requires_grad=True)
    y = x * weight
    stepped(weight, optimizer=optimizer)
    assert weight._version == 0
    assert torch.equal(grad(y.sum(), x)[0], weight)


@regions
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_fused_optimizer_is_noticed(region, optimizer):
    weight = torch.rand(3, requires_grad=True)
    y = region(lambda x: (x + weight).tanh() * 2, torch.rand(3, requires_grad=True))
    stepped(weight, optimizer=optimizer)
    with pytest.raises(MutationError, match="a step of a fused optimizer wrote to it, which its version does not tell"):
        y.sum().backward()


@regions
@pytest.mark.parametrize("alias", [lambda weight: weight.detach(), lambda weight: weight[1:]], ids=["detached", "view"])
def test_an_alias_is_noticed(region, alias):
    weight = torch.rand(3, requires_grad=True)
    x = torch.rand(1, requires_grad=True)
    y = region(lambda x, part: (x + part).tanh() * 2, x, alias(weight))
    stepped(weight)
    with pytest.raises(MutationError, match="inplace operation"):
        y.sum().backward()


@regions
def test_training_goes_on(region):
    def train(run):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(layer.parameters(), 0.1, fused=True)
        for _ in range(4):
            optimizer.zero_grad()
            F.mse_loss(run(layer, torch.rand(2, 4)), torch.rand(2, 4)).backward()
            optimizer.step()
        return list(layer.parameters())

    assert all(map(torch.equal, train(region), train(lambda function, *args: function(*args))))
