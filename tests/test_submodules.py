"""A module whose submodules change between forward and backward, in forward, or between two forwards."""

import gc
import weakref

import torch
from torch import nn

from ckpt_hooks import checkpoint


class Block(nn.Module):
    """Has submodules by name and in containers; its forward runs all of them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.GELU()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)])
        self.extra = None
        self.table = nn.ModuleDict({"scale": nn.Softplus(), "norm": nn.BatchNorm1d(4)})

    def forward(self, x):
        x = self.act(self.first(x))
        for layer in self.layers:
            x = layer(x).sin()
        if self.extra is not None:
            x = self.extra(x)
        for module in self.table.values():
            x = module(x)
        return x


def assert_alike(found, expected):
    assert found[1] == expected[1]
    assert len(found[0]) == len(expected[0])
    for one, other in zip(found[0], expected[0], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_state_of_an_inserted_submodule_is_put_back():
    """``insert`` binds a submodule without a hook of registration."""

    def run(form):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        x = torch.randn(3, 4, requires_grad=True)
        for step in range(4):
            if step == 2:
                model.insert(1, nn.BatchNorm1d(4))
            form(model, x).sum().backward()
        return [x.grad, *model.buffers(), *(parameter.grad for parameter in model.parameters())], list(model.state_dict())

    assert_alike(run(checkpoint), run(lambda model, x: model(x)))


def test_a_submodule_that_knows_its_parent_keeps_no_model_alive():
    block = Block()
    block.first.parents = [block]
    for _ in range(4):
        checkpoint(block, torch.ones(3, 4, requires_grad=True)).sum().backward()
    gone = weakref.ref(block)
    del block
    gc.collect()
    assert gone() is None
