"""What a trainer carries in its own state, through ``pickle`` and ``copy.deepcopy``: works, or is one clear error."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch

from ckpt_hooks import (
    CheckpointPolicy,
    apply_checkpointing,
    checkpoint,
    checkpoint_module,
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
    return x * x


def keeps_mm(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is mm else CheckpointPolicy.PREFER_RECOMPUTE


MADE = {
    "region": lambda: checkpoint_region(policy=policies.dots_saveable),
    "function": lambda: checkpoint(policy=keeps_mm)(square),
    "module": lambda: checkpoint_module(Block(), policy=policies.dots_saveable),
    "contexts": lambda: create_selective_checkpoint_contexts(keeps_mm),
    "every": lambda: every(2),
    "random source": lambda: track_rng("python"),
    "function as policy": lambda: keeps_mm,
    "save_ops": lambda: policies.save_ops(mm),
    "save_every": lambda: policies.save_every(mm, 2),
    "offload_ops": lambda: policies.offload_ops(mm),
    "save_modules": lambda: policies.save_modules("linear"),
    "names": lambda: policies.save_only_these_names("hidden"),
    "both": lambda: policies.save_from_both_policies(policies.dots_saveable, policies.routing_saveable),
    "residuals": lambda: saved_residuals(square, torch.ones(3, requires_grad=True)),
    "ledger": lambda: memory_ledger(lambda: step(model())),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("carried", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_carried(made, carried):
    before = made()
    with before if made is MADE["random source"] else contextlib.nullcontext():  # which is tracked until its block ends
        assert type(carried(before)) is type(before)


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
            with pytest.raises(TypeError, match=rf"^{type(handle).__name__} belongs to objects of this process.*`to_json\(\)`"):
                pickle.dumps({"handle": handle})
