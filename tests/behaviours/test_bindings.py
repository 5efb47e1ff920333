"""What a forward is bound to for a while: hooks, methods, classes, parametrizations, attributes of functions.

A rerun finds them as its forward did, and the program goes on with its own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import types
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

from tests.behaviours.applied import ALL_REGIONS, FUNCTION_REGIONS, all_regions, function_regions
from tests.behaviours.runs import assert_as_eager, gradients
from tests.measure import in_turns

# Changes: each changes a model, and returns what takes the change back.


class Counter:
    """Counts in three ways how often it was called."""

    def __init__(self):
        self.calls, self.seen, self.values = 0, [], {}

    def __call__(self, module=None):
        self.calls += 1
        self.seen.append(self.calls)
        self.values[self.calls] = type(module).__name__
        return self.calls

    def state(self):
        return [self.calls, list(self.seen), dict(self.values)]


class Inner(nn.Module):
    """A layer between two others, which has a method to be called by its forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)

    def activation(self, x):
        return x.sin()

    def forward(self, x):
        return self.activation(self.norm(self.linear(x))).exp()


class Other(Inner):
    """Another class for it, which does something else."""

    def activation(self, x):
        return x.cos()

    def forward(self, x):
        return super().forward(x).tanh()


class Model(nn.Module):
    """Calls its layer twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Inner(), nn.Softplus()

    def forward(self, x):
        return self.last(self.inner(self.inner(x).sin())).sin()


def steer(counter, module, args, kwargs, result=None):
    """Changes what a hook is given, by the number of its call."""
    scale = 1.0 + 0.1 * counter(module)
    return ((args[0] * scale, *args[1:]), kwargs) if result is None else result * scale


def steer_for_all(counter, module, args, result=None):
    """The same for hooks for all modules, which do without keywords."""
    scale = 1.0 + 0.1 * counter(module)
    return (args[0] * scale, *args[1:]) if result is None else result * scale


def hook(register, **options):
    """Returns a change that registers a hook of a submodule."""

    def change(model, counter):
        method = getattr(model.inner, register)
        return method(functools.partial(steer, counter), with_kwargs=True, **options).remove

    return change


def hook_by_closure(model, _):
    """Has the count, and an adapter's weight, in cells."""
    count, down = 0, torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)

    def adapt(module, args, result):
        nonlocal count
        count += 1
        return result + args[0] @ down * count

    return model.inner.linear.register_forward_hook(adapt).remove


def hook_that_takes_itself_off(model, counter):
    """Is called once."""

    def once(module, args, result):
        handle.remove()
        return result * (1 + counter())

    handle = model.inner.register_forward_hook(once)
    return handle.remove


def hooks_in_two_places(model, counter):
    """One before others, and one for the whole module."""
    handles = [
        model.inner.register_forward_hook(lambda module, args, result: result.sin()),
        model.inner.register_forward_hook(lambda module, args, result: result * 2 + counter(), prepend=True),
        model.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,)),
    ]
    return lambda: [handle.remove() for handle in handles]


def hook_for_all(register):
    """Returns a change that registers a hook for all modules."""
    return lambda model, counter: register(functools.partial(steer_for_all, counter)).remove


def forward_of_the_instance(model, counter):
    """As libraries do that wrap a module's forward."""
    model.inner.forward = types.MethodType(lambda module, x: Inner.forward(module, x) * counter(), model.inner)
    return lambda: delattr(model.inner, "forward")


def method_of_the_instance(model, counter):
    model.inner.activation = lambda x: x.tanh() * counter()
    return lambda: delattr(model.inner, "activation")


def function_for_a_forward(model, counter):
    """It names the forward that it takes the place of."""
    forward = model.inner.forward
    model.inner.forward = lambda x: forward(x) + x * counter()
    return lambda: delattr(model.inner, "forward")


def another_class(model, _):
    model.inner.__class__ = Other
    return lambda: setattr(model.inner, "__class__", Inner)


def another_class_of_a_library(model, _):
    model.last.__class__ = nn.Tanhshrink
    return lambda: setattr(model.last, "__class__", nn.Softplus)


