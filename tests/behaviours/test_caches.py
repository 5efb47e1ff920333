"""Objects that a function keeps things in, such as caches of keys: a recompute finds them as forward did."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn

import ckpt_hooks
from ckpt_hooks import checkpoint, checkpoint_region, checkpoint_sequential
from ckpt_hooks.policies import dots_saveable
from tests.behaviours.runs import FORMS, Run, assert_as_eager, gradients, plain, runs
from tests.measure import Log, leaf

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*names operators that did not run")


class Layer:
    """Keeps the keys of one layer in one tensor."""

    def __init__(self):
        self.keys = None

    def update(self, key):
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        return self.keys


class LayeredCache:
    """Keeps a layer's keys with the layer, as Transformers' ``DynamicCache`` does."""

    def __init__(self):
        self.layers = [Layer(), Layer()]


def sequentially(function, *args, **kwargs):
    steps = [lambda packed: function(*packed[0], **packed[1]), lambda value: value]
    return checkpoint_sequential(steps, 2, (args, kwargs))


def recorded(function, *args, **kwargs):
    with checkpoint_region():
        return function(*args, **kwargs)


CALLS = {
    "region": checkpoint,
    "nested": lambda function, *args, **kwargs: checkpoint(
        lambda *args, **kwargs: checkpoint(function, *args, **kwargs), *args, **kwargs
    ),
    "sequential": sequentially,
    "dots": lambda function, *args, **kwargs: checkpoint(policy=dots_saveable)(function)(*args, **kwargs),
    "list": lambda function, *args, **kwargs: checkpoint(policy=[aten.cat.default, aten.mm.default])(function)(*args, **kwargs),
    "recorded": recorded,
    "debug": functools.partial(checkpoint, debug=True),
    "values": functools.partial(checkpoint, determinism_check="values"),
    "to the end": functools.partial(checkpoint, early_stop=False),
}


def call(function, *args, **kwargs):
    return function(*args, **kwargs)


# Bodies: the second call of each sees more than the first. What is inside is called as a region or not.


def both(y, *inputs):
    """Returns the gradients of a backward after which another one is to come."""
    return list(torch.autograd.grad(y.sum(), inputs, retain_graph=True))


def layered(x, cache):
    keys = cache.layers[1].update(x[None].exp())
    return (keys.sin() @ x).cos().sum() + x.sum()


class Holding(nn.Module):
    """Has a cache in an attribute."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.past = LayeredCache()

    def forward(self, x):
        return layered(x, self.inner.past)


class Owner:
    """No module, with a method to be called."""

    def __init__(self):
        self.past = LayeredCache()

    def step(self, x):
        return layered(x, self.past)


def closing_over():
    past = LayeredCache()
    return lambda x: layered(x, past)


#: How a function comes by its cache.
WAYS = {
    "argument": lambda run, x: run(layered, x, LayeredCache()),
    "keyword": lambda run, x: run(layered, x, cache=LayeredCache()),
    "in a list": lambda run, x: run(lambda x, c: layered(x, c[0]), x, [LayeredCache()]),
    "partial": lambda run, x: run(functools.partial(layered, cache=LayeredCache()), x),
    "module": lambda run, x: run(Holding(), x),
    "method": lambda run, x: run(Holding().forward, x),
    "owner": lambda run, x: run(Owner().step, x),
    "closure": lambda run, x: run(closing_over(), x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outer", ["region", "sequential", "dots", "recorded", "debug", "values"])
def test_a_tensor_in_an_object_that_is_bound_anew(outer, way):
    def program(run):
        x = leaf(3)
        y = WAYS[way](CALLS[outer] if run is not plain else call, x)
        return both(y, x) + gradients(y, x)

    assert_as_eager(program, Run("ours"))


# What is right stays right


class Stats:
    """Counts, logs, and sums up."""

    def __init__(self):
        self.calls, self.losses, self.by_name, self.total, self.last = 0, [], {}, None, None

    def see(self, h):
        self.calls += 1
        self.losses.append(h.square().mean())
        self.by_name[f"call {self.calls}"] = h.detach().sum()
        self.total = h.detach().sum() + (0 if self.total is None else self.total)
        self.last = h


class Tables:
    """Makes its tables when they are asked for first, and longer ones when those are too short."""

    def __init__(self):
        self.made, self.rows = {}, torch.ones(1, dtype=torch.float64)

    def sin(self, size):
        if size not in self.made:
            self.made[size] = torch.arange(size, dtype=torch.float64).sin()
        if len(self.rows) < size:
            self.rows = torch.arange(size, dtype=torch.float64).cos()
        return self.made[size] + self.rows[:size]


@runs(*FORMS)
def test_tables_that_forward_made(run):
    """A recompute that reads what forward left, and leaves it, reads what forward read."""

    def program(run):
        tables, x, log = Tables(), leaf(3), Stats()

        def function(x, tables, log):
            h = x.sin() * tables.sin(3)
            log.see(h)
            return (h.exp() * tables.sin(3)).cos()

        return gradients(run(function, x, tables, log), x)

    assert_as_eager(program, run)


@dataclasses.dataclass
class Record:
    """Has no tensor in it to begin with."""

    h: torch.Tensor | None = None
    calls: int = 1


def test_a_dataclass_that_is_left_alone_is_handed_on():
    seen = Log()

    def function(x, record):
        seen.append(record)
        return x.sin().exp()

    record, x = (Record(), 3), leaf(3)
    checkpoint(function, x, record).sum().backward()
    assert seen[0] is seen[1]


def test_a_note_holds_no_tensor():
    """And an object dies with its last holder, regions that have noted it or not."""
    import gc
    import weakref

    gc.disable()

    def function(x, stats):
        stats.calls += 1
        stats.last = None
        return x.sin().exp()

    try:
        stats, x = Stats(), leaf(3)
        stats.last = torch.ones(3)
        tensor, object_ = weakref.ref(stats.last), weakref.ref(stats)
        y = checkpoint(function, x, stats)
        assert tensor() is None
        y.sum().backward()
        del y, stats
        assert object_() is None
    finally:
        gc.enable()


def test_is_recomputing_is_no_error():
    """What one run alone does between regions inside saves nothing there."""
    x, losses = leaf(3), []

    def function(x):
        h = checkpoint(torch.sin, x * 2)
        if not ckpt_hooks.is_recomputing():
            losses.append(h.detach().mean())
        return checkpoint(torch.cos, h) * 2

    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(((x * 2).sin().cos() * 2).sum(), x)[0])
