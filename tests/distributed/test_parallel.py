"""Regions in models split by tensor and sequence parallelism, alone and under FSDP2."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("torch.distributed.tensor.parallel")

from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from ckpt_hooks import checkpoint, create_selective_checkpoint_contexts, policies
from tests.distributed.training import FEW, FORMS, WIDTH, Model, assert_equal, block_of_code, local

LENGTH = 4

PLANS = {
    "tensor": lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": lambda: {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
    "distributed tensors": lambda: {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    },
}


class Part(nn.Module):
    """A block of which a plan splits the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input and more."""
        y = self.dropout(self.down(self.dropout(nn.functional.gelu(self.up(self.norm(self.dropout(x)))))))
        return x + (y.to_local() if isinstance(y, DTensor) else y)


#: Forms of regions besides those for all models.
SELECTIVE = {
    "a policy around two": lambda function: block_of_code(policy=policies.dots_saveable)(FORMS["with"](function)),
    "nothing kept": block_of_code(policy=policies.nothing_saveable),
    "all kept": block_of_code(policy=policies.everything_saveable),
    "contexts": checkpoint(context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])),
}


def steps(plan: str, form: str, is_sharded: bool, data: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Model({**FORMS, **SELECTIVE}[form])
    model.blocks = nn.ModuleList(Part() for _ in range(3))
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("data", "parts"))
    for block in model.blocks:
        parallelize_module(block, mesh["parts"], PLANS[plan]())
        if is_sharded:
            fully_shard(block, mesh=mesh["data"])
    if is_sharded:
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = []
    for step in range(2):
        torch.manual_seed(10 * step + mesh.get_local_rank("data"))
        x = torch.randn(2, LENGTH, WIDTH)
        torch.manual_seed(10 * step + torch.distributed.get_rank())  # the masks of a process are its own
        loss = model(x).pow(2).mean()
        loss.backward()
        found += [loss, *(parameter.grad for parameter in model.parameters()), torch.rand(1)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [local(tensor) for tensor in (*found, *model.parameters())]


def as_plain(plan: str, forms: Iterable[str], is_sharded: bool = False, data: int = 1) -> None:
    expected = steps(plan, "plain", is_sharded, data)
    for form in forms:
        assert_equal(steps(plan, form, is_sharded, data), expected, form)


@pytest.mark.parametrize("plan", list(PLANS))
def test_regions_in_split_models(ranks, plan):
    ranks.run(as_plain, plan, FEW if plan == "sequence" else (*FORMS, *SELECTIVE))


@pytest.mark.parametrize("plan", ["sequence", "distributed tensors"])
def test_regions_over_units_of_one_process_each(ranks, plan):
    ranks.run(as_plain, plan, (*FEW, *SELECTIVE), True)


def test_regions_over_units_of_split_parameters(four_ranks):
    """The gathered parameter is a distributed tensor of another mesh."""
    for plan in ("tensor", "distributed tensors"):
        four_ranks.run(as_plain, plan, FEW, True, 2)


def halves(x: DTensor) -> DTensor:
    """Moves a tensor to all processes and back."""
    whole = x.redistribute(placements=[Replicate()])
    return (whole.sin() * whole).redistribute(placements=[Shard(1)]).cos()


def by_half_precision(x: DTensor) -> DTensor:
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.dropout(x @ x.t(), 0.4).float()


#: Functions of a distributed tensor, and of one which the process has to itself.
OPERATORS = {
    "dropout": lambda x, own: nn.functional.dropout(nn.functional.dropout(x.sin(), 0.4).cos(), 0.4),
    "dropout in place": lambda x, own: nn.functional.dropout(x.sin(), 0.4, inplace=True).cos(),
    "masks": lambda x, own: x.sin() * torch.empty_like(x).bernoulli_(0.6).div_(0.6),
    "numbers": lambda x, own: x.sin() * torch.empty_like(x).normal_().add_(1).sin_(),
    "between draws of the process": lambda x, own: between(x, own),
    "autocast": lambda x, own: by_half_precision(nn.functional.dropout(x.sin(), 0.4)),
    "collectives": lambda x, own: halves(nn.functional.dropout(x.sin(), 0.4)).exp(),
    "made around memory of the tape": lambda x, own: wrapped(own, x.device_mesh) * x.sin(),
}


def between(x: DTensor, own: torch.Tensor) -> DTensor:
    """Draws for a part of a tensor, whose shape does not tell how many numbers that takes."""
    own = nn.functional.dropout(own.sin(), 0.4).exp()
    x = x.sin() * torch.rand_like(x)
    own = nn.functional.dropout(own, 0.4).exp()
    return x * wrapped(own, x.device_mesh)


def wrapped(own: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    h = own * 2
    y = DTensor.from_local(h, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 4)), stride=(4, 1)).cos()
    return y * y.sin()


def operators(forms: Iterable[str]) -> None:
    """Compares outputs, gradients of two backwards, and the next numbers, of a tensor of which one process has more."""
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    for name, function in OPERATORS.items():
        found = {}
        for form in ("plain", *forms):
            torch.manual_seed(1 + rank)
            x = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)]).requires_grad_()
            own = torch.randn(3 - rank, 4, requires_grad=True)
            y = {**FORMS, **SELECTIVE}[form](function)(x, own)
            for retain in (True, False):
                y.to_local().sum().backward(retain_graph=retain)
            gradients = [one.grad for one in (x, own) if one.grad is not None]
            assert type(y) is type(x.grad) is DTensor
            found[form] = [local(one) for one in (y, *gradients, torch.get_rng_state())]
            assert_equal(found[form], found["plain"], f"{name}, {form}")


def test_operators_on_distributed_tensors(ranks):
    ranks.run(operators, (*FORMS, *SELECTIVE))


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
