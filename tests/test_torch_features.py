"""What newer versions of torch have and older ones lack: used where it is there, and the same without it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.autograd import grad

import ckpt_hooks._torch.autograd
from ckpt_hooks import checkpoint, checkpoint_region
from ckpt_hooks._torch.tensors import num_holders
from tests.measure import Calls, leaf

# Callbacks at the end of a backward

WAYS = {
    "the engine's": torch.autograd.Variable._execution_engine.queue_callback,
    "the public one": getattr(torch.autograd.graph, "queue_callback", None),
}


def test_the_public_way_is_preferred():
    assert ckpt_hooks._torch.autograd.queue_callback == (WAYS["the public one"] or WAYS["the engine's"])


# Buffers of gradients

has_buffers = pytest.mark.skipif(not hasattr(torch.autograd.function.FunctionCtx, "input_grad_buffers"), reason="not there yet")


class AddsToBuffer(torch.autograd.Function):
    """The product of a sine and a factor, which adds its gradient to the buffer that there is for it, as it may."""

    reads_first = False
    filled: list[bool] = []  # noqa: RUF012 -- emptied by each test

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.sin() * w

    @staticmethod
    def backward(ctx, gradient):
        buffers = ctx.input_grad_buffers if AddsToBuffer.reads_first else None
        x, w = ctx.saved_tensors
        buffer, _ = ctx.input_grad_buffers if buffers is None else buffers
        AddsToBuffer.filled.append(buffer is not None)
        if buffer is None:
            return gradient * x.cos() * w, None
        buffer.add_(gradient * x.cos() * w)
        return None, None


def runs_backward(h):
    """Runs backward in forward, and so in each recompute."""
    with torch.enable_grad():
        z = h.detach().requires_grad_()
        (w,) = grad((z * z).sum(), z)
    return AddsToBuffer.apply(h, w)


def runs_none(h):
    return AddsToBuffer.apply(h, h.detach() * 2)


def region(function, *args):
    with checkpoint_region():
        return function(*args)


def buffered(run, function):
    """Returns the gradient of a program in which another operator has put one into the buffer before."""
    torch.manual_seed(0)
    AddsToBuffer.filled.clear()
    x = leaf(3)
    h = x * 1
    y = run(function, h)
    (y + h.cos()).sum().backward()
    assert AddsToBuffer.filled == [True]
    return x.grad


RUNS = {
    "region": region,
    "checkpoint": checkpoint,
    "nested": lambda function, h: checkpoint(lambda h: checkpoint(function, h), h),
    "region in checkpoint": lambda function, h: checkpoint(lambda h: region(function, h), h),
}


@has_buffers
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("function", [runs_backward, runs_none])
@pytest.mark.parametrize("reads_first", [True, False])
def test_buffers_of_gradients(monkeypatch, run, function, reads_first):
    """A backward that reads its buffers first allows none in a recompute: torch says so. A replay has none."""
    monkeypatch.setattr(AddsToBuffer, "reads_first", reads_first)
    expected = buffered(lambda function, h: function(h), function)
    called = Calls(function)
    called.__qualname__ = "block"
    if reads_first and function is runs_backward and run != "region":
        with pytest.raises(RuntimeError, match="input_grad_buffers") as caught:
            buffered(RUNS[run], called)
        if sys.version_info >= (3, 11):
            assert "If the function runs backward, write `with checkpoint_region():`" in caught.value.__notes__[0]
        return
    assert torch.equal(buffered(RUNS[run], called), expected)
    assert called.count == (1 if run == "region" else 3 if (run, function) == ("nested", runs_none) else 2)


def test_holders_of_memory_are_counted():
    x = torch.ones(3)
    assert num_holders(x) == 1
    view = x[1:]
    assert num_holders(x) == num_holders(view) == 2
    storage = x.untyped_storage()
    assert num_holders(x) == 2
    del view, storage
    assert num_holders(x) == 1
