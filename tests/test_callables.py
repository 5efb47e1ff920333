"""What may be a region, and which keyword arguments reach it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ckpt_hooks import CheckpointPolicy, checkpoint, checkpoint_region, checkpoint_sequential
from ckpt_hooks.policies import dots_saveable
from tests.measure import leaf

# Functions that do not run when they are called


def generator(x):
    yield x.sin()


async def coroutine(x):
    return x.sin()


async def async_generator(x):
    yield x.sin()


class Generating(nn.Module):
    """A module whose forward is a generator function."""

    def forward(self, x):
        yield x.sin()


class Awaiting:
    """An object whose call and method are coroutine functions."""

    async def __call__(self, x):
        return x.sin()

    async def method(self, x):
        return x.sin()


UNRUN = {
    "generator": generator,
    "coroutine": coroutine,
    "asynchronous generator": async_generator,
    "partial": functools.partial(functools.partial(generator)),
    "module": Generating(),
    "method of a module": Generating().forward,
    "object": Awaiting(),
    "method": Awaiting().method,
    "partial of a module": functools.partial(Generating()),
}


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("function", UNRUN.values(), ids=UNRUN)
def test_functions_that_do_not_run_when_they_are_called(function, grad):
    with torch.set_grad_enabled(grad):
        for wrap in (checkpoint(), checkpoint(name="block"), checkpoint_region()):
            with pytest.raises(TypeError, match="does not run when it is called"):
                wrap(function)
        with pytest.raises(TypeError, match="does not run when it is called"):
            checkpoint(function, leaf(3))
        with pytest.raises(TypeError, match="does not run when it is called"):
            checkpoint(decorated(function), leaf(3))
        with pytest.raises(TypeError, match="does not run when it is called"):
            checkpoint()(decorated(function))(leaf(3))
        with pytest.raises(TypeError, match="does not run when it is called"):
            checkpoint_sequential([function, lambda value: value], 2, leaf(3))


# Keyword arguments that have the name of an option


def swallows(x, **kwargs):
    swallows.got = kwargs
    return x.sin()


def takes_a_name(x, name="none"):
    return name


class Swallowing(nn.Module):
    """A module that takes any keyword argument."""

    def forward(self, x, **kwargs):
        return kwargs


def keep_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def test_what_a_function_takes_reaches_it():
    x = leaf(3)
    checkpoint(swallows, x, name="a", policy="greedy", preserve_buffers=1)
    assert swallows.got == {"name": "a", "policy": "greedy", "preserve_buffers": 1}
    assert checkpoint(Swallowing(), x, name="a", policy=[]) == {"name": "a", "policy": []}
    assert checkpoint(takes_a_name, x, name="b") == "b"
    module = nn.Tanh()
    module.forward = lambda ctx, op: None
    assert checkpoint(Swallowing(), x, policy=module, name=len) == {"policy": module, "name": len}
    assert checkpoint(Swallowing(), x, policy=keep_all) == {"policy": keep_all}  # which may be any function
    assert checkpoint(checkpoint(early_stop=False)(takes_a_name), x, name="c") == "c"
    assert checkpoint(functools.partial(swallows, policy=dots_saveable), x).shape == (3,)
    assert checkpoint(dict, name="d") == {"name": "d"}  # which does not say what it takes
