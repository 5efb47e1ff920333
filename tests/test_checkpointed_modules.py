"""Modules in the curried form of ``checkpoint``: what it returns is a module, with the attributes of the one it calls."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint
from ckpt_hooks.policies import dots_saveable
from tests.measure import CountOps
from tests.test_modules import Block, all_same, trained


class Net(nn.Module):
    """Holds a region in place of a block."""

    def __init__(self, region=lambda block: block):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = region(Block())

    def forward(self, x):
        return self.block(self.first(x))


@pytest.fixture
def models():
    """Two equal models, the second one with a region."""
    plain = Net()
    model = Net(checkpoint(policy=dots_saveable))
    model.load_state_dict(plain.state_dict())
    return plain, model


def test_registered_trained_and_saved(models):
    """As the block itself: by the same names, and to the same bits."""
    plain, model = models
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert isinstance(model.block, Block)
    assert all_same(trained(model), trained(plain))


def test_it_is_a_region(models):
    _, model = models
    with CountOps() as ops:
        model(torch.ones(3, 4)).sum().backward()
    assert (ops.counts["addmm"], ops.counts["sin"]) == (2, 1)  # the policy keeps the product, and nobody saves the sine
    assert model.block.calls == 1


def test_attributes_are_those_of_the_block():
    block = Block()
    region = checkpoint()(block)
    region.eval()
    assert not block.training
    assert not block.norm.training
    region.extra = 3
    block.more = nn.Parameter(torch.ones(1))
    assert (block.extra, region.more) == (3, block.more)
    region.linear = nn.Linear(4, 4, bias=False)
    assert block.linear is region.linear
    region.to(torch.float64)
    assert block.linear.weight.dtype is torch.float64
    assert region.__wrapped__ is block
    assert inspect.signature(region) == inspect.signature(block)
    assert repr(region) == "Checkpointed" + repr(block)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(models, copied):
    plain, model = models
    twin = copied(model)
    assert twin.block.__wrapped__ is not model.block.__wrapped__
    assert vars(twin.block) is vars(twin.block.__wrapped__)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all_same(trained(twin), trained(plain))


def test_a_shallow_copy():
    block = Block()
    twin = copy.copy(checkpoint()(block))
    twin.extra = 3
    assert not hasattr(block, "extra")
    assert twin.linear is block.linear


def test_replicas_of_data_parallel():
    block = Block()
    region = checkpoint()(block)
    replica = region._replicate_for_data_parallel()
    replica.extra = 3
    assert replica.__wrapped__.extra == 3
    assert not hasattr(block, "extra")
    assert replica(torch.ones(3, 4)).shape == (3, 4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_torchscript_modules_are_functions():
    scripted = torch.jit.script(nn.Linear(2, 2))
    with torch.no_grad():
        scripted(torch.ones(1, 2))
    region = checkpoint()(scripted)
    assert not isinstance(region, nn.Module)
    assert torch.equal(region(torch.ones(1, 2)), scripted(torch.ones(1, 2)))
