"""The current device and streams of recomputes: those of forward, with waits on both sides."""

from __future__ import annotations

import pytest
import torch
import torch.utils.flop_counter
from torch.testing._internal.two_tensor import TwoTensor

from ckpt_hooks import checkpoint, checkpoint_region
from ckpt_hooks._ambient import devices as devices_in_use
from tests.fake_streams import FakeAccelerator, Order
from tests.measure import Log, leaf

DEVICE = []


@torch.library.custom_op("ckpt_hooks_tests::scaled_by_device", mutates_args=())
def scaled_by_device(x: torch.Tensor) -> torch.Tensor:
    """Does what an operator does that is given a device without an index: something else on each."""
    return x * (2.0 + DEVICE[-1].current_device())


scaled_by_device.register_autograd(lambda ctx, grad: grad * 2)


@pytest.fixture
def install(monkeypatch):
    """Puts a device in the place of the CPU."""
    used = Log()

    def put(*args, **kwargs):
        device = FakeAccelerator(*args, **kwargs)
        monkeypatch.setattr(torch, "cpu", device)
        monkeypatch.setattr(devices_in_use, "_DEVICE_TYPES", [*devices_in_use._DEVICE_TYPES, "cpu"])
        monkeypatch.setattr(devices_in_use, "_modules_known_for", -1)
        monkeypatch.setattr(devices_in_use, "names_without_devices", -1)
        monkeypatch.setattr(devices_in_use, "mark_used", lambda tensor, stream: used.append((tensor, stream)))
        torch.get_device_module.cache_clear()
        DEVICE[:] = [device]
        device.used = used
        return device

    yield put
    monkeypatch.undo()
    devices_in_use._modules_known_for = -1
    torch.get_device_module.cache_clear()


# The current device


def test_a_rerun_has_the_current_device_of_forward(install):
    device = install(3)
    seen = Log()

    def function(x):
        seen.append(device.current_device())
        device.set_device(2)
        return x.sin().exp()

    x = leaf(3)
    device.set_device(1)
    y = checkpoint(function, x).sum()
    assert device.current_device() == 2  # as without the library
    device.set_device(0)
    y.backward()
    assert seen == [1, 1]
    assert device.current_device() == 0


def test_replayed_operators_have_that_of_forward(install):
    """Each its own."""
    device = install(3)

    def function(x):
        device.set_device(1)
        y = scaled_by_device(x).sin()
        device.set_device(2)
        return scaled_by_device(y).exp()

    x = leaf(3)
    with checkpoint_region():
        y = function(x)
    device.set_device(0)
    found = torch.autograd.grad(y.sum(), x)[0]
    assert device.current_device() == 0
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    assert torch.equal(found, expected)


# Streams


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", ["strided", "coo", "csr", "csc", "subclass"])
def test_memory_is_marked_of_what_a_tensor_is_made_of(monkeypatch, layout):
    dense = torch.eye(3)
    tensor, count = {
        "strided": (dense, 1),
        "coo": (dense.to_sparse(), 2),
        "csr": (dense.to_sparse_csr(), 3),
        "csc": (dense.to_sparse_csc(), 3),
        "subclass": (TwoTensor(dense, dense + 1), 2),
    }[layout]
    marked = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: marked.append(args))
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        devices_in_use.mark_used(tensor, "stream")
    assert len(marked) == count
    assert all(type(part) is torch.Tensor and part.layout is torch.strided for part, _ in marked)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_stream_that_a_stopped_rerun_has_not_left(install, is_elsewhere):
    """The function would have gone back to its own one, and have that wait."""
    device = install()
    main, side, third = device.defaults[0], device.stream("side"), device.stream("third")

    def function(x):
        own = device.current_stream(0)
        h = x.sin()
        third.wait_stream(own)
        device.set_stream(third)
        y = h.exp().cos().neg().neg().neg()
        device.set_stream(own)
        own.wait_stream(third)
        return y

    x = leaf(3)
    with Order(device) as order:
        side.wait_stream(main)
        with device.on(side if is_elsewhere else main):
            y = checkpoint(function, x)
        main.wait_stream(side)
        order.ran.clear()
        device.notes.clear()
        y.sum().backward()
    assert ("exp", "third") in order.ran
    assert order.early == []
    if is_elsewhere:
        assert device.notes[:4] == [
            "side waits for default 0",
            "third waits for side",
            "default 0 waits for third",
            "default 0 waits for side",
        ]
    assert device.current_stream() is main


def in_function(function, *args):
    return checkpoint(function, *args)


def in_region(function, *args):
    with checkpoint_region():
        return function(*args)


@pytest.mark.parametrize("call", [in_function, in_region])
def test_branches_on_two_streams(install, call):
    """Each node unpacks on the stream that its operator ran on, as autograd has it."""
    device = install()
    main, side = device.defaults[0], device.stream("side")

    def function(x):
        h = x.sin()
        side.wait_stream(main)
        with device.on(side):
            other = h.exp()
            other = other.exp()
        own = h.cos().cos()
        main.wait_stream(side)
        return own, other

    def on(stream):
        def enter(_):
            stream.wait_stream(main if stream is side else side)
            device.set_stream(stream)

        return enter

    x = leaf(3)
    with Order(device) as order:
        own, other = call(function, x)
        for stream, node in ((main, own.grad_fn), (side, other.grad_fn)):
            node.register_prehook(on(stream))
            node.next_functions[0][0].register_prehook(on(stream))
        own.grad_fn.next_functions[0][0].next_functions[0][0].register_prehook(on(main))
        y = (own * other).sum()
        order.ran.clear()
        y.backward()
        device.set_stream(main)
    assert order.early == []
    assert ("exp", "side") in order.ran
    assert ("cos", "default 0") in order.ran
    assert device.used
    expected = x.detach().requires_grad_()
    h = expected.sin()
    (h.cos().cos() * h.exp().exp()).sum().backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.parametrize("call", [in_function, in_region])
def test_a_value_for_another_stream_is_waited_for_there(install, call):
    """As of nodes on the CPU, which autograd runs on whatever stream is current."""
    device = install()
    main, side, third = device.defaults[0], device.stream("side"), device.stream("third")
    x = leaf(3)
    with device.on(side):
        y = call(lambda x: x.sin().exp().cos().exp(), x)
    node = y.grad_fn.next_functions[0][0]
    node.register_prehook(lambda _: device.set_stream(third))
    device.notes.clear()
    y.sum().backward()
    assert device.notes == [
        "side waits for default 0",
        "default 0 waits for side",
        "default 0 waits for side",  # to use what is handed out
        "third waits for side",
        "third waits for side",
    ]
    assert [str(stream) for _, stream in device.used] == ["default 0", "third", "third"]
    device.set_stream(main)
