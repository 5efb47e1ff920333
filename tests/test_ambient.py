"""Rule 7 for what is captured so far: generators, autocast, default device; restored for a recompute, and put back after it."""

from __future__ import annotations

import types

import pytest
import torch

from ckpt_hooks import checkpoint
from ckpt_hooks._ambient import devices
from ckpt_hooks._ambient import random as sources
from tests.measure import Log, as_library, leaf


@as_library
class FakeDevice(types.SimpleNamespace):
    """A device module as backends register them: one generator a device, uninitialised at first."""

    __hash__ = object.__hash__  # as modules have it

    def __init__(self, devices=1, *, generators=True, initialized=True):
        super().__init__(initialized=initialized)
        self.reads = 0
        self.streams = [torch.Generator().manual_seed(i) for i in range(devices)]
        if generators:
            self.default_generators = tuple(self.streams)

    def is_initialized(self):
        return self.initialized

    def device_count(self):
        return len(self.streams)

    def get_rng_state(self, device=0):
        self.reads += 1
        return self.streams[device].get_state()

    def set_rng_state(self, state, device=0):
        self.streams[device].set_state(state)

    def draw(self, device=0):
        return torch.rand(8, generator=self.streams[device], dtype=torch.float64)


@pytest.fixture
def install(monkeypatch):
    """Puts a fake device module on torch under a name and lets the engine know of the name."""

    def put(name, module):
        monkeypatch.setattr(torch, name, module, raising=False)
        monkeypatch.setattr(devices, "_DEVICE_TYPES", [*devices._DEVICE_TYPES, name])
        monkeypatch.setattr(devices, "_modules_known_for", -1)
        return module

    yield put
    monkeypatch.undo()  # first, since it would put back for how many names the modules are known, and the fakes with it
    devices._modules_known_for = -1


@pytest.mark.parametrize("generators", [True, False], ids=["default_generators", "get_rng_state"])
@pytest.mark.parametrize("devices", [1, 3])
def test_every_device_of_every_type_is_captured_whatever_the_arguments(install, devices, generators):
    """Two accelerator types with several devices each, none of them among the arguments."""
    one = install("fake_one", FakeDevice(devices, generators=generators))
    two = install("fake_two", FakeDevice(devices, generators=generators))
    masks = Log()

    def function(x):
        mask = torch.stack([module.draw(i) for module in (one, two) for i in range(devices)]).sum(0)
        masks.append(mask)
        return (x * mask).sin()

    x = leaf(8)
    y = checkpoint(function, x).sum()
    one.draw(devices - 1)
    states = [stream.get_state() for stream in (*one.streams, *two.streams)]
    y.backward()
    assert torch.equal(*masks)
    assert all(torch.equal(s, t.get_state()) for s, t in zip(states, (*one.streams, *two.streams), strict=True))


def test_an_uninitialised_device_is_not_touched(install):
    fake = install("fake_one", FakeDevice(1, generators=False, initialized=False))
    x = leaf(3)
    checkpoint(torch.exp, x).sum().backward()
    assert fake.reads == 0


def test_a_backend_registered_later_is_found(install, monkeypatch):
    """Backends outside of torch rename ``privateuseone``, which may happen after this package was imported."""
    sources.capture()
    fake = FakeDevice(1)
    monkeypatch.setattr(torch, "late_backend", fake, raising=False)
    monkeypatch.setattr(devices, "private_backend_name", lambda: "late_backend")
    assert len(sources.capture()[1]) == 1