class Doubled(nn.Module):
    """A parametrization without parameters."""

    def forward(self, weight):
        return weight * 2


class Low(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(torch.full((3, 3), 0.25, dtype=torch.float64))

    def forward(self, weight):
        return weight + self.down


def parametrization(kind):
    def change(model, _):
        parametrize.register_parametrization(model.inner.linear, "weight", kind())
        return lambda: parametrize.remove_parametrizations(model.inner.linear, "weight", leave_parametrized=False)

    return change


def weight_computed_by_a_hook(model, _):
    """As pruning does: from another parameter, before each forward of the layer, bound as an attribute."""
    linear, weight = model.inner.linear, model.inner.linear.weight
    del linear.weight
    linear.register_parameter("weight_orig", weight)

    def compute(module, args):
        module.weight = module.weight_orig * torch.eye(3, dtype=torch.float64)

    handle = linear.register_forward_pre_hook(compute)

    def restore():
        handle.remove()
        vars(linear).pop("weight", None)
        del linear.weight_orig
        linear.weight = weight

    return restore


def computed_weight(model, _):
    """The weight is a result of autograd, as an attribute."""
    linear, weight = model.inner.linear, model.inner.linear.weight
    del linear.weight
    linear.weight = weight * torch.eye(3, dtype=torch.float64)

    def restore():
        del linear.weight
        linear.weight = weight

    return restore


CHANGES = {
    "hook": hook("register_forward_hook"),
    "hook, always called": hook("register_forward_hook", always_call=True),
    "pre-hook": hook("register_forward_pre_hook"),
    "hook by closure": hook_by_closure,
    "hook that takes itself off": hook_that_takes_itself_off,
    "hooks in two places": hooks_in_two_places,
    "hook for all": hook_for_all(register_module_forward_hook),
    "pre-hook for all": hook_for_all(register_module_forward_pre_hook),
    "forward": forward_of_the_instance,
    "forward around forward": function_for_a_forward,
    "method": method_of_the_instance,
    "class": another_class,
    "class of a library": another_class_of_a_library,
    "weight computed by a hook": weight_computed_by_a_hook,
    "computed weight": computed_weight,
}

#: These write to the weight, which is an error if it comes after a forward.
PARAMETRIZATIONS = {"parametrization": parametrization(Doubled), "parametrization with a parameter": parametrization(Low)}

# When a change is there. Each yields the outputs to go backward from, at that moment.


def in_forward(forward, change):
    undo = change()
    y = forward()
    undo()
    yield y


def after_forward(forward, change):
    y = forward()
    undo = change()
    yield y
    undo()


def from_forward_on(forward, change):
    undo = change()
    yield forward()
    undo()


def taken_back_for_forward(forward, change):
    """The other way round: it is there from the beginning, and not in forward."""
    undo = change()
    undo()
    y = forward()
    undo = change()
    yield y
    undo()


def in_one_forward_of_three(forward, change):
    """All of them go backward later, in another order."""
    first = forward()
    undo = change()
    second = forward()
    undo()
    third = forward()
    yield second
    yield third
    yield first


WHEN = [in_forward, after_forward, from_forward_on, taken_back_for_forward, in_one_forward_of_three]


def state(model):
    """Returns values, names and classes of what a model is made of."""
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [*map(torch.clone, values.values()), *values, *(type(module).__name__ for module in model.modules())]


@pytest.mark.parametrize(
    ("change", "when", "run"),
    [*in_turns(CHANGES, WHEN, ALL_REGIONS), *in_turns(PARAMETRIZATIONS, (in_forward, from_forward_on), ALL_REGIONS)],
)
def test_changes_of_a_module(change, when, run):
    """Some steps, between which the model runs without a region too: whatever is left of a change would be seen there."""
    made = {**CHANGES, **PARAMETRIZATIONS}[change]

    def program(run):
        model, counter, found = Model(), Counter(), []
        for _ in range(3):
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            for y in when(lambda x=x: run(model, x), lambda: made(model, counter)):
                y.sum().backward(inputs=[x, *(p for p in model.parameters() if p.is_leaf)])
                found += [y, x.grad.clone(), counter.state(), state(model)]
            with torch.no_grad():
                found += [*(None if p.grad is None else p.grad.clone() for p in model.parameters()), model(x)]
        return found

    assert_as_eager(program, ALL_REGIONS[run])


@all_regions
def test_handles_work_after_a_rerun(run):
    """They know the dict of hooks by a weak reference. The first is registered before all forwards, the second after one."""

    def program(run):
        model, x, handles, found = Model(), torch.randn(4, 3, dtype=torch.float64, requires_grad=True), [], []
        for scale in (2.0, 3.0):
            handles.append(model.inner.register_forward_hook(lambda module, args, result, scale=scale: result * scale))
            y = run(model, x)
            handles.append(model.inner.register_forward_pre_hook(lambda module, args, scale=scale: (args[0] + scale,)))
            found += torch.autograd.grad(y.sum(), x)
        for handle in handles:
            handle.remove()
            found.append(run(model, x))
        return found

    assert_as_eager(program, run)


# Forwards and hooks of any kind: a class may make them anew at each look, and some have no weak references


class Slotted:
    """Counts its calls as a hook or a forward; has no weak references."""

    __slots__ = ("calls", "owner")

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return steered(self.calls, *args)


class Incomparable(Slotted):
    """Has no hash, either."""

    __slots__ = ()
    __hash__ = None

    def __eq__(self, other):
        raise AssertionError


class CalledAnew(Slotted):
    """Has another method at each look."""

    __slots__ = ()
    __call__ = functools.partialmethod(lambda self, _, *args: Slotted.__call__(self, *args), None)


class Named(NamedTuple):
    """Is called, and has its count in a list."""

    counts: list[int]

    def __call__(self, *args):
        self.counts.append(len(self.counts))
        return steered(len(self.counts), *args)


def counting():
    """Returns a function with its count in a cell."""
    calls = 0

    def count(*args):
        nonlocal calls
        calls += 1
        return steered(calls, *args)

    return count


def steered(calls, *args):
    """Returns what a forward, or a hook of any kind, makes of what it was given."""
    latest, scale = args[-1], 1 + calls / 8
    if isinstance(latest, torch.Tensor):
        return (latest * scale).sin()
    first = args[1]
    return ((first[0] * scale,), latest) if isinstance(latest, dict) else (first[0] * scale,)


class Method:
    """Makes the forward anew at each look; not for the class."""

    __slots__ = ("function",)

    def __init__(self, function):
        self.function = function

    def __get__(self, instance, kind=None):
        if instance is None:
            raise AttributeError
        return functools.partial(self.function, instance)


class Runs(nn.Module):
    """Has all but a forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3, dtype=torch.float64), 0

    def run(self, x, scale=1.0):
        self.calls += 1
        return (self.linear(x).sin() * scale * self.calls).exp()


FORWARDS = {
    "partialmethod": lambda: functools.partialmethod(Runs.run, scale=0.5),
    "partialmethod of a closure": lambda: functools.partialmethod(counting(), 1),
    "singledispatchmethod": lambda: functools.singledispatchmethod(Runs.run),
    "descriptor": lambda: Method(counting()),
    "staticmethod": lambda: staticmethod(counting()),
    "classmethod": lambda: classmethod(counting()),
    "property": lambda: property(functools.partial(functools.partial, counting())),
    "cached_property": lambda: functools.cached_property(lambda self: functools.partial(self.run, scale=0.5)),
    "slots": Slotted,
    "no hash": Incomparable,
    "called anew": CalledAnew,
    "named tuple": lambda: Named([]),
}


def steps_of(module, run):
    """Trains a module, and returns what it computes in the end without a region."""
    found = []
    for _ in range(3):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        found += gradients(run(module, x), x)
        found += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return [*found, module(x)]


@pytest.mark.parametrize(("kind", "run", "is_base"), in_turns(FORWARDS, ALL_REGIONS, (False, True)))
def test_forwards_of_a_class(kind, run, is_base):
    def program(run):
        made = type("Made", (Runs,), {"forward": FORWARDS[kind]()})
        module = (type("Derived", (made,), {}) if is_base else made)()
        inside = steps_of(nn.Sequential(module, nn.Tanh()), run)
        # No attribute of an instance takes the place of a property, so ``apply_checkpointing`` refuses the module itself.
        return inside if kind == "property" else inside + steps_of(module, run)

    assert_as_eager(program, ALL_REGIONS[run])


@pytest.mark.parametrize(
    ("kind", "run"), in_turns(["slots", "no hash", "called anew", "named tuple", "closure", "partial"], ALL_REGIONS)
)
def test_forwards_of_an_instance(kind, run):
    def program(run):
        module = Runs()
        made = {**FORWARDS, "closure": counting, "partial": lambda: functools.partial(module.run, scale=0.5)}
        module.forward = made[kind]()
        return steps_of(module, run)

    assert_as_eager(program, ALL_REGIONS[run])


HOOKS = {
    "slots": Slotted,
    "no hash": Incomparable,
    "called anew": CalledAnew,
    "named tuple": lambda: Named([]),
    "method of slots": lambda: Slotted().__call__,
    "partial of slots": lambda: functools.partial(Slotted()),
}
REGISTER = {
    "hook": lambda module, hook: module.register_forward_hook(hook),
    "hook with keywords": lambda module, hook: module.register_forward_hook(hook, with_kwargs=True, always_call=True),
    "pre-hook": lambda module, hook: module.register_forward_pre_hook(hook),
    "pre-hook with keywords": lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True),
    "backward hook": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre-hook": lambda module, hook: module.register_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize(("kind", "way", "run"), in_turns(HOOKS, REGISTER, ALL_REGIONS))
def test_hooks_of_any_kind(kind, way, run):
    """Each is taken off in the end, and another one takes its place in memory."""

    def program(run):
        module, found = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Tanh()), []
        for _ in range(2):
            handle = REGISTER[way](module[0], HOOKS[kind]())
            found += steps_of(module, run)
            handle.remove()
        return [*found, *steps_of(module, run)]

    assert_as_eager(program, ALL_REGIONS[run])


class Schedule:
    """Has a method to be called by a module, and counts."""

    def __init__(self):
        self.step, self.log = 1, []

    def value(self):
        self.log.append(self.step)
        return 1 / (self.step + len(self.log))

    def next(self):
        self.step += 1


def logged(log, step=None):
    log.append(len(log))
    return 1 / (1 + sum(log))


def with_attribute(step):
    found = functools.partial(lambda: 1 / found.step)
    found.step = step
    return found


CALLED = {
    "method": lambda: (schedule := Schedule(), schedule.value, schedule.next),
    "partial of a method": lambda: (schedule := Schedule(), functools.partial(schedule.value), schedule.next),
    "partial with a list": lambda: (log := [], functools.partial(logged, log), lambda: log.append(3)),
    "partial with a keyword": lambda: (log := [], functools.partial(logged, log=log), lambda: log.append(3)),
    "partial with an object": lambda: (
        schedule := Schedule(),
        functools.partial(Schedule.value, schedule),
        lambda: setattr(schedule, "log", [1, 2]),
    ),
    "partial with an attribute": lambda: (
        found := with_attribute(1),
        found,
        lambda: setattr(found, "step", found.step + 1),
    ),
}


class Calls(nn.Module):
    """Calls what it has in an attribute, or in a list."""

    def __init__(self, function, *, is_listed):
        super().__init__()
        self.layer, self.called = nn.Linear(3, 3, dtype=torch.float64), [function] if is_listed else function

    def forward(self, x):
        scale = self.called[0]() if isinstance(self.called, list) else self.called()
        return (self.layer(x) * scale).tanh().sin()


@pytest.mark.parametrize(("kind", "is_listed", "run"), in_turns(CALLED, (False, True), ALL_REGIONS))
def test_callables_that_a_module_has(kind, is_listed, run):
    def program(run):
        _, function, between = CALLED[kind]()
        module, found = Calls(function, is_listed=is_listed), []
        for _ in range(3):
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            y = run(module, x)
            between()
            found += [*gradients(y, x), *(p.grad.clone() for p in module.parameters())]
        return found

    assert_as_eager(program, ALL_REGIONS[run])


def at_address(number, make):
    """Returns what is made at an address, if it is free; what is made at others meanwhile is kept."""
    others = [make()]
    while id(others[-1]) != number and len(others) < 10_000:
        others.append(make())
    return others.pop()


@function_regions
@pytest.mark.parametrize("make", [counting, Slotted])
@pytest.mark.parametrize("way", ["forward", "hook"])
def test_another_one_at_the_same_address(way, make, run):
    """What is noted of a function or object that is gone says nothing of the next one."""

    def program(run):
        module, found, number = Runs(), [], None
        module.forward = module.run
        for _ in range(3):
            one = make() if number is None else at_address(number, make)
            number, handle = id(one), module.register_forward_hook(one) if way == "hook" else None
            if way == "forward":
                module.forward = one
            del one
            found += steps_of(module, run)
            if way == "hook":
                handle.remove()
            else:
                del module.forward
        return found

    assert_as_eager(program, run)


def hook_without_references(module):
    hook = Slotted()
    hook.owner = module
    module.register_forward_hook(hook)


def forward_around_its_own(module):
    forward = module.forward
    module.forward = lambda x: forward(x).sin()


def lead_to(module):
    module.weight.owner = module
    return module.weight


LEADING = {
    "hook": hook_without_references,
    "forward": forward_around_its_own,
    "function": lambda module: setattr(module, "own", lambda: module),
    "functions in a list": lambda module: setattr(module, "own", [lambda: module]),
    "iterator": lambda module: setattr(module, "own", iter([module])),
    "iterator in a list": lambda module: setattr(module, "own", [iter([module])]),
    "keys": lambda module: setattr(module, "own", {module: 1}),
    "keys in a list": lambda module: setattr(module, "own", [{module: [1]}]),
    "keys of two kinds": lambda module: setattr(module, "own", {module.weight: [1], module: []}),
    "method": lambda module: setattr(module, "own", [module.register_buffer, types.MethodType(lambda held: held, [module])]),
    "partial": lambda module: setattr(module, "own", [functools.partial(print, module), functools.partial(module)]),
    "tuples as keys": lambda module: setattr(module, "own", {(module, 1): [1]}),
    "attribute of a key": lambda module: setattr(module, "own", {lead_to(module): [1]}),
}


@pytest.mark.parametrize(("way", "run"), in_turns(LEADING, FUNCTION_REGIONS))
def test_a_module_goes_that_leads_to_itself(way, run):
    """What is noted of modules from step to step holds none of them."""
    module, run = nn.Linear(3, 3), FUNCTION_REGIONS[run]
    LEADING[way](module)
    for _ in range(2):
        run(module, torch.ones(2, 3)).sum().backward()
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


class Key(NamedTuple):
    """A key that is a tuple."""

    layer: object
    head: int = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A key that is an object."""

    layer: int = 1


KEYS = {
    "module": lambda module: module.layer,
    "module itself": lambda module: module,
    "parameter": lambda module: module.layer.weight,
    "buffer": lambda module: module.norm.running_mean,
    "named tuple": lambda module: Key(0),
    "tuple of named tuples": lambda module: (Key(0), Key(1)),
    "subclass of str": lambda module: type("Name", (str,), {})("name"),
    "object": lambda module: module.key,
    "function": lambda module: module.call,
}


class Keyed(nn.Module):
    """Scales by entries of dicts with keys of some kind, and counts in these."""

    def __init__(self, key):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)
        self.key, self.call = Frozen(), lambda x: self.layer(x)
        self.name = KEYS[key](self)
        self.table, self.inner, self.last = {self.name: 1.0}, [{"name": 1, self.name: [1.0]}], collections.OrderedDict()

    def forward(self, x):
        self.table[self.name] += 1
        self.inner[0][self.name].append(self.table[self.name] + len(self.last))
        x = (self.call(x) * self.table[self.name]).tanh() * sum(self.inner[0][self.name])
        self.last[self.name] = self.last.pop(self.name, 0) + 1
        self.last[x.shape] = self.last.pop(x.shape, 0) + 1
        return x.sin()

    def state(self):
        key = self.name
        found = [self.table.get(key), *self.inner[0].get(key, []), *self.last.values()]
        return [*found, *(one is key for table in (self.table, self.inner[0], self.last) for one in table)]


