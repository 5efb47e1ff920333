"""Two devices in one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import grad

from ckpt_hooks import checkpoint
from ckpt_hooks.offload import offload_saved_tensors
from tests.cuda.device import WAYS, assert_as_eager, each, needs_two_devices

pytestmark = needs_two_devices


def on_both(*shape):
    """Returns a leaf on each of the two devices."""
    return [torch.randn(*shape, device=f"cuda:{index}", requires_grad=True) for index in (0, 1)]


@pytest.mark.parametrize("current", [0, 1])
def test_the_current_device_is_that_of_forward(current):
    """Whichever device's thread asks first."""
    seen = []

    def function(x, y):
        seen.append(torch.cuda.current_device())
        noise = torch.rand(4, device="cuda")
        return (x.sin() * noise.to(x.device)).exp(), (y.sin() * noise.to(y.device)).exp()

    def program(run):
        x, y = on_both(4)
        with torch.cuda.device(current):
            a, b = run(function, x, y)
        return [a, b, *grad([b.sum(), a.sum().to("cuda:1")], [x, y])]

    for run in (checkpoint, functools.partial(checkpoint, early_stop=False)):
        seen.clear()
        assert_as_eager(program, run)
        assert set(seen) == {current}


@pytest.mark.parametrize("current", [0, 1])
@each(WAYS)
def test_a_region_on_two_devices(run, current):
    """Dropout on both, and tensors from one to the other."""

    def function(x, y):
        h = F.dropout(x.sin(), 0.5)
        other = F.dropout(y.sin() + h.to(y.device), 0.5)
        return (h * other.to(h.device)).exp(), other.cos()

    def program(run):
        x, y = on_both(1000)
        with torch.cuda.device(current):
            a, b = run(function, x, y)
        return [a, b, *grad([a.sum(), b.sum().to("cuda:0")], [x, y]), torch.cuda.get_rng_state(1)]

    assert_as_eager(program, run)


@each(WAYS)
def test_a_model_on_two_devices(run):
    """A region a device."""

    def program(run):
        modules = [torch.nn.Linear(64, 64).to(f"cuda:{index}") for index in (0, 1)]
        x = y = on_both(8, 64)[0]
        for module in modules:
            device = module.weight.device
            y = run(lambda y, module=module, device=device: F.dropout(module(y.to(device)).tanh(), 0.1), y)
        return [y, *grad(y.sum(), [x, *(parameter for module in modules for parameter in module.parameters())])]

    assert_as_eager(program, run)


def test_offload_from_two_devices():
    """Both fetch in threads of their own."""

    def program(run):
        x, y = on_both(512, 512)
        with offload_saved_tensors() if run is checkpoint else torch.enable_grad():
            a, b = (x * 2).sin().exp(), (y * 2).sin().exp()
            c = (a.to(b.device) * b).cos()
        return [c, *grad(c.sum() + a.sum().to(c.device), [x, y])]

    assert_as_eager(program, checkpoint)
