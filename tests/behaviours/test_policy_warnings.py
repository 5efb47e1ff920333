"""Warnings about policies: each once, where the user can do something about it, with what to do."""

from __future__ import annotations

import contextlib
import functools
import warnings

import pytest
import torch

import ckpt_hooks
from ckpt_hooks import CheckpointPolicy, policies
from ckpt_hooks.policies import save_ops
from tests.measure import leaf

aten = torch.ops.aten


def as_function(policy, function, *args):
    return ckpt_hooks.checkpoint(policy=policy)(function)(*args)


def as_recorded(policy, function, *args):
    with ckpt_hooks.checkpoint_region(policy=policy):
        return function(*args)


def as_nested(policy, function, *args):
    return ckpt_hooks.checkpoint(lambda *args: as_function(policy, function, *args), *args)


KINDS = pytest.mark.parametrize("run", [as_function, as_recorded, as_nested])


@contextlib.contextmanager
def warned():
    """Collects the warnings of a block, each time that one is given."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught]
    assert [warning.filename for warning in caught] == [__file__] * len(caught)


# Lists of operators


@KINDS
def test_a_list_of_which_one_operator_runs(run):
    """Every model has mm, addmm and bmm in its list, and runs what it has."""
    with warned() as messages:
        for _ in range(5):
            policy = save_ops(aten.mm.default, aten.addmm.default, aten.bmm.default)
            run(policy, torch.mm, leaf(3, 3), leaf(3, 3)).sum().backward()
    assert messages == []


@KINDS
def test_a_list_whose_operators_run_in_a_later_region(run):
    """Not all regions under a policy are alike."""
    policy = save_ops(aten.mm.default, aten.bmm.default)
    with warned() as messages:
        for function in [torch.sin, torch.sin, lambda x: x @ x, torch.sin, torch.sin, torch.sin]:
            run(policy, function, leaf(3, 3)).sum().backward()
    assert messages == []


@KINDS
def test_policies_that_name_nothing_do_not_warn(run):
    """Ready-made ones name operators of every backend, and counting ones one operator."""
    with warned() as messages:
        for policy in (
            policies.dots_saveable,
            policies.save_compute_and_communication,
            policies.everything_saveable,
            policies.nothing_saveable,
            policies.save_every(aten.mm.default, 2),
        ):
            for _ in range(4):
                run(policy, lambda x: x.view(3).sin(), leaf(3)).sum().backward()
    assert messages == []


# Views


@pytest.mark.parametrize("make", [save_ops, policies.offload_ops])
def test_naming_a_view(make):
    """Said once, when the policy is made."""
    with warned() as messages:
        policy = make(aten.mm.default, aten.view.default, aten.t.default)
        for _ in range(4):
            as_function(policy, lambda x: (x.view(3, 3).t() @ x.view(3, 3)).sin(), leaf(9)).sum().backward()
    (message,) = messages
    assert message.startswith(f"{policy!r} names views, which take no memory and run again")
    assert "aten.t.default, aten.view.default. Name the operators that compute" in message


def saves_views(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def as_torch(policy, function, *args):
    contexts = functools.partial(ckpt_hooks.create_selective_checkpoint_contexts, policy)
    return ckpt_hooks.checkpoint(function, *args, context_fn=contexts)


@pytest.mark.parametrize("run", [as_function, as_torch])
def test_a_function_that_says_to_save_a_view(run):
    """The view runs again."""
    with warned() as messages:
        x = leaf(2, 3)
        run(saves_views, lambda x: x.view(3, 2).t().sin().exp(), x).sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert messages == []
