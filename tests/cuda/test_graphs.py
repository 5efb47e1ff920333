"""Regions in CUDA graphs: captured and replayed, or an error that says what to do.

Each test has a process of its own, whose device may be left in any state by a capture that failed.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_region, policies
from tests.cuda.device import DEVICE, differing, eager, in_a_process, needs_cuda, region, tensor

pytestmark = needs_cuda

without_state = functools.partial(checkpoint, preserve_rng_state=False)
products = [torch.ops.aten.addmm.default]


def saving(function, *args):
    """Runs a function as a region that keeps products."""
    return checkpoint(policy=policies.save_ops(*products), preserve_rng_state=False)(function)(*args)


CAPTURED = {
    "function": without_state,
    "function to its end": functools.partial(without_state, early_stop=False),
    "function in function": lambda function, *args: without_state(functools.partial(without_state, function), *args),
    "function, products saved": saving,
    "region": region,
    "region without random state": functools.partial(region, preserve_rng_state=False),
    "region, products saved": functools.partial(region, policy=products),
    "region in function": functools.partial(without_state, region),
    "function in region": functools.partial(region, without_state),
}


def warm_up(step):
    """Runs a step some times on a stream besides the default one, as a capture wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def captured(run, module, x, inputs):
    """Captures a step, and replays it for each of some inputs; returns what each comes to."""

    def step():
        y = run(module, x)
        return [y, *grad(y.square().sum(), [x, *module.parameters()])]

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    found = []
    for value in inputs:
        with torch.no_grad():
            x.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        found += [result.detach().clone() for result in results]
    return found


def capture_all():
    """Captures regions of each kind that reads no state of generators."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE)
    inputs = [torch.randn(8, 64, device=DEVICE) for _ in range(3)]

    def all_of(run):
        return captured(run, module, torch.zeros(8, 64, device=DEVICE, requires_grad=True), inputs)

    expected = all_of(eager)
    found = {name: differing(all_of(run), expected) for name, run in CAPTURED.items()}
    assert {name: places for name, places in found.items() if places} == {}


def refuse(run):
    """Captures a step that draws, in a region; an error names CUDA graphs, and a step after that is right."""
    torch.manual_seed(0)
    x = tensor(8, 64)

    def function(x):
        return nn.functional.dropout(x.sin(), 0.5).exp()

    def step():
        return grad(run(function, x).sum(), x)

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device=DEVICE)  # torch warns of graphs that are empty
        with pytest.raises(RuntimeError, match="CUDA graph"):
            step()
    torch.cuda.synchronize()
    del graph
    torch.manual_seed(1)
    found = step()
    torch.manual_seed(1)
    assert differing(found, grad(function(x).sum(), x)) == []


def refuse_function():
    """A function frame that preserves random state reads it."""
    refuse(checkpoint)


def refuse_region():
    """A recorded region notes the state for each operator that draws."""
    refuse(region)


def refuse_nothing_without_draws():
    """The same function without dropout is captured in a recorded region, whatever its objects are used for later."""
    block, x = checkpoint_region(), tensor(8, 64)

    def step():
        with block:
            y = x.sin().exp()
        return grad(y.sum(), x)

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    assert differing(found, grad(x.sin().exp().sum(), x)) == []


@pytest.mark.parametrize("what", ["capture_all", "refuse_function", "refuse_region", "refuse_nothing_without_draws"])
def test_graphs(what):
    """See the functions of these names."""
    in_a_process(__name__, what)
