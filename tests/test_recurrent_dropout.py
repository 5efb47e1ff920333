"""Dropout of recurrent layers on devices, whose masks go on from layer to layer until torch's generator is set."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ckpt_hooks import CheckpointPolicy, checkpoint, checkpoint_region, policies
from tests.devices import FakeDevices, OnDevice, install  # noqa: F401 -- a fixture
from tests.measure import Log, as_library, leaf

#: Masks and devices, where no region looks: what these hold is torch's own, and not part of a module.
_held: dict[str, Any] = {}
_seen = Log()


@as_library
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


def test_a_layer_that_drops_out_sets_the_state_of_its_device_once_a_forward(install):  # noqa: F811
    devices, (_, inside, _) = make(install, inside=Recurrent)
    for _ in range(6):
        devices.counted()
        checkpoint(inside, leaf(8))
        assert devices.counted()["set"] == 1


# The operators that do the dropping


@as_library
class FakeRnn:
    """Kernels for ``aten::_cudnn_rnn`` and its backward on the CPU, which advance the buffer that they are given."""

    def __init__(self) -> None:
        self.runs = 0

    def forward(
        self, input, weight, stride, weight_buf, hx, cx, mode, hidden, proj, layers, first, p, train, both, sizes, state
    ):
        self.runs += 1
        mask = torch.ones_like(input)
        if train and p:
            buffer = int(state[0])
            own = torch.Generator().manual_seed(buffer)
            mask = (torch.rand(input.shape, generator=own) > p).to(input.dtype)
            with torch._C._AutoDispatchBelowAutograd():
                # By no operator, and counted by no version.
                ctypes.c_uint8.from_address(state.data_ptr()).value = (buffer + 1) % 256
        return input.sin() * mask, hx * 1.0, torch.empty(0), mask, torch.empty(0)

    def backward(
        self, input, weight, stride, weight_buf, hx, cx, output, grad_output, grad_hy, grad_cy, mode, hidden, proj, layers,
        first, p, train, both, sizes, state, reserve, output_mask,
    ):  # fmt: skip
        none = torch.empty(0)
        return grad_output * input.cos() * reserve, torch.zeros_like(hx), none, [torch.zeros_like(one) for one in weight]


@pytest.fixture
def rnn(monkeypatch):
    with torch.library._scoped_library("aten", "IMPL") as library:
        fake = FakeRnn()
        library.impl("_cudnn_rnn", fake.forward, "CPU")
        library.impl("_cudnn_rnn_backward", fake.backward, "CPU")
        yield fake


def run_rnn(x, buffer, *, p=0.5, train=True):
    weight, hx = [torch.ones(2, dtype=x.dtype)], torch.zeros(1, dtype=x.dtype)
    return torch.ops.aten._cudnn_rnn(x, weight, 1, None, hx, None, 0, 2, 0, 1, False, p, train, False, [], buffer)[0]


def two_layers(x, buffer, **options):
    return run_rnn(run_rnn(x.exp(), buffer, **options).exp(), buffer, **options).exp().sin()


POLICIES = {
    "nothing": policies.nothing_saveable,
    "products": policies.dots_saveable,
    "must recompute": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE,
    "every second": lambda ctx, op, *args, **kwargs: op is torch.ops.aten.exp.default,
}


def call_recorded(policy):
    return lambda function, *args, **options: checkpoint_region(policy=policy)(function)(*args, **options)


CALLS = {
    "recorded": call_recorded(None),
    **{f"recorded, {name}": call_recorded(policy) for name, policy in POLICIES.items()},
    **{
        f"selective, {name}": lambda function, *args, policy=policy, **options: checkpoint(policy=policy)(function)(
            *args, **options
        )
        for name, policy in POLICIES.items()
    },
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_operator_that_advances_its_buffer_does_not_run_again(rnn, call):
    x = leaf(8)

    def step(call):
        buffer = torch.full((4,), 7, dtype=torch.uint8)
        return grad(call(two_layers, x, buffer).sum(), x)[0], buffer

    expected, after = step(lambda function, *args: function(*args))
    assert rnn.runs == 2
    found, buffer = step(call)
    assert rnn.runs == 4
    assert torch.equal(found, expected)
    assert torch.equal(buffer, after)
