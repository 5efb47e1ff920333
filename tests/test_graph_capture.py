"""Regions while a CUDA graph is being captured, when no state of a generator can be read; by fake devices."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_region, policies
from tests.devices import FakeDevices, PhiloxGenerator, install  # noqa: F401 -- a fixture
from tests.measure import leaf


class Capturing(FakeDevices):
    """Devices whose states cannot be read while a graph is being captured, as those of CUDA cannot."""

    def __init__(self):
        super().__init__()
        for generator in self.default_generators:
            for name in ("get_state", "set_state", "get_offset"):
                setattr(generator, name, self.refusing(getattr(generator, name)))

    def refusing(self, call):
        def refuse(*args):
            assert not self.capturing, "Cannot call CUDAGeneratorImpl::current_seed"
            return call(*args)

        return refuse


@pytest.fixture
def devices(install):  # noqa: F811
    devices = install("hpu", Capturing())
    with torch.library._scoped_library("aten", "IMPL") as library:
        # As on a device: the kernel draws from the default generator there.
        library.impl("rand", lambda size, **_: devices.default_generators[0].draw(size[0]), "HPU")
        yield devices


def draws(x):
    return (x * torch.ops.aten.rand.default([8], device=torch.device("hpu", 0))).sin().exp()


def test_a_random_operator_in_a_recorded_region_says_what_to_do(devices):
    devices.capturing = True
    with checkpoint_region(), pytest.raises(RuntimeError, match=r"aten.rand.default .* preserve_rng_state=True.* CUDA graph"):
        draws(leaf(8))


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_a_recorded_region_that_draws_anew_reads_no_state_in_forward(devices, policy):
    x = leaf(8)
    devices.capturing = True
    devices.counted()
    with checkpoint_region(preserve_rng_state=False, policy=policy):
        y = draws(x)
    assert devices.counted() == {"get": 0, "set": 0, "look": 0}
    grad(y.sum(), x)
    assert devices.counted() == {"get": 0, "set": 0, "look": 0}


def test_a_function_region_says_what_to_do(devices):
    devices.capturing = True
    with pytest.raises(RuntimeError, match=r"preserve_rng_state=True.* CUDA graph"):
        checkpoint(torch.sin, leaf(8))


def test_a_backward_that_is_captured_alone_says_what_to_do(devices):
    y = checkpoint(lambda x: x.sin().exp(), leaf(8))
    devices.capturing = True
    with pytest.raises(RuntimeError, match=r"preserve_rng_state=True.* CUDA graph"):
        y.sum().backward()


@pytest.mark.parametrize("options", [{}, {"policy": policies.everything_saveable}], ids=["plain", "with a policy"])
def test_a_function_region_that_draws_anew_reads_no_state(devices, options):
    x = leaf(8)
    devices.capturing = True
    devices.counted()
    y = checkpoint(preserve_rng_state=False, **options)(draws)(x)
    grad(y.sum(), x)
    assert devices.counted() == {"get": 0, "set": 0, "look": 0}


# What ``preserve_rng_state=False`` means to a recorded region, with no device in it


def test_a_replay_that_draws_anew_draws_what_comes_next():
    """One number after the other, as if the operators had run after forward."""
    x = leaf(8)
    torch.manual_seed(1)
    with checkpoint_region(preserve_rng_state=False):
        y = (x * torch.rand(8, dtype=x.dtype)).sin() * torch.rand(8, dtype=x.dtype)
    state = torch.get_rng_state()
    one, two = torch.rand(8, dtype=x.dtype), torch.rand(8, dtype=x.dtype)
    torch.set_rng_state(state)
    (found,) = grad(y.sum(), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found, two * (x * one).cos() * one)


def test_the_innermost_region_says_whether_its_lines_draw_anew():
    x = leaf(8)

    def run(inner, outer):
        torch.manual_seed(1)
        with outer:
            h = (x * torch.rand(8, dtype=x.dtype)).sin()
            with inner:
                h = (h * torch.rand(8, dtype=x.dtype)).sin()
            return grad((h * torch.rand(8, dtype=x.dtype)).sum(), x)[0]

    anew, again = checkpoint_region(preserve_rng_state=False), checkpoint_region()
    eager = run(checkpoint_region(policy=policies.everything_saveable), checkpoint_region(policy=policies.everything_saveable))
    assert torch.equal(run(again, again), eager)
    assert not torch.equal(run(anew, again), eager)
    assert not torch.equal(run(again, anew), eager)
