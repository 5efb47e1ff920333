"""State of modules: where it is looked for, what is copied, what a rerun leaves behind."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from ckpt_hooks import MutationError, checkpoint, trace


def leaf(size):
    """Returns a leaf with the same elements each time, for which nothing is drawn."""
    return torch.linspace(-1, 1, size, dtype=torch.float64).requires_grad_()


def test_regions_share_copies_of_what_nobody_writes_to():
    """Where they are made at all: of small tensors, and while the first forwards run. Of large frozen weights none is made."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.Buffer(torch.ones(1000, dtype=torch.float64))
            self.strided = nn.Buffer(torch.ones(50, 2, dtype=torch.float64).t())
            self.large = nn.Buffer(torch.ones(200_000, dtype=torch.float64))
            self.frozen = nn.Parameter(torch.zeros((1 << 22) + 1), requires_grad=False)

        def forward(self, x):
            return (x * self.small[0] * self.strided[0, 0] * self.large[0]).sin()

    held = []
    for count in (1, 4):
        module, x = Reads(), leaf(3)
        with trace() as found:
            outputs = [checkpoint(module, x) for _ in range(count)]
        held.append(found.steps[0].held_bytes["state"])
        del outputs
    assert held[0] == held[1]


@pytest.mark.usefixtures("no_gc")
def test_parameters_without_gradients_are_not_kept():
    """Where a framework gathers them for forward and puts others in their place."""
    module = nn.Linear(3, 3).requires_grad_(False)
    x = torch.ones(2, 3, requires_grad=True)
    gathered = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    alive = weakref.ref(gathered)
    module.weight = gathered
    y = checkpoint(lambda x: module(x.sin()).exp(), x)
    module.weight = nn.Parameter(torch.empty(3, 3, device="meta"), requires_grad=False)
    del gathered
    assert alive() is None
    del y


class SharesMemory(nn.Module):
    """Has a buffer under two names, or a view of it, and binds the second one anew in each forward."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.register_buffer("whole", torch.ones(4))
        self.register_buffer("part", self.share())

    def share(self):
        return self.whole if self.kind == "same" else self.whole[:]

    def forward(self, x):
        written = self.part if self.kind == "view that is written" else self.whole
        written.add_(1)
        y = (x * self.part.clone()).sin() * self.whole.clone()
        if self.kind == "both bound anew":
            self.whole = self.whole + 1
        self.part = self.share()
        return y


@pytest.mark.parametrize("kind", ["same", "view", "view that is written", "both bound anew"])
def test_tensors_that_are_gone_share_memory_in_a_rerun_as_they_did(kind):
    plain, module = SharesMemory(kind), SharesMemory(kind)
    x = leaf(4)
    pending = []
    for _ in range(3):
        expected = torch.autograd.grad(plain(x).sum(), x)[0]
        pending.append((checkpoint(module, x).sum(), expected))
    for y, expected in reversed(pending):
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    assert torch.equal(module.whole, plain.whole)
    assert torch.equal(module.part, plain.part)


def test_an_argument_that_comes_to_require_grad_keeps_its_class_and_attributes():
    weight = nn.Parameter(torch.linspace(0, 1, 3), requires_grad=False)
    weight.tag = "mine"

    def function(x, weight):
        assert isinstance(weight, nn.Parameter)
        assert weight.tag == "mine"
        weight.requires_grad_()
        return (x * weight).sin()

    x = leaf(3)
    checkpoint(function, x, weight).sum().backward()
    assert torch.equal(x.grad, (x * weight).cos() * weight)


def test_a_module_with_buffers_in_inference_mode_with_gradients_enabled():
    norm, plain, x = nn.BatchNorm1d(3), nn.BatchNorm1d(3), torch.rand(4, 3)
    with torch.inference_mode(), torch.enable_grad():
        assert torch.equal(checkpoint(norm, x), plain(x))
    assert torch.equal(norm.running_mean, plain.running_mean)


def test_memory_that_takes_the_place_of_other_memory():
    """A parameter's new storage may have the Python object of the old storage, which nobody holds: it is seen all the same."""
    layer, plain = nn.Linear(64, 64), nn.Linear(64, 64)
    x = torch.randn(3, 64, requires_grad=True)
    plain.load_state_dict(layer.state_dict())
    for _ in range(6):
        results = []
        for module, run in ((plain, lambda module, x: module(x)), (layer, checkpoint)):
            module.weight.data = module.weight.data * 1.5
            y = run(module, x)
            results.append((y, *torch.autograd.grad(y.sum(), [x, *module.parameters()])))
        assert all(map(torch.equal, *results))
        y = checkpoint(layer, x)
        layer.weight.data = layer.weight.data * 1.0
        layer.weight.untyped_storage()  # whose object is where the object of the old storage was
        with pytest.raises(MutationError):
            y.sum().backward()
