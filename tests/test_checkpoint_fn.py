"""Frameworks that take a checkpoint function of the user's: handed ``ckpt_hooks.checkpoint``, they run on this engine."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint, create_selective_checkpoint_contexts, trace
from tests.fake_transformers import Model, StackModel
from tests.measure import CountOps

pytest.importorskip("torch.distributed")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

KEEPS = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


def gradients(model, x):
    """Returns the gradients of a step, the regions, and the number of matrix products of layers that backward runs."""
    torch.manual_seed(1)
    model.zero_grad()
    with trace() as found:
        loss = model(x).sum()
        with CountOps() as again:
            loss.backward()
    regions = found.steps[0].regions if found.steps else ()
    return [parameter.grad for parameter in model.parameters()], len(regions), again.counts["addmm"]


# As in torchtitan's apply_ac: https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/activation_checkpoint.py
@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({"preserve_rng_state": True, "determinism_check": "default", "early_stop": True, "debug": False}, 4),
        ({"preserve_rng_state": True, "context_fn": KEEPS}, 0),
    ],
    ids=["full", "per operator"],
)
def test_wrapper_of_modules(options, again):
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])
    x = torch.linspace(-1, 1, 32).view(4, 8)
    expected, *_ = gradients(blocks, x)
    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block, checkpoint_fn=checkpoint, **options)
    found, *counts = gradients(blocks, x)
    assert counts == [2, again]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", [Model, StackModel])
def test_the_switch_of_transformers_models(kind):
    model, ids = kind(), torch.tensor([[1, 2, 3], [3, 4, 5]])
    expected, *_ = gradients(model, ids)
    model._set_gradient_checkpointing(True, checkpoint)
    found, regions, _ = gradients(model, ids)
    assert regions == 5
    assert all(map(torch.equal, found, expected))
