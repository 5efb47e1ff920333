"""Wrong calls of the public functions: each says what came and what to write instead, and right calls like them work."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref

import pytest
import torch
from torch import nn

from ckpt_hooks import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_name,
    checkpoint_region,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    policies,
    set_checkpoint_early_stop,
)
from ckpt_hooks.offload import offload_saved_tensors
from tests.measure import leaf

MM = torch.ops.aten.mm.default


def block(x, *, scale=2):
    return (x * scale).sin()


def refused(kind, match, call):
    """Calls something that is refused; returns what was said."""
    with pytest.raises(kind, match=match) as caught:
        call()
    assert type(caught.value) is kind
    assert caught.value.__cause__ is None
    return str(caught.value)


grads = pytest.mark.parametrize("grad", [True, False])

# Functions


@grads
def test_a_decorator_without_parentheses(grad):
    with torch.set_grad_enabled(grad):
        with pytest.raises(TypeError, match=r"takes \(self, x, scale=2\).*`@checkpoint\(\)`"):

            class Block:
                @checkpoint
                def forward(self, x, scale=2):
                    return x

        refused(
            TypeError,
            r"no arguments.*'Linear', which takes \(input.*`checkpoint\(Linear, \*args\)`",
            lambda: checkpoint(nn.Linear(2, 2)),
        )
        refused(TypeError, "no arguments", lambda: checkpoint(functools.partial(block, scale=2)))
        refused(TypeError, "no arguments", lambda: checkpoint(block, early_stop=False))


def test_a_function_without_parameters_is_called():
    x = leaf(3)
    checkpoint(lambda: x.sin()).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert checkpoint(lambda x=x, **others: x) is x
    assert checkpoint(dict) == {}


def test_errors_of_the_function_itself_are_its_own():
    def fails():
        raise TypeError("mine")

    def calls_wrongly():
        return block()

    refused(TypeError, "^mine$", lambda: checkpoint(fails))
    refused(TypeError, "missing 1 required positional argument", lambda: checkpoint(calls_wrongly))
    refused(TypeError, "missing 1 required positional argument", lambda: checkpoint(block, scale=3))
    with pytest.raises(AttributeError, match="no attribute 'sine'"):
        checkpoint(lambda x: x.sine(), leaf(3))


@grads
def test_a_tensor_for_a_function(grad):
    x = leaf(3)
    with torch.set_grad_enabled(grad):
        refused(TypeError, r"a tensor, float64\[3\] on cpu.*`checkpoint\(block, x\)`, and not", lambda: checkpoint(block(x)))
        refused(TypeError, r"takes a function first, but got a tensor.*`checkpoint\(block, x\)`", lambda: checkpoint(x, block))
        refused(TypeError, "got 3 of type int", lambda: checkpoint(3, x))
        refused(TypeError, r"`checkpoint\(\.\.\.\)\(block\)\(x\)`, and not", lambda: checkpoint(early_stop=False)(block(x)))
        refused(TypeError, r"`checkpoint_region\(\)\(block\)\(x\)`, and not", lambda: checkpoint_region()(block(x)))


@pytest.mark.usefixtures("no_gc")
def test_what_was_refused_is_let_go():
    x = torch.rand(3)
    reference = weakref.ref(x)
    message = ""
    try:
        checkpoint(x, block)
    except TypeError as error:
        message = str(error)
    del x
    assert "takes a function first" in message
    assert reference() is None


def test_none_for_a_function():
    refused(TypeError, r"`checkpoint\(function, \*args\)`", lambda: checkpoint(None, leaf(3)))


@pytest.mark.parametrize("form", [checkpoint, checkpoint_region])
def test_the_curried_form_with_the_arguments(form):
    x = leaf(3)
    curried = form(policy=policies.dots_saveable)
    refused(TypeError, r"takes the function alone.*\(block\)\(\*args\)`", lambda: curried(block, x))
    refused(TypeError, "got 2 more, the first a tensor", lambda: curried(block, x, scale=3))
    refused(TypeError, "got 1 more, the first 3 of type int", lambda: curried(block, scale=3))
    assert torch.equal(curried(block)(x, scale=3), block(x, scale=3))


# Policies


@pytest.mark.parametrize(
    "use",
    [
        lambda policy: checkpoint(policy=policy),
        lambda policy: checkpoint_region(policy=policy),
        create_selective_checkpoint_contexts,
        lambda policy: policies.save_from_both_policies(policies.dots_saveable, policy),
        lambda policy: offload_saved_tensors() and policies.save_from_both_policies(policy, [MM]),
    ],
)
def test_policies_that_are_none(use):
    refused(TypeError, r"the operator aten\.mm\.default\. Write a list: \w+=\[torch\.ops\.aten\.mm\.default\]", lambda: use(MM))
    refused(TypeError, r"several operators\. Write a list.*\[torch\.ops\.aten\.mm\.\w+\]", lambda: use(torch.ops.aten.mm))
    higher = torch.ops.higher_order.cond
    refused(TypeError, r"\[torch\.ops\.higher_order\.cond\]", lambda: use(higher))
    refused(TypeError, r"got save_ops, which makes policies\. Call it: \w+=save_ops\(\.\.\.\)", lambda: use(policies.save_ops))
    refused(TypeError, r"policies\.dots_saveable, say", lambda: use("dots_saveable"))
    refused(TypeError, r"of type CheckpointPolicy\. Write", lambda: use(CheckpointPolicy.MUST_SAVE))


def test_every_factory_of_policies_is_noticed():
    """Whatever of the module's public names is a function makes policies."""
    factories = [value for name in policies.__all__ if type(value := getattr(policies, name)) is type(block)]
    assert len(factories) >= 7
    for factory in factories:
        refused(TypeError, f"got {factory.__name__}, which makes policies", lambda: checkpoint(policy=factory))


