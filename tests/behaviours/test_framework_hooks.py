"""Hooks of frameworks that bring a module's parameters for its forward and take them away after it.

Stand-ins, which do to parameters what DeepSpeed's ZeRO-3 and Accelerate's offloading do, and nothing else.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ckpt_hooks import checkpoint
from tests.behaviours.applied import all_regions
from tests.behaviours.runs import assert_as_eager, plain
from tests.measure import allocated

#: Bytes up to which a region may copy a tensor that forward only reads.
SMALL = 16 * 1024


def fill_by_data(module):
    """Gives each parameter memory before forward and before backward, and none between them, as ZeRO-3 does."""
    full = {name: parameter.detach().clone() for name, parameter in module.named_parameters(recurse=False)}

    def fill(module, *_):
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data = full[name].clone()

    def empty(module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty(0)

    empty(module)
    module.register_forward_pre_hook(fill)
    module.register_forward_hook(empty)
    module.register_full_backward_pre_hook(fill)
    return full


def bind_anew(module):
    """Puts other parameters into the module for each forward, and some without memory after it, as Accelerate does."""
    full = {name: parameter.detach().clone() for name, parameter in module.named_parameters(recurse=False)}

    def bind(module, *_, to=None):
        for name, value in full.items():
            value = value.to("meta") if to else value.clone()
            module._parameters[name] = nn.Parameter(value, requires_grad=False)

    bind(module, to="meta")
    module.register_forward_pre_hook(bind)
    module.register_forward_hook(lambda module, *_: bind(module, to="meta"))
    return full


WAYS = {"by data": fill_by_data, "bound anew": bind_anew}


def blocks(width, count, *last):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), *(kind(width) for kind in last)) for _ in range(count))
    )


def hook(net, way):
    """Hooks the layers that multiply by a weight."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            way(module)


@all_regions
@pytest.mark.filterwarnings("ignore:A recorded region holds memory")
@pytest.mark.parametrize("region_of", ["blocks", "model"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_parameters_that_hooks_bring_for_forward(way, region_of, run):
    """The plain program has them all the time."""

    def program(run):
        net, found = blocks(8, 3, nn.BatchNorm1d), []
        if run is not plain:
            hook(net, way)
        elif way is not fill_by_data:
            for module in net:
                module[0].requires_grad_(False)
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            h = x
            for layer in net if region_of == "blocks" else [net]:
                h = run(layer, h)
            h.sum().backward()
            found += [h, x.grad, *map(torch.clone, net.buffers())]
            if way is fill_by_data:
                found += [parameter.grad.clone() for parameter in net.parameters()]
        return found

    assert_as_eager(program, run)


def forwards(call, way, width, steps):
    """Returns everything that is alive after the last one of some forwards, the others' backward included."""
    torch.manual_seed(0)
    net = blocks(width, 6)
    hook(net, way)
    for step in range(steps):
        h = torch.randn(4, width, requires_grad=True)
        for layer in net:
            h = call(layer, h)
        if step < steps - 1:
            h.sum().backward()
    return net, h


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("width", [32, 64, 256], ids=["4 KiB", "16 KiB", "256 KiB"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.usefixtures("no_gc")
def test_bytes_between_forward_and_backward(way, width, steps):
    """At most those of torch's, from the first step on, and a copy of each parameter that is small.

    Random states, which regions may share, are not counted.
    """
    ours = functools.partial(checkpoint, preserve_rng_state=False)
    theirs = functools.partial(torch.utils.checkpoint.checkpoint, preserve_rng_state=False, use_reentrant=False)
    held = {call: allocated(lambda call=call: forwards(call, way, width, steps))[1] for call in (ours, theirs)}
    copies = sum(p.nbytes for p in blocks(width, 6).parameters() if p.nbytes <= SMALL)
    assert held[ours] <= held[theirs] + copies