def leave(module):
    pass


def write(module):
    module.table[module.name] *= 2
    module.table[Frozen(len(module.table))] = 1  # which nothing else holds
    module.inner[0][module.name] = [0.5]


def exchange(module):
    module.table, module.inner = {module.name: 0.5, "more": 1}, [{module.name: [0.5], "more": 1}]


def clear(module):
    for table in (module.table, module.inner[0], module.last):
        table.clear()
    module.table[module.name], module.inner[0][module.name] = 0.5, [0.5]


@pytest.mark.parametrize(("key", "between", "run"), in_turns(KEYS, (leave, write, exchange, clear), ALL_REGIONS))
def test_dicts_with_keys_of_any_kind(key, between, run):
    def program(run):
        module, found = Keyed(key), []
        for _ in range(3):
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            y = run(module, x)
            between(module)
            found += [*gradients(y, x), *module.state()]
            found += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        return found

    assert_as_eager(program, ALL_REGIONS[run])


class Twice(nn.Module):
    """Reads a list by two names."""

    def __init__(self):
        super().__init__()
        self.one = self.other = [0.5]

    def forward(self, x):
        return (x * self.one[0]).sin() * self.other[0] + (self.one is self.other)


@pytest.mark.parametrize("name", ["one", "other"])
@pytest.mark.parametrize("run", FUNCTION_REGIONS)
def test_a_list_that_loses_one_of_two_names(run, name):
    def program(run):
        module, found = Twice(), []
        for _ in range(3):
            x = torch.randn(4, dtype=torch.float64, requires_grad=True)
            y = run(module, x).exp()
            setattr(module, name, [2.0 + len(found)])
            found += [*gradients(y, x), module.one, module.other]
        return found

    assert_as_eager(program, FUNCTION_REGIONS[run])


