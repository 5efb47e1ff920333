"""Functions that ``torch.compile`` has compiled, called inside of regions: bitwise as without regions."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook

import ckpt_hooks
from ckpt_hooks import checkpoint, checkpoint_chunks, checkpoint_region, memory_ledger, policies, trace
from ckpt_hooks.offload import offload_saved_tensors

pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        yield
    torch._dynamo.reset()


def recorded(function, x, **options):
    with checkpoint_region(**options):
        return function(x)


def within(block, call):
    with block():
        return call()


def in_ledger(function, x):
    found = []
    memory_ledger(lambda: found.append(checkpoint(function, x)))
    return found[0]


FORMS = {
    "frame": checkpoint,
    **{
        name: lambda f, x, name=name, value=value: checkpoint(**{name: value})(f)(x)
        for name, value in {
            "debug": True,
            "determinism_check": "values",
            "early_stop": False,
            "split_backward": True,
            "offload_inputs": True,
            "policy": policies.dots_saveable,
        }.items()
    },
    "region": recorded,
    "region with a policy": lambda f, x: recorded(f, x, policy=policies.dots_saveable),
    "chunks": lambda f, x: checkpoint_chunks(f, x, chunks=1),
    "nested": lambda f, x: checkpoint(lambda x: checkpoint(f, x), x),
    "frame in a region": lambda f, x: recorded(lambda x: checkpoint(f, x), x),
    "traced": lambda f, x: within(trace, lambda: checkpoint(f, x)),
    "in a ledger": in_ledger,
    "offloaded": lambda f, x: within(offload_saved_tensors, lambda: f(x)),
}


# What the compiler gives up, and Python runs


def gradients(run, function, parameters, *shape):
    torch.manual_seed(0)
    x = torch.randn(*shape, requires_grad=True)
    for parameter in parameters:
        parameter.grad = None
    y = run(function, x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in parameters)]


def all_equal(found, expected):
    return all(map(torch.equal, found, expected))


def plainly(function, x):
    return function(x)


def test_a_compiled_submodule_past_the_limit_of_recompiles(impl):
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    parameters = list(block.parameters())
    expected = [gradients(plainly, block, parameters, rows, 8) for rows in range(2, 6)]
    for layer in block:
        layer.compile(backend="eager", dynamic=False)
    found = [gradients(impl, block, parameters, rows, 8) for rows in range(2, 6)]
    assert all(map(all_equal, found, expected))


@pytest.mark.parametrize("form", FORMS)
def test_hooks_of_regions_are_not_compiled(form):
    """Python runs a function that the compiler gave up, and the compiler still listens for calls of other functions."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    package, compiled, parameters = pathlib.Path(ckpt_hooks.__file__).parent, [], list(layer.parameters())

    def function(x):
        try:
            torch._dynamo.graph_break()
            h = torch.nn.functional.rrelu(layer(x.sin()), training=True).exp()
            with torch.enable_grad():  # a backward inside
                (gradient,) = torch.autograd.grad(h.cos().sum(), h, retain_graph=True)
            return h * gradient.detach()
        except ValueError:
            return x

    expected = gradients(plainly, function, parameters, 4, 8)
    hook = register_bytecode_hook(lambda code, _: compiled.append(pathlib.Path(code.co_filename)))
    try:
        found = gradients(FORMS[form], torch.compile(function, backend="eager"), parameters, 4, 8)
    finally:
        hook.remove()
    assert all_equal(found, expected)
    assert [path for path in compiled if package in path.parents] == []
