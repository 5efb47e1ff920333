"""Functions that ``torch.compile`` has compiled, called inside of regions: bitwise as without regions."""

from __future__ import annotations

import itertools
import pathlib

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook

import ckpt_hooks
from ckpt_hooks import (
    checkpoint,
    checkpoint_chunks,
    checkpoint_loop,
    checkpoint_region,
    checkpoint_sequential,
    memory_ledger,
    policies,
    trace,
)
from ckpt_hooks.offload import offload_saved_tensors
from tests.measure import in_turns

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


def gradients(run, function, parameters, *shape, backwards=2):
    torch.manual_seed(0)
    x = torch.randn(*shape, requires_grad=True)
    for parameter in parameters:
        parameter.grad = None
    y = run(function, x)
    for left in reversed(range(backwards)):
        y.square().sum().backward(retain_graph=left > 0)
    return [y.detach(), *(torch.zeros(()) if one.grad is None else one.grad for one in (x, *parameters))]


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


# Views, of which compiled code saves something else than of other tensors


class Box:
    """An object with a tensor."""

    def __init__(self, x):
        self.x = x


def forgotten(function, x):
    """A closure over a variable that is another by then."""

    def call():
        return function(x)

    y = checkpoint(call)
    x = None
    return y


VIEWS = {
    "a part of a leaf": lambda x: x[:, :2],
    "a transposed result": lambda x: x.sin().transpose(0, 1),
    "one of several": lambda x: x.sin().chunk(2, 1)[1],
    "other sizes": lambda x: x.sin().view(2, 8, 8),
    "a part without grad": lambda x: x.detach()[:, :2],
}
OF_VIEWS = {
    **{
        name: FORMS[name]
        for name in ("frame", "debug", "offload_inputs", "split_backward", "policy", "region", "frame in a region")
    },
    "keyword": lambda f, x: checkpoint(lambda *, x: f(x), x=x),
    "list": lambda f, x: checkpoint(lambda box: f(box["x"][0]), {"x": [x]}),
    "attribute": lambda f, x: checkpoint(lambda box: f(box.x), Box(x)),
    "closure": forgotten,
    "nested": lambda f, x: checkpoint(lambda x: checkpoint(lambda x: checkpoint(f, x) * 1, x), x),
    "part in a frame": lambda f, x: checkpoint(lambda x: checkpoint(f, x.cos()[:1]), x),
    "part in a region": lambda f, x: recorded(lambda x: checkpoint(f, x.cos()[:1]), x),
    "under hooks": lambda f, x: within(torch.autograd.graph.save_on_cpu, lambda: checkpoint(f, x)),
    "chunks": lambda f, x: checkpoint_chunks(f, x, chunks=2),
    "sequential": lambda f, x: checkpoint_sequential([f, torch.sin], 2, x),
    "loop": lambda f, x: checkpoint_loop(lambda x: f(x).transpose(0, 1), x, 3, 2),
}
PLAINLY = {
    "part in a frame": lambda f, x: f(x.cos()[:1]),
    "part in a region": lambda f, x: f(x.cos()[:1]),
    "nested": lambda f, x: f(x) * 1,
    "chunks": lambda f, x: torch.cat([f(part) for part in x.chunk(2)]),
    "sequential": lambda f, x: f(x).sin(),
    "loop": lambda f, x: f(f(f(x).transpose(0, 1)).transpose(0, 1)).transpose(0, 1),
}


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("view", "form", "dynamic", "backwards"),
    [
        *in_turns(VIEWS, ["frame", "part in a frame"], [True, False, None], [1, 2]),
        *zip(itertools.cycle(VIEWS), OF_VIEWS, itertools.cycle([True, None]), itertools.cycle([2, 1, 1]), strict=False),
    ],
)
def test_a_compiled_function_of_a_view(view, form, dynamic, backwards):
    """It is neither compiled anew for a recompute, nor takes another graph."""
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
    parameters = list(block.parameters())
    found = []
    for run in (PLAINLY.get(form, plainly), OF_VIEWS[form]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # A compiled backward that overwrites what was saved for it runs once.
        with torch._dynamo.config.patch(recompile_limit=8), torch._functorch.config.patch(donated_buffer=backwards == 1):
            compiled = torch.compile(block, backend="aot_eager", dynamic=dynamic)
            function = lambda f, x, run=run: run(f, VIEWS[view](x))  # noqa: E731
            found.append((gradients(function, compiled, parameters, 4, 4, 8, backwards=backwards), num_graphs()))
    (expected, graphs), (gradients_found, graphs_found) = found
    assert all_equal(gradients_found, expected)
    assert graphs_found == graphs
