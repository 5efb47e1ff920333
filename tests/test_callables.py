"""What may be a region, and which keyword arguments reach it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ckpt_hooks import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_chunks,
    checkpoint_loop,
    checkpoint_region,
    checkpoint_sequential,
)
from ckpt_hooks.policies import dots_saveable
from tests.measure import leaf

aten = torch.ops.aten

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
    for call in (
        *(lambda wrap=wrap: wrap(function) for wrap in (checkpoint(), checkpoint(name="block"), checkpoint_region())),
        lambda: checkpoint(function, leaf(3)),
        lambda: checkpoint(decorated(function), leaf(3)),
        lambda: checkpoint()(decorated(function))(leaf(3)),
        lambda: checkpoint_sequential([function, lambda value: value], 2, leaf(3)),
        lambda: checkpoint_loop(function, leaf(3), 1),
    ):
        with torch.set_grad_enabled(grad), pytest.raises(TypeError, match="returns a generator or coroutine"):
            call()


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


def takes_a_policy(x, policy=None, **kwargs):
    return policy


class TakingAPolicy(nn.Module):
    """A module with a parameter of the name of an option."""

    def forward(self, x, *, policy, **kwargs):
        return policy


def test_what_a_function_takes_reaches_it():
    x = leaf(3)
    assert checkpoint(takes_a_name, x, name="b") == "b"
    assert checkpoint(checkpoint(early_stop=False)(takes_a_name), x, name="c") == "c"
    assert checkpoint(functools.partial(swallows, policy=dots_saveable), x).shape == (3,)
    assert checkpoint(dict, name="d") == {"name": "d"}  # which does not say what it takes
    for policy in ("greedy", keep_all, [aten.mm.default], dots_saveable):
        for function in (
            takes_a_policy,
            TakingAPolicy(),
            functools.wraps(takes_a_policy)(lambda *args, **kwargs: kwargs["policy"]),
        ):
            assert checkpoint(function, x, policy=policy) is policy
    y = checkpoint_chunks(lambda x, name: x.sin(), x, chunks=3, name="e")
    assert torch.equal(y, x.sin())


OPTIONS = {"name": "a", "policy": keep_all, "preserve_buffers": 1, "offload_inputs": True, "split_backward": False}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("function", [swallows, Swallowing()], ids=["function", "module"])
def test_an_option_that_is_one_of_the_keywords_of_a_function(function, name):
    """It reaches the function, as with torch's checkpoint, with a warning in the first call."""
    x, given = leaf(3), {name: OPTIONS[name]}
    with pytest.warns(UserWarning, match=rf"checkpoint got {name}=.*`checkpoint\({name}=...\)\(function\)\(\*args\)`") as found:
        checkpoint(function, x, **given)
    assert found[0].filename == __file__
    assert checkpoint(Swallowing(), x, **given) == given  # no second warning
    checkpoint(swallows, x, **given)
    assert swallows.got == given


@pytest.mark.parametrize("name", {**OPTIONS, "debug": True, "preserve_rng_state": False, "use_reentrant": False})
def test_an_option_that_is_one_of_the_keywords_of_a_function_on_slices(name):
    """These have no options of regions."""
    x, given = leaf(3), {name: OPTIONS.get(name, False)}
    with pytest.warns(UserWarning, match=rf"`checkpoint_chunks\(checkpoint\({name}=...\)\(function\), x\)`") as found:
        checkpoint_chunks(swallows, x, chunks=3, **given)
    assert found[0].filename == __file__
    assert swallows.got == given
    checkpoint_chunks(swallows, x, **given)


@pytest.mark.parametrize("policy", [dots_saveable, [aten.mm.default]], ids=["policy", "list"])
@pytest.mark.parametrize("function", [swallows, Swallowing()], ids=["function", "module"])
def test_a_policy_of_the_package_is_never_meant_for_keywords(function, policy):
    with pytest.warns(UserWarning, match="checkpoint got policy="):
        checkpoint(function, leaf(3), policy=keep_all)
    with pytest.raises(TypeError, match=r"checkpoint got policy=.*which is a policy.*`checkpoint\(policy=...\)\(function\)"):
        checkpoint(function, leaf(3), policy=policy)
    with pytest.raises(
        TypeError, match=r"checkpoint_chunks got policy=.*`checkpoint_chunks\(checkpoint\(policy=...\)\(function\), x"
    ):
        checkpoint_chunks(function, leaf(3), policy=policy)