def test_policies_that_are_some():
    for policy in ([MM], {MM}, policies.dots_saveable, lambda *args: CheckpointPolicy.MUST_SAVE, functools.partial(block)):
        checkpoint(policy=policy)
        checkpoint_region(policy=policy)


# Regions as blocks


def test_a_block_without_parentheses():
    with pytest.raises(TypeError, match=r"`with checkpoint_region\(\):`, with parentheses"), checkpoint_region:
        pass
    with pytest.raises(TypeError, match="with parentheses"), contextlib.ExitStack() as stack:
        stack.enter_context(checkpoint_region)


def test_a_region_with_something_by_position():
    match = r"`with checkpoint_region\(\):` around its call, or `checkpoint_region\(\)\(block\)\(\*args\)`"
    refused(TypeError, rf"{match}.*`@checkpoint_region\(\)`", lambda: checkpoint_region(block))
    refused(TypeError, "got a module, Linear", lambda: checkpoint_region(nn.Linear(2, 2)))
    refused(TypeError, "around the lines that compute it", lambda: checkpoint_region(leaf(3)))
    refused(TypeError, r"`checkpoint_region\(policy=\.\.\.\)`", lambda: checkpoint_region([MM]))
    refused(TypeError, r"`checkpoint_region\(policy=\.\.\.\)`", lambda: checkpoint_region(policies.dots_saveable))
    refused(TypeError, r"`checkpoint_region\(name='block'\)`", lambda: checkpoint_region("block"))


# Sequences


