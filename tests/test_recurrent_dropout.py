"""Dropout of recurrent layers on devices, whose masks go on from layer to layer until torch's generator is set."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ckpt_hooks import checkpoint
from tests.devices import FakeDevices, install  # noqa: F401 -- a fixture
from tests.measure import leaf


class OnDevice(torch.Tensor):
    """A tensor that says that it is on some device, and has no data."""

    @staticmethod
    def __new__(cls, device):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), device=torch.device(device))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        return OnDevice(args[0].device)


#: Masks and devices, where no region looks: what these hold is torch's own, and not part of a module.
_held: dict[str, Any] = {}
_seen: list[torch.Tensor] = []


class Masks:
    """The buffer of one device: seeded from its generator, then advanced by each layer, as in torch's RNN.cpp."""

    def __init__(self, generator):
        self.generator = generator
        self.own: torch.Generator | None = None

    def next(self, size):
        if self.own is None or not self.generator.has_seeded_rnn:
            seed = int(self.generator.draw(1).item() * 2**53)
            self.own = torch.Generator().manual_seed(seed)
            self.generator.has_seeded_rnn = True
        return (torch.rand(size, generator=self.own) > 0.5).double()


class Recurrent(nn.RNNBase):
    """A layer whose parameters say that they are on a device, and whose forward drops out as one there would."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__("RNN_TANH", 2, 2, num_layers=2, dropout=dropout)
        for name, _ in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(OnDevice("hpu:0"), requires_grad=False))

    def forward(self, x):
        x = x.sin()
        return x * _held["masks"].next(8) if self.training and self.dropout else x


def calls(layers, x, call, *, times):
    """Returns what steps give: each runs a layer, a region, and another layer, and goes backward."""
    before, inside, after = layers
    found = []
    for _ in range(times):
        y = after(call(inside, before(x)))
        found += [y.detach(), grad(y.sum(), x)[0]]
    return found


def make(install, *, inside):  # noqa: F811
    devices = _held["devices"] = install("hpu", FakeDevices(2))
    _held["masks"] = Masks(devices.default_generators[0])
    _seen.clear()
    return devices, (Recurrent(), inside(), Recurrent())


def test_layers_after_a_recompute_without_randomness_drop_what_they_drop_without_it(install):  # noqa: F811
    x = leaf(8)
    results = [
        calls(make(install, inside=lambda: lambda x: x.exp().sin())[1], x, call, times=4)
        for call in (checkpoint, lambda function, x: function(x))
    ]
    assert all(map(torch.equal, *results))


class Two(nn.Module):
    """Two such layers, and dropout of the device after them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Recurrent(), Recurrent()

    def forward(self, x):
        x = self.two(self.one(x).exp())
        x = x * (_held["devices"].default_generators[0].draw() > 0.5)
        _seen.append(x.detach())
        return x.sin().exp()


@pytest.mark.parametrize("place", ["module", "closure"])
def test_layers_in_a_region_drop_in_a_recompute_what_they_dropped_in_forward(install, place):  # noqa: F811
    _, layers = make(install, inside=Two)
    call = checkpoint if place == "module" else lambda module, x: checkpoint(lambda x: module(x), x)
    calls(layers, leaf(8), call, times=6)  # a module is looked at in its first few forwards only
    assert len(_seen) == 12
    for forward, rerun in zip(_seen[::2], _seen[1::2], strict=True):
        assert torch.equal(forward, rerun)


@pytest.mark.parametrize("change", ["eval", "no dropout", "not preserved"])
def test_layers_that_drop_nothing_have_nothing_seeded(install, change):  # noqa: F811
    devices, (_, inside, _) = make(install, inside=lambda: Recurrent(0.0 if change == "no dropout" else 0.5))
    inside.train(change != "eval")
    call = functools.partial(checkpoint, preserve_rng_state=change != "not preserved")
    for _ in range(6):
        devices.counted()
        call(inside, leaf(8))
        assert devices.counted()["set"] == 0


def test_a_layer_that_drops_out_sets_the_state_of_its_device_once_a_forward(install):  # noqa: F811
    devices, (_, inside, _) = make(install, inside=Recurrent)
    for _ in range(6):
        devices.counted()
        checkpoint(inside, leaf(8))
        assert devices.counted()["set"] == 1
