"""Containers and objects that a function reads and changes, wherever it reaches them: a rerun finds them as forward did."""

from __future__ import annotations

import collections
import contextlib
import functools
import queue
import threading

import pytest
import torch
from torch import nn

from ckpt_hooks import DeterminismError, checkpoint, is_recomputing
from ckpt_hooks.policies import dots_saveable
from tests.behaviours.runs import Run, assert_as_eager, plain
from tests.measure import leaf

# Containers: each is made with a value "h", is read, and is changed.


class Plain:
    """An object with attributes."""


class Slots:
    """An object with slots, of which one may be empty."""

    __slots__ = ("count", "h")


class Attributes:
    """Reads and binds attributes."""

    def __init__(self, kind):
        self.kind = kind

    def make(self):
        return self.kind()

    def get(self, held, name):
        return getattr(held, name)

    def put(self, held, name, value):
        setattr(held, name, value)


class Keys(Attributes):
    """Reads and binds keys."""

    def get(self, held, name):
        return held[name]

    def put(self, held, name, value):
        held[name] = value


class Entries(Attributes):
    """Reads and binds entries: the value, and the count. The list grows by one entry in each call."""

    def make(self):
        return self.kind([None, None])

    def get(self, held, name):
        return held[("h", "count").index(name)]

    def put(self, held, name, value):
        held[("h", "count").index(name)] = value
        held.append(len(held))


class Only(Attributes):
    """Has both in a set, of which the value is the tensor, and the count is a number."""

    def make(self):
        return set()

    def get(self, held, name):
        return next((one for one in held if isinstance(one, torch.Tensor if name == "h" else int)), None)

    def put(self, held, name, value):
        held.discard(self.get(held, name))
        held.add(value)


class Inside(Attributes):
    """Has one of these within others."""

    def __init__(self, inner, wrap, unwrap):
        self.inner, self.wrap, self.unwrap = inner, wrap, unwrap

    def make(self):
        return self.wrap(self.inner.make())

    def get(self, held, name):
        return self.inner.get(self.unwrap(held), name)

    def put(self, held, name, value):
        self.inner.put(self.unwrap(held), name, value)


def in_object(value):
    held = Plain()
    held.inner = [value]
    return held


KINDS = {
    "object": Attributes(Plain),
    "slots": Attributes(Slots),
    "dict": Keys(dict),
    "default": Keys(functools.partial(collections.defaultdict, int)),
    "list": Entries(list),
    "deque with a length": Entries(functools.partial(collections.deque, maxlen=40)),
    "set": Only(set),
    "in an object": Inside(Keys(dict), in_object, lambda held: held.inner[0]),
}

# Places


def as_argument(kind, held):
    return lambda region, x: region(lambda x, held: step(kind, held, x), x, held)


def as_keyword(kind, held):
    return lambda region, x: region(lambda x, *, held: step(kind, held, x), x, held=held)


def by_closure(kind, held):
    return lambda region, x: region(lambda x: step(kind, held, x), x)


def by_default(kind, held):
    return lambda region, x: region(lambda x, held=held: step(kind, held, x), x)


def by_partial(kind, held):
    return lambda region, x: region(functools.partial(step, kind, held), x)


def by_attribute(kind, held):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = held

        def forward(self, x):
            return step(kind, self.held, x)

    module = Module()
    return lambda region, x: region(module, x)


def by_self(kind, held):
    class Trainer:
        def __init__(self):
            self.held = held

        def step(self, x):
            return step(kind, self.held, x)

    trainer = Trainer()
    return lambda region, x: region(trainer.step, x)


HELD = None


def by_global(kind, held):
    global HELD
    HELD = held
    return lambda region, x: region(lambda x: step(kind, HELD, x), x)


def by_hook(kind, held):
    module = nn.Sequential(nn.Identity())
    module[0].register_forward_hook(lambda module, args, result: step(kind, held, result))
    return lambda region, x: region(module, x)


PLACES = [
    as_argument, as_keyword, by_closure, by_default, by_partial, by_attribute, by_self, by_global, by_hook,
]  # fmt: skip


def step(kind, held, x):
    """Reads the value and the count, and changes both."""
    h, count = kind.get(held, "h"), kind.get(held, "count")
    y = (x.sin() * h).exp() * (1 + count)
    kind.put(held, "h", y.cos() if count % 2 else y.detach().sin())
    kind.put(held, "count", count + 1)
    return (y.sin() * kind.get(held, "h")).tanh()


FORMS = {
    "region": checkpoint,
    "policy": lambda function, *args, **kwargs: checkpoint(policy=dots_saveable)(function)(*args, **kwargs),
    "nested": lambda function, *args, **kwargs: checkpoint(lambda *a, **k: checkpoint(function, *a, **k), *args, **kwargs),
}


def call(function, *args, **kwargs):
    return function(*args, **kwargs)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_container_that_the_function_reads_and_changes(kind, place):
    """Its value is a tensor, of another history in each call, and the loop around binds the value anew as well."""
    form = list(FORMS)[(list(KINDS).index(kind) + PLACES.index(place)) % len(FORMS)]
    kind = KINDS[kind]

    def program(run):
        x, region = leaf(3), call if run is plain else FORMS[form]
        held = kind.make()
        kind.put(held, "h", torch.ones(3, dtype=torch.float64))
        kind.put(held, "count", 0)
        stepped = place(kind, held)
        y = stepped(region, x)
        for _ in range(3):
            y = y + stepped(region, y)
            kind.put(held, "h", kind.get(held, "h") * 0.5 + y)
        kind.put(held, "h", None)
        kind.put(held, "count", 7)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert kind.get(held, "h") is None
        return [y, *first, *torch.autograd.grad(y.sum(), x), kind.get(held, "count")]

    assert_as_eager(program, Run("ours"))


