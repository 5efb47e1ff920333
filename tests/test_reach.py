"""Where modules, tensors and generators are looked for."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint
from ckpt_hooks._function.state.reached_values import NOTHING, walk_from

MODULE = nn.Tanh()
GENERATOR = torch.Generator()


def by_global(x):
    return MODULE(x) + torch.rand(1, generator=GENERATOR)


def by_attribute_of_the_same_name(x):
    return x.MODULE


def closing_over(value):
    return lambda x: value


class Holder:
    """An object with attributes."""

    def __init__(self, **values):
        vars(self).update(values)

    def method(self, x):
        return x

    def __call__(self, x):
        return x


class Slotted:
    """An object with a slot."""

    __slots__ = ("unset", "value")

    def __init__(self, value):
        self.value = value


module, generator, tensor = nn.Tanh(), torch.Generator(), torch.zeros(1)

MODULES = {
    "itself": (module, ()),
    "method": (module.forward, ()),
    "closure": (closing_over(module), ()),
    "list in a closure": (closing_over([module]), ()),
    "dict in a closure": (closing_over({"a": (module,)}), ()),
    "function in a closure": (closing_over(closing_over(module)), ()),
    "default": (lambda x, m=module: m(x), ()),
    "keyword default": (lambda x, *, m=module: m(x), ()),
    "partial": (functools.partial(lambda m, x: m(x), module), ()),
    "partial of a method": (functools.partial(module.forward), ()),
    "method of a holder": (Holder(module=module).method, ()),
    "callable object": (Holder(modules=[module]), ()),
    "slots": (closing_over(Slotted(module)), ()),
    "curried": (checkpoint()(closing_over(module)), ()),
    "argument": (torch.sin, (module,)),
    "function as an argument": (torch.sin, (closing_over(module),)),
}


@pytest.mark.parametrize("way", MODULES.values(), ids=MODULES)
def test_modules_are_found(way):
    assert list(walk_from(*way).modules) == [module]


def test_generators_and_tensors_are_found():
    found = walk_from(closing_over([generator, (tensor, {"m": module})]))
    assert (found.generators, found.tensors, found.modules) == ([generator], [tensor], [module])


def test_globals_that_a_function_names_are_found():
    found = walk_from(by_global)
    assert (found.modules, found.generators) == ([MODULE], [GENERATOR])
    assert walk_from(by_attribute_of_the_same_name) is NOTHING


@pytest.mark.parametrize(
    "function",
    [torch.sin, lambda x: x.sin(), closing_over(3), closing_over("a"), closing_over(torch.float32), len],
)
def test_most_functions_reach_nothing(function):
    assert walk_from(function) is NOTHING
    assert walk_from(function) is NOTHING  # what is known of its code says the same


def test_what_a_closure_holds_is_looked_at_each_time():
    value = 3
    function = lambda x: (x, value)  # noqa: E731
    assert walk_from(function) is NOTHING
    value = module
    assert list(walk_from(function).modules) == [module]


def test_cycles_and_variables_that_are_not_assigned():
    loop: list[object] = []
    loop.append(loop)

    def function(x):
        return loop, later

    assert walk_from(function) is not None
    later = module
    assert list(walk_from(function).modules) == [later]


def test_data_is_not_searched():
    assert walk_from(closing_over([module] * 2000)).modules == []
