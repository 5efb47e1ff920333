"""Regions in models split by tensor and sequence parallelism, alone and under FSDP2."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
import torch
from torch import nn

pytest.importorskip("torch.distributed.tensor.parallel")

from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from ckpt_hooks import checkpoint
from tests.distributed.training import FEW, FORMS, WIDTH, Model, assert_equal, local

LENGTH = 4

PLANS = {
    "tensor": lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": lambda: {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
}


class Part(nn.Module):
    """A block of which a plan splits the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input and more."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def steps(plan: str, form: str, is_sharded: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Model(FORMS[form])
    model.blocks = nn.ModuleList(Part() for _ in range(3))
    mesh = init_device_mesh("cpu", (2, 2) if is_sharded else (1, 2), mesh_dim_names=("data", "parts"))
    for block in model.blocks:
        parallelize_module(block, mesh["parts"], PLANS[plan]())
        if is_sharded:
            fully_shard(block, mesh=mesh["data"])
    if is_sharded:
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(mesh.get_local_rank("data"))
    found = []
    for _ in range(2):
        loss = model(torch.randn(2, LENGTH, WIDTH)).pow(2).mean()
        loss.backward()
        found += [loss, *(parameter.grad for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [local(tensor) for tensor in (*found, *model.parameters())]


def as_plain(plan: str, forms: Iterable[str], is_sharded: bool = False) -> None:
    expected = steps(plan, "plain", is_sharded)
    for form in forms:
        assert_equal(steps(plan, form, is_sharded), expected, form)


@pytest.mark.parametrize("plan", list(PLANS))
def test_regions_in_split_models(ranks, plan):
    ranks.run(as_plain, plan, tuple(FORMS) if plan == "tensor" else FEW)


def test_regions_over_units_of_split_parameters(four_ranks):
    """The gathered parameter is a distributed tensor of another mesh."""
    four_ranks.run(as_plain, "tensor", FEW, True)


def slow_collectives(check: str) -> None:
    """Trains a split model whose collectives take a while, with values compared."""
    rank, mesh = torch.distributed.get_rank(), init_device_mesh("cpu", (2,))
    block = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    block = parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False)})
    x, calls = torch.randn(500, 64), [0]

    def gathered(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        # When autograd saves the parts, one process has not got them in every other call; both have in the others.
        time.sleep(0.1 * rank if calls[0] % 2 else 0)
        parts = all_gather_tensor_autograd(x * (rank + 1), 0, mesh.get_group())
        time.sleep(0 if calls[0] % 2 else 0.1)
        return parts.sin()

    found = []
    compared = checkpoint(determinism_check=check)
    for region in (lambda f: f, compared, lambda f: compared(lambda x: compared(f)(x) * 1)):
        y = x.clone().requires_grad_()
        for calls[0] in (0, 1):
            region(lambda y: gathered(block(y).to_local().exp()))(y).sum().backward()
        found.append([y.grad, *(p.grad.to_local().clone() for p in block.parameters())])
        block.zero_grad()
        assert_equal(found[-1], found[0], check)


@pytest.mark.parametrize("check", ["values", torch.sum], ids=["values", "sums"])
def test_values_of_collectives_that_take_a_while(ranks, check):
    """No process sees memory that the others have not filled yet, which would end one of them and leave the other waiting."""
    ranks.run(slow_collectives, check)