def test_arguments_of_checkpoint_sequential_in_another_order():
    x, layers = leaf(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    match = r"for segments. Write `checkpoint_sequential\(functions, 2, x\)`"
    refused(TypeError, match, lambda: checkpoint_sequential(layers, x, 2))
    refused(TypeError, match, lambda: checkpoint_sequential(list(layers), (x, x), 2))
    for segments in (0, 3, True, "2", 2.0, None):
        refused(ValueError, "between 1 and the number of functions", lambda: checkpoint_sequential(layers, segments, x))
    refused(TypeError, r"got a module, Linear\..*`checkpoint\(function, x\)`", lambda: checkpoint_sequential(layers[0], 1, x))


# Options


@pytest.mark.parametrize("value", [None, 3, (noop_context_fn(),)], ids=["None", "a number", "a tuple"])
def test_a_context_fn_that_is_no_function(value):
    match = "context_fn should be a function.*noop_context_fn"
    refused(TypeError, match, lambda: checkpoint(context_fn=value))
    with pytest.raises(TypeError, match=match):
        checkpoint(block, leaf(3), context_fn=value)


def test_a_context_fn_that_fails():
    def fails():
        raise TypeError("mine")

    refused(TypeError, "^mine$", lambda: checkpoint(block, leaf(3), context_fn=fails))


@pytest.mark.parametrize("value", ["no", "False", 2, [1], torch.ones(1)], ids=str)
def test_use_reentrant_that_is_none(value):
    refused(
        TypeError, "use_reentrant should be None or False, but got", lambda: checkpoint(block, leaf(3), use_reentrant=value)
    )


def test_use_reentrant_that_is_yes():
    for value in (True, 1):
        refused(ValueError, "this engine is non-reentrant", lambda: checkpoint(block, leaf(3), use_reentrant=value))
    assert checkpoint(block, leaf(3), use_reentrant=False).shape == (3,)


def early_stop_in_a_block(value, x):
    with set_checkpoint_early_stop(value):
        return checkpoint(block, x)


FLAGS = {
    "early_stop": lambda value, x: checkpoint(block, x, early_stop=value),
    "preserve_rng_state": lambda value, x: checkpoint(block, x, preserve_rng_state=value),
    "respect_saved_tensors_hooks": lambda value, x: checkpoint(block, x, respect_saved_tensors_hooks=value),
    "debug": lambda value, x: checkpoint(block, x, debug=value),
    "preserve_buffers": lambda value, x: checkpoint(preserve_buffers=value)(block)(x),
    "early_stop of the curried form": lambda value, x: checkpoint(early_stop=value)(block)(x),
    "respect_saved_tensors_hooks of a region": lambda value, x: checkpoint_region(respect_saved_tensors_hooks=value)(block)(x),
    "enable": early_stop_in_a_block,
    "preserve_rng_state of a sequence": lambda value, x: checkpoint_sequential([block] * 2, 2, x, preserve_rng_state=value),
}


@pytest.mark.parametrize("value", ["yes", "no", 2, [True]], ids=str)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_neither_yes_nor_no(name, value):
    match = rf"^{name.split()[0]} should be True or False.* but got .* Pass {name.split()[0]}=False"
    refused(TypeError, match, lambda: FLAGS[name](value, leaf(3)))


@pytest.mark.parametrize("value", [True, False, 1, 0], ids=str)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_yes_or_no(name, value):
    x = leaf(3)
    FLAGS[name](value, x).sum().backward()
    assert x.grad is not None


def test_a_flag_of_numpy():
    numpy = pytest.importorskip("numpy")
    x = leaf(3)
    checkpoint(block, x, early_stop=numpy.bool_(True), preserve_rng_state=numpy.bool_(False)).sum().backward()
    assert x.grad is not None


# Names


def heard(policy, *names):
    """Runs a region in which tensors get some names; returns the warnings that it gave."""
    x = leaf(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with checkpoint_region(policy=policy):
            for name in names:
                x = checkpoint_name(x.sin(), name)
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


def saves(*names):
    return policies.save_only_these_names(*names)


SLIPS = [("hiden", "hidden"), ("hidden", "hiden"), ("hdiden", "hidden"), ("Hidden", "hidden"), ("mlp.out", "mlp_out")]


@pytest.mark.parametrize(("wrong", "right"), SLIPS)
def test_a_slip_in_a_name(wrong, right):
    """It is told once a policy, of whatever kind, also where other names of the policy came."""
    for policy in (
        saves(wrong),
        policies.save_any_names_but_these(wrong),
        policies.save_and_offload_only_these_names(names_which_can_be_saved=[], names_which_can_be_offloaded=[wrong]),
        policies.save_from_both_policies(policies.dots_saveable, saves(wrong)),
    ):
        (message,) = heard(policy, right)
        assert f"no tensor of its region has: {wrong!r}. Is {right!r} meant?" in message
        assert heard(policy, right) == []
    policy = saves(wrong, "other")
    (message,) = heard(policy, "other", right)
    assert "'other'. Is" not in message
    assert f"{wrong!r}. Is {right!r} meant? Names in the region: " in message


def test_a_slip_in_a_later_region():
    policy = saves("hiden", "first")
    assert heard(policy, "first") == []
    (message,) = heard(policy, "hidden")
    assert "'hiden'. Is 'hidden' meant?" in message


def test_names_of_which_none_came():
    policy = saves("hidden", "other")
    (message,) = heard(policy, "attention")
    assert "'hidden', 'other'. Names in the region: 'attention'." in message
    assert heard(policy, "attention") == []
    (message,) = heard(saves("hidden"))
    assert "Names in the region: none." in message


@pytest.mark.parametrize("given", ["q_proj", "layer_1", "h1", "hide", "in"])
def test_names_that_are_others(given):
    """What is alike is not a slip: another letter, another number, a shorter word."""
    assert heard(saves("k_proj", "layer_2", "layer_11", "h2", "hidden", "out", "x"), "x", given) == []


def test_names_that_all_came():
    policy = saves("a", "b")
    assert heard(policy, "a", "aa") == []
    assert heard(policy, "b", "bb", "c") == []
    assert policy.expected_names == frozenset()


def test_a_region_that_fails_says_nothing_of_names():
    policy = saves("hiden")
    with contextlib.suppress(ZeroDivisionError), checkpoint_region(policy=policy):
        checkpoint_name(leaf(3).sin(), "hidden")
        raise ZeroDivisionError
    (message,) = heard(policy, "hidden")
    assert "Is 'hidden' meant?" in message
