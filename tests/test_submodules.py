"""A module whose submodules change between forward and backward, in forward, or between two forwards."""

import gc
import weakref

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint
from tests.measure import in_turns


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


def swap(block):
    block.layers[0], block.layers[2] = block.layers[2], block.layers[0]


CHANGES = {
    "another": lambda block: setattr(block, "first", nn.Linear(4, 4)),
    "another without tensors": lambda block: setattr(block, "act", nn.SiLU()),
    "none": lambda block: setattr(block, "first", nn.Identity()),
    "in a container": lambda block: block.layers.__setitem__(1, nn.Linear(4, 4)),
    "inside of one in a container": lambda block: block.layers[1].__setitem__(1, nn.Sigmoid()),
    "one less": lambda block: block.layers.__delitem__(1),
    "one less, by name": lambda block: block.table.pop("scale"),
    "one more": lambda block: block.layers.append(nn.Tanh()),
    "one more in between": lambda block: block.layers.insert(1, nn.Tanh()),
    "one more by name": lambda block: setattr(block, "extra", nn.Tanh()),
    "another order": swap,
    "another container": lambda block: setattr(block, "layers", nn.ModuleList([nn.Linear(4, 4)])),
    "no hook of registration": lambda block: block._modules.update(act=nn.Sigmoid()),
    "with buffers": lambda block: block.table.update({"norm": nn.BatchNorm1d(4)}),
}

FORMS = {
    "module": lambda block, x: checkpoint(block, x),
    "closure": lambda block, x: checkpoint(lambda x: block(x) * 2, x),
    "method": lambda block, x: checkpoint(block.forward, x),
    "argument": lambda block, x: checkpoint(lambda block, x: block(x), block, x),
    "inside a region": lambda block, x: checkpoint(lambda x: checkpoint(block, x).cos(), x),
}
PLAIN = {
    "closure": lambda block, x: block(x) * 2,
    "inside a region": lambda block, x: block(x).cos(),
}


def outcome(form, change, num_forwards=1):
    """Runs forwards, a change, and the last backward; returns gradients and state of modules old and new, and names."""
    torch.manual_seed(0)
    block = Block()
    held = list(block.modules())
    for _ in range(num_forwards):
        x = torch.randn(3, 4, requires_grad=True)
        y = form(block, x)
    change(block)
    y.square().sum().backward()
    names = [name for name, _ in block.named_modules()]
    modules = [*held, *(module for module in block.modules() if module not in held)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))]
    return [x.grad, *(tensor for one in tensors for tensor in (one, one.grad))], names


def assert_alike(found, expected):
    assert found[1] == expected[1]
    assert len(found[0]) == len(expected[0])
    for one, other in zip(found[0], expected[0], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(("change", "num_forwards", "form"), in_turns(CHANGES, (1, 4), FORMS))
def test_a_rerun_has_the_submodules_of_forward(change, form, num_forwards):
    plain = PLAIN.get(form, lambda block, x: block(x))
    expected = outcome(plain, CHANGES[change], num_forwards)
    assert_alike(outcome(FORMS[form], CHANGES[change], num_forwards), expected)


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
