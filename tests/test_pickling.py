"""What a trainer carries in its own state, through ``pickle`` and ``copy.deepcopy``: works, or is one clear error."""

from __future__ import annotations

import copy
import math
import pickle
import random

import pytest
import torch

from ckpt_hooks import (
    CheckpointPolicy,
    apply_checkpointing,
    checkpoint,
    checkpoint_module,
    checkpoint_name,
    checkpoint_region,
    create_selective_checkpoint_contexts,
    every,
    memory_ledger,
    patch_torch,
    plan_memory,
    policies,
    saved_residuals,
    trace,
    track_rng,
)
from ckpt_hooks.offload import offload_saved_tensors
from ckpt_hooks.planner import Plan
from tests.measure import CountOps, Log

in_both_ways = pytest.mark.parametrize(
    "carried", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
mm = torch.ops.aten.mm.default


class Block(torch.nn.Module):
    """A layer whose forward has a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).tanh()


def model():
    return torch.nn.Sequential(*[Block() for _ in range(4)])


def step(found):
    found(torch.linspace(0, 1, 32).view(4, 8)).sum().backward()


def square(x):
    return (x @ x.mT).sin().exp()


def keeps_mm(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is mm else CheckpointPolicy.PREFER_RECOMPUTE


def run_again(function, shape=(2, 4, 8)):
    """Returns how often backward runs each operator of a region again."""
    y = function(torch.linspace(-1, 1, math.prod(shape)).view(shape).requires_grad_())
    gradient = torch.ones_like(y)
    with CountOps() as ops:
        y.backward(gradient)
    return ops.counts


def in_block(region):
    def call(x):
        with region:
            return Block()(x)

    return call


def draws_again(source):
    """Returns what a rerun draws, and forward has drawn."""
    drawn = Log()

    def scaled(x):
        drawn.append(random.random())
        return (x * drawn[-1]).sin()

    with source:
        checkpoint(scaled, torch.ones(3, requires_grad=True)).sum().backward()
    first, again = drawn
    return again == first


#: What is carried, and what is to be the same of it.
MADE = {
    "region": (lambda: checkpoint_region(policy=policies.dots_saveable), lambda one: run_again(in_block(one))),
    "function": (lambda: checkpoint(policy=keeps_mm)(square), run_again),
    "module": (lambda: checkpoint_module(Block(), policy=policies.dots_saveable), run_again),
    "contexts": (
        lambda: create_selective_checkpoint_contexts(keeps_mm),
        lambda one: run_again(checkpoint(context_fn=lambda: one)(square)),
    ),
    "every": (lambda: every(2, Block), lambda one: list(apply_checkpointing(model(), one))),
    "random source": (lambda: track_rng("python"), draws_again),
    "residuals": (lambda: saved_residuals(square, torch.ones(3, 3, requires_grad=True)), lambda one: one.to_json()),
    "ledger": (lambda: memory_ledger(lambda: step(model())), lambda one: one.to_json()),
}


@in_both_ways
@pytest.mark.parametrize(("make", "use"), MADE.values(), ids=MADE)
def test_carried(make, use, carried):
    before = make()
    copied = carried(before)
    assert type(copied) is type(before)
    assert use(copied) == use(before)


class Several(torch.nn.Module):
    """Has for each policy something to keep, and something to run again."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        x = self.norm(checkpoint_name(self.linear(x).tanh(), "hidden"))
        x = checkpoint_name(self.linear(x).sigmoid(), "last")
        x = torch.softmax(x @ x.mT, -1) @ x
        return (x.topk(3)[0].sin() * (x > 0).sum()).exp()


addmm = torch.ops.aten.addmm.default
FACTORIES = {
    "offload_ops": lambda: policies.offload_ops(addmm),
    "save_and_offload_only_these_names": lambda: policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["hidden"], names_which_can_be_offloaded=["last"]
    ),
    "save_any_names_but_these": lambda: policies.save_any_names_but_these("last"),
    "save_every": lambda: policies.save_every(addmm, 2),
    "save_from_both_policies": lambda: policies.save_from_both_policies([addmm], policies.routing_saveable),
    "save_indices": lambda: policies.save_indices([("linear", addmm, 1)]),
    "save_modules": lambda: policies.save_modules("norm"),
    "save_only_these_names": lambda: policies.save_only_these_names("hidden"),
    "save_ops": lambda: policies.save_ops(addmm),
}


@in_both_ways
@pytest.mark.parametrize("name", [name for name in policies.__all__ if name.islower()])
def test_a_policy_keeps_what_it_kept(name, carried):
    policy = FACTORIES[name]() if name in FACTORIES else getattr(policies, name)
    copied = carried(policy)
    nothing, expected, found = (
        run_again(checkpoint(policy=one)(Several())) for one in (policies.nothing_saveable, policy, copied)
    )
    assert found == expected
    assert (found == nothing) is (policy is policies.nothing_saveable)
    assert repr(copied) == repr(policy)


def test_plans():
    """A pickled plan, and its copy, keep what the plan keeps; a copy has the profile, too."""
    found = model()
    plan = plan_memory(found, step, 0.5, blocks=Block)
    read, copied = pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)
    assert read == plan == copied
    assert read == Plan.from_json(plan.to_json())
    assert copied.others is not plan.others
    assert copied.replan(0.25) == plan.replan(0.25)
    with pytest.raises(ValueError, match=r"Pass a model: `plan.apply\(model\)`"):
        read.apply()
    step(found)
    expected = [parameter.grad for parameter in found.parameters()]
    for one, other in ((read, model()), (copied, found)):
        other.load_state_dict(found.state_dict())
        other.zero_grad()
        with one.apply(None if other is found else other) as applied:
            assert len(applied) == 4
            step(other)
        assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(other.parameters(), expected, strict=True))
    front = pickle.loads(pickle.dumps(plan.pareto()))
    assert front == plan.pareto()


def test_handles():
    """Handles belong to the process: a copy is the handle itself, a pickle an error with the way out."""
    with apply_checkpointing(model(), Block) as applied, patch_torch() as patch, trace() as found:
        for handle in (applied, patch, found, offload_saved_tensors()):
            assert copy.deepcopy(handle) is copy.copy(handle) is handle
            with pytest.raises(
                TypeError, match=rf"^{type(handle).__name__} refers to live objects of this process.*`to_json\(\)`"
            ):
                pickle.dumps({"handle": handle})