@pytest.mark.parametrize("run", FUNCTION_REGIONS)
def test_parameters_that_are_keys_may_be_swapped(run):
    """Torch refuses to swap tensors that something refers to weakly."""
    module = Keyed("parameter")
    FUNCTION_REGIONS[run](module, torch.randn(4, 3, dtype=torch.float64)).sum().backward()
    module.zero_grad()
    torch.utils.swap_tensors(module.layer.weight, nn.Parameter(torch.ones(3, 3, dtype=torch.float64)))


# Weights that forward itself changes before it reads them


class Normalised(nn.Module):
    """Has a weight of length one whenever it reads it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            if self.way == "copied":
                self.weight.copy_(F.normalize(self.weight))
            elif self.way == "in place":
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
            elif self.way == "clamped":
                self.weight.clamp_(-0.5, 0.5)
            else:
                torch.nn.utils.vector_to_parameters(F.normalize(self.weight).flatten(), [self.weight])
        return F.linear(x.sin(), self.weight).sin()


@function_regions
@pytest.mark.parametrize("way", ["copied", "in place", "clamped", "as data"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_weight_that_forward_normalises_before_it_reads_it(way, frozen, run):
    def program(run):
        module, found = Normalised(way).requires_grad_(not frozen), []
        optimizer = None if frozen else torch.optim.SGD(module.parameters(), 0.5)
        for _ in range(4):
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            y = run(module, x)
            y.sum().backward()
            found += [y, x.grad, module.weight.grad, module.weight.clone()]
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()
            else:
                with torch.no_grad():
                    module.weight.mul_(1.5)
        return found

    assert_as_eager(program, run)
