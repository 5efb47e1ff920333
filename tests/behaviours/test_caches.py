"""Objects that a function keeps things in, such as caches of keys: a recompute finds them as forward did."""

from __future__ import annotations

import dataclasses
import functools
import types

import pytest
import torch
from torch import nn

import ckpt_hooks
from ckpt_hooks import checkpoint, checkpoint_region, checkpoint_sequential
from ckpt_hooks.policies import dots_saveable
from tests.behaviours.runs import FORMS, SILENT, Run, assert_as_eager, gradients, plain, runs
from tests.measure import Log, leaf

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*names operators that did not run")


class Cache:
    """Keeps all keys in a list."""

    def __init__(self):
        self.k = []

    def add(self, key):
        self.k.append(key)
        return self.k


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


def mix(q, keys):
    """Depends on how many keys there are, and on their order, without a change of shape."""
    for key in reversed(list(keys)):
        q = q * (key + q)
    return q.sin()


def grown_list(inner, x, cache):
    return inner(mix, x.sin(), list(cache.add(x.exp()))).cos()


def grown_list_first(inner, x, cache):
    return inner(lambda keys, q: mix(q, keys), list(cache.add(x.exp())), x.sin()).cos()


def grown_list_read_inside(inner, x, cache):
    cache.add(x.exp())
    h = inner(lambda q: mix(q, cache.k), x.sin())
    return inner(torch.sin, h).cos()


def region_a_key(inner, x, cache):
    h = x.sin()
    for key in cache.add(x.exp()):
        h = inner(torch.mul, h, key + h)
    return inner(torch.sin, h).exp()


def summed(inner, x, cache):
    return inner(torch.sin, x) * sum(cache.add(x.exp()))


def stacked(inner, x, cache):
    return inner(torch.exp, torch.stack(cache.add(x.exp()))).sum(0).cos()


def outer_product(inner, x, cache):
    """Fails by the shapes, in the recompute alone."""
    keys = torch.stack(cache.add(x.exp()))
    return inner(torch.sin, (torch.eye(1, dtype=x.dtype) @ keys).cos())


BODIES = [grown_list, grown_list_first, grown_list_read_inside, region_a_key, summed, stacked, outer_product]
INNER = {"no region": call, "function": checkpoint, "recorded": recorded, "selective": CALLS["list"]}


def both(y, *inputs):
    """Returns the gradients of a backward after which another one is to come."""
    return list(torch.autograd.grad(y.sum(), inputs, retain_graph=True))


def kept(cache):
    """Returns the keys, of which a graph may be part."""
    return [key.detach() for key in cache.k]


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("outer", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("body", BODIES)
def test_a_list_in_an_object_that_grows(body, outer, inner):
    def program(run):
        x, cache = leaf(3), Cache()
        ours = run is not plain
        run_body = functools.partial(body, inner if ours else call)
        again = Cache() if body is outer_product else cache
        y = (outer if ours else call)(run_body, (outer if ours else call)(run_body, x, cache), again)
        found = both(y, x) + kept(cache)
        return found + gradients(y, x) + kept(cache)

    assert_as_eager(program, Run("ours"))


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


@pytest.mark.parametrize("way", ["argument", "closure"])
@runs(*FORMS, torch_fails=SILENT)
def test_an_object_that_is_only_written_to(run, way):
    def program(run):
        stats, x, linear = Stats(), leaf(2, 3), nn.Linear(3, 3, dtype=torch.float64)

        def function(x, stats=None):
            h = linear(x.sin()).exp()
            (log if way == "closure" else stats).see(h)
            return linear(h.cos()).sin()

        log = stats
        y = run(function, x) if way == "closure" else run(function, x, stats)
        found = gradients(y.sum() + stats.losses[0], x, *linear.parameters())
        return [*found, stats.calls, len(stats.losses), list(stats.by_name), stats.total, stats.last.detach()]

    assert_as_eager(program, run)


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


def test_a_state_that_each_call_replaces():
    """Of one shape always, and read before it is bound anew, at the end of the function."""

    class State:
        h = None

    def cell(x, state):
        before = torch.zeros_like(x) if state.h is None else state.h
        h = (x * before + x).sin() * x
        state.h = h.detach()
        return h

    def program(run):
        x, state = leaf(3), State()
        state.h = torch.ones(3, dtype=torch.float64)
        return [*gradients(run(cell, run(cell, x, state), state), x), state.h]

    assert_as_eager(program, Run("ours"))


@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_error_of_a_recompute_leaves_a_cache_as_it_was(kind):
    fail = Log([False])

    def function(x, cache):
        cache.add(x.exp())
        if fail[0]:
            raise kind
        return (x.sin() * len(cache.k)).exp()

    x, cache = leaf(3), Cache()
    y = checkpoint(function, x, cache).sum()
    (key,) = cache.k
    fail[0] = True
    with pytest.raises(kind):
        y.backward()
    assert cache.k[0] is key
    assert len(cache.k) == 1
    fail[0] = False
    y.backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert cache.k[0] is key


@dataclasses.dataclass
class Record:
    """Has no tensor in it to begin with."""

    h: torch.Tensor | None = None
    calls: int = 1


@runs(*FORMS, torch_fails=SILENT)
def test_a_dataclass_is_captured_that_has_no_tensor_yet(run):
    def program(run):
        def function(x, record):
            before = torch.ones(3, dtype=torch.float64) if record.h is None else record.h
            y = (x.sin() * record.calls * before).exp()
            record.h, record.calls = y.detach().sin(), record.calls + 1
            return y.cos()

        x, record = leaf(3), Record()
        y = run(function, run(function, x, record), record)
        return [*gradients(y, x), record.calls, record.h]

    assert_as_eager(program, run)


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


class Tells(torch.Tensor):
    """Another thread writes to the object around it, whenever it is asked for its shape."""

    around: types.SimpleNamespace | None = None

    @property
    def shape(self):
        if self.around is not None:
            setattr(self.around, f"more{len(vars(self.around))}", 1)
        return super().shape


def test_objects_that_another_thread_writes_to_meanwhile():
    shared, x = types.SimpleNamespace(first=torch.ones(3).as_subclass(Tells), last=2), leaf(3)
    shared.first.around = shared
    checkpoint(lambda x: (x * shared.last).sin(), x).sum().backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)
