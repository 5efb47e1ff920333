"""Regions on threads: those of autograd's engine, and several of the user's."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.autograd import grad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ckpt_hooks import checkpoint
from tests.cuda.device import DEVICE, WAYS, differing, each, needs_cuda, outcome, region, step, tensor

pytestmark = needs_cuda


def modes_in_a_region():
    """Returns the dispatch modes that a function frame runs under, among them one that notes draws where threads meet."""
    found = []
    checkpoint(lambda x: found.extend(_get_current_dispatch_mode_stack()) or x.sin(), tensor(4))
    return found


class InBackward(torch.autograd.Function):
    """Runs a region, and the backward of that, in its own backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return gradient * grad(checkpoint(torch.sin, x).sum(), x)[0]


@pytest.mark.parametrize("kind", ["reentrant", "function", "hook"])
def test_threads_of_the_engine_do_not_count(kind):
    """They never end, and work for a thread that waits: what ran a region there leaves no other thread beside this one."""
    x = tensor(8)
    assert modes_in_a_region() == []
    if kind == "reentrant":
        reentrant = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
        reentrant(lambda x: checkpoint(torch.sin, x), x).sum().backward()
        expected = x.detach().cos()
    elif kind == "function":
        InBackward.apply(x).sum().backward()
        expected = x.detach().cos()
    else:
        x.register_hook(lambda gradient: gradient + checkpoint(torch.sin, tensor(8)).detach() * 0)
        x.sin().sum().backward()
        expected = x.detach().cos()
    assert torch.equal(x.grad, expected)
    assert modes_in_a_region() == []


def in_threads(work, count=2):
    """Runs a function on several threads that begin together; returns their results."""
    barrier = Barrier(count)

    def begin(number):
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.mark.parametrize("own_stream", [False, True], ids=["one stream", "a stream each"])
@pytest.mark.parametrize("run", [checkpoint, region], ids=["function", "region"])
@pytest.mark.usefixtures("no_gc")
def test_threads_that_draw(run, own_stream):
    """Two threads train: a gradient has the mask of its forward, whatever the other thread draws meanwhile."""
    torch.cuda.synchronize()

    def work(number):
        stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
        found = []
        with torch.cuda.stream(stream):
            for _ in range(20):
                x = torch.rand(1000, device=DEVICE).add_(0.1).requires_grad_()
                y = run(lambda x: F.dropout(F.dropout(x * 2, 0.5).sin(), 0.5), x)
                (gradient,) = grad(y.sum(), x)
                found.append((gradient != 0, y != 0))
            stream.synchronize()
        return found

    for found in in_threads(work):
        assert len(found) == 20
        assert all(torch.equal(a, b) for a, b in found)


@each(WAYS)
@pytest.mark.usefixtures("no_gc")
def test_threads_with_models(run):
    """Each thread has a model of its own: gradients are those that it has alone."""
    modules = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE) for _ in range(2)]
    inputs = [tensor(32, 64) for _ in modules]
    alone = [step(lambda function, x: function(x), module, x) for module, x in zip(modules, inputs, strict=True)]
    torch.cuda.synchronize()

    def work(number):
        found = [step(run, modules[number], inputs[number]) for _ in range(10)]
        torch.cuda.synchronize()
        return found

    for found, expected in zip(in_threads(work), alone, strict=True):
        assert [differing(one, expected) for one in found] == [[]] * 10


@each(WAYS)
def test_backward_on_another_thread(run):
    """The graph of one thread, and the backward of another: as on one."""

    def program(run):
        x = tensor(100)
        y = run(lambda x: F.dropout(x.sin(), 0.5).exp(), x)
        with ThreadPoolExecutor(1) as pool:
            return [y, *pool.submit(grad, y.sum(), x).result()]

    def plainly(function, *args):
        return function(*args)

    assert differing(outcome(program, run), outcome(program, plainly)) == []