class MakesBuffer(nn.Module):
    """Registers a buffer in its first call, and fills a slot for a parameter."""

    def __init__(self):
        super().__init__()
        self.register_parameter("bias", None)
        self.register_buffer("mask", None)

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.rand(3, dtype=torch.float64))
        if self.bias is None:
            self.bias = nn.Parameter(torch.rand(3, dtype=torch.float64))
        if self.mask is None:
            self.mask = torch.rand(3, dtype=torch.float64)
        draws = torch.rand(3, dtype=torch.float64)
        return ((x * self.scale + self.bias).sin() * draws * self.mask).exp()


@pytest.mark.parametrize("form", FORMS)
def test_parts_that_the_first_call_makes(form):
    def program(run):
        torch.manual_seed(3)
        module, x, region = MakesBuffer(), leaf(3), call if run is plain else FORMS[form]
        y = region(module, region(module, x))
        made = [module.scale, module.mask]
        y.sum().backward()
        assert all(one is two for one, two in zip(made, (module.scale, module.mask), strict=True))
        return [y, x.grad, module.bias.grad, module.bias, *module.state_dict().values(), torch.get_rng_state()]

    assert_as_eager(program, Run("ours"))


class State(collections.namedtuple("State", "h c")):
    """A named tuple with a ``__dict__``, as most of its kind."""


class Number(int):
    """A number of a kind of its own."""


class Frozen(frozenset):
    """A set of a kind of its own."""


@pytest.mark.parametrize("form", FORMS)
def test_subclasses_of_what_cannot_change(form):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.state, self.number, self.frozen = State(torch.ones(3), torch.ones(3)), Number(2), Frozen({3})

        def forward(self, x):
            y = (x * self.state.h * self.state.c * self.number + min(self.frozen)).sin()
            self.state = State(self.state.h + y.detach(), self.state.c * 2)
            self.number, self.frozen = Number(self.number + 1), Frozen({min(self.frozen) + 1})
            return y.exp()

    def program(run):
        module, x, region = Module(), leaf(3), call if run is plain else FORMS[form]
        y = region(module, region(module, region(module, x)))
        y.sum().backward()
        return [x.grad, *module.state, int(module.number), *module.frozen]

    assert_as_eager(program, Run("ours"))


@pytest.mark.parametrize("kind", [list, tuple, collections.deque, dict.fromkeys, set])
def test_a_long_container_that_forward_exchanges(kind):
    """Of which no rerun gets the earlier one; it is not read."""
    module, x = nn.Tanh(), leaf(3)
    module.all = kind(range(2000))

    def function(x):
        module.all = kind(range(1500))
        return module(x.sin()).exp()

    y = checkpoint(function, x)
    after = module.all
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().tanh().exp().sum(), x)[0])
    assert module.all is after
    assert len(after) == 1500


def nested(levels):
    """Returns lists in lists that a closure leads to, itself the first level."""
    held = [1.0]
    for _ in range(levels - 2):
        held = [held]
    return held


def branched(values):
    """Returns a list, with so many lists below it: 20, and 99 or 100 in each."""
    return [[[1.0] for _ in range(99 + (row < values - 2000))] for row in range(20)]


def entries(number):
    return [1.0] * number


def last_of(held):
    while isinstance(held[-1], list):
        held = held[-1]
    return held


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize(("make", "most"), [(nested, 6), (branched, 2000), (entries, 1000)])
def test_limits_that_the_readme_gives(make, most, beyond):
    """What is beyond is found as it is by then: an error where values are compared; a counter counts twice."""
    held, x = make(most + beyond), leaf(3)

    def counting(x):
        last_of(held)[0] += 1
        return x.sin().exp()

    checkpoint(counting, x).sum().backward()
    assert last_of(held)[0] == 2 + beyond
    y = checkpoint(determinism_check="values")(lambda x: (x * last_of(held)[0]).sin())(x)
    last_of(held)[0] += 1
    with pytest.raises(DeterminismError) if beyond else contextlib.nullcontext():
        y.sum().backward()


# What a stopped recompute leaves behind


def _insert(entries):
    entries.insert(0, {})


def _move(entries):
    entries.append(entries[0])
    del entries[0]


def _take_out(entries):
    del entries[0]


@pytest.mark.parametrize("make", [list, collections.deque])
@pytest.mark.parametrize("move", [_insert, _move, _take_out])
def test_an_entry_that_forward_moves_is_bound_once(make, move):
    """What forward binds in an entry is there once, wherever the entry has got to."""
    entry, x = {"mean": None}, leaf(3)
    held = make([entry, {}])

    def function(x):
        held[0]["mean"] = x.detach().mean()
        y = x.sin().exp()
        move(held)
        return y

    y = checkpoint(function, x)
    mean, found = entry["mean"], list(map(id, held))
    y.sum().backward()
    assert entry["mean"] is mean
    assert list(map(id, held)) == found


def test_what_another_thread_adds_meanwhile_stays_in_a_queue_alone():
    """README's limit: containers that the function reaches are, after a rerun, as they were before it."""
    numbers, items = [0], queue.Queue()

    def function(x):
        if is_recomputing():
            thread = threading.Thread(target=lambda: (numbers.append(1), items.put(1)))
            thread.start()
            thread.join()
        return x.sin().exp() * len(numbers)

    x = leaf(3)
    (gradient,) = torch.autograd.grad(checkpoint(function, x).sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert (numbers, items.qsize()) == ([0], 1)
