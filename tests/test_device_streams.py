"""Random streams of devices: what it costs to have a recompute draw what forward drew, by calls of generators."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad

from ckpt_hooks import _ambient, checkpoint
from tests.devices import FakeDevices, install  # noqa: F401 -- a fixture
from tests.measure import Log, leaf

COUNTS = [0, 1, 8]


def plain(x):
    return x.sin().exp()


def counts_of(devices, function, regions=1):
    """Returns the calls of the forward of a region, and those of its recompute, once the devices are known."""
    x = leaf(8)
    checkpoint(plain, x).sum().backward()
    devices.counted()
    h = x
    for _ in range(regions):
        h = checkpoint(function, h)
    forward = devices.counted()
    grad(h.sum(), x)
    return forward, devices.counted()


def calls(get, set, look):
    return {"get": get, "set": set, "look": look}


@pytest.mark.parametrize("count", COUNTS)
def test_streams_of_other_kinds_are_read_once_and_not_set(install, count):  # noqa: F811
    """Those whose state is more than a seed and an offset: in forward, before a recompute, and after it."""
    devices = install("fake_one", FakeDevices(count, has_offset=False))
    forward, backward = counts_of(devices, plain)
    assert forward == calls(count, 0, 0)
    assert backward == calls(2 * count, 0, 0)


@pytest.mark.parametrize("count", [1, 8])
def test_only_the_stream_that_is_drawn_from_is_read_and_set(install, count):  # noqa: F811
    """Set back before each recompute, and put where it was after it, unless that is where the recompute has left it."""
    devices = install("fake_one", FakeDevices(count))
    generator = devices.default_generators[-1]
    forward, backward = counts_of(devices, lambda x: x * generator.draw(), regions=3)
    assert (forward["get"], forward["set"]) == (2, 0)  # the first region finds what the one before it found
    assert (backward["get"], backward["set"]) == (1, 5)


@pytest.mark.parametrize("has_offset", [True, False])
@pytest.mark.parametrize("drawn_between", [0, 1])
def test_a_recompute_draws_what_forward_drew_on_each_device(install, has_offset, drawn_between):  # noqa: F811
    def run(call):
        devices = install("fake_one", FakeDevices(3, has_offset=has_offset))
        one, _, three = devices.default_generators
        x = leaf(8)
        h = call(lambda x: (x * one.draw() * three.draw()).sin(), call(plain, x))
        y = call(lambda x: (x * three.draw()).exp() * F_dropout(x), h)
        between = [one.draw() for _ in range(drawn_between)]
        gradient = grad(y.sum(), x)[0]
        return [gradient, *between, *(generator.draw() for generator in devices.default_generators), torch.rand(2)]

    def F_dropout(x):
        return torch.nn.functional.dropout(x)

    torch.manual_seed(1)
    expected = run(lambda function, x: function(x))
    torch.manual_seed(1)
    found = run(checkpoint)
    assert all(map(torch.equal, found, expected))


def test_a_device_that_forward_is_the_first_to_use_draws_from_its_start_again(install, monkeypatch):  # noqa: F811
    x = leaf(8)

    def run(call):
        in_use = Log()
        monkeypatch.setattr(FakeDevices, "is_initialized", lambda devices: len(in_use) > 0)
        (generator,) = install("fake_one", FakeDevices()).default_generators
        y = call(lambda x: in_use.append(True) or (x * generator.draw()).sin(), x)
        return [generator.draw(), grad(y.sum(), x)[0], generator.draw()]

    assert all(map(torch.equal, run(checkpoint), run(lambda function, x: function(x))))


def test_an_interrupt_while_a_device_is_set_leaves_no_device_set(install):  # noqa: F811
    devices = install("fake_one", FakeDevices(2))
    one, two = devices.default_generators
    y = checkpoint(lambda x: x * one.draw() * two.draw(), leaf(8))
    before = [generator.get_state() for generator in (one, two)]
    set_state = two.set_state

    def interrupted(state):
        two.set_state = set_state
        raise KeyboardInterrupt

    two.set_state = interrupted
    # Streams have the method that was there when they were made.
    stream = next(stream for stream, _ in _ambient.random.read_devices() if stream.generator is two)
    write, stream.write = stream.write, interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
    finally:
        stream.write = write
    assert all(map(torch.equal, before, [generator.get_state() for generator in (one, two)]))
