"""Plans of models whose parameters FSDP2 shards: within the budget on each rank, as predicted, and bitwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_hooks import apply_checkpointing, memory_ledger, plan_memory

pytest.importorskip("torch.distributed.fsdp")

from torch.distributed.fsdp import fully_shard

from tests.distributed.conftest import started
from tests.distributed.sharding import mesh_of
from tests.planner.models import GPT, as_before

WIDTH, UNITS = 64, 8


@pytest.fixture(scope="module")
def one_rank():
    """A process group of one process."""
    yield from started(1)


class OnBuffers:
    """FSDP2's collectives on tensors that are made once for each size."""

    # Those of gloo make tensors on a thread of its own, and let go of them, and of what they were given, some time later.

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any = None, async_op: bool = False) -> None:
        gathers = op is None
        whole, part = (output_tensor, input_tensor) if gathers else (input_tensor, output_tensor)
        if whole.numel() not in self._buffers:
            self._buffers[whole.numel()] = torch.empty_like(whole)
        buffer = self._buffers[whole.numel()]
        own = buffer.view(group.size(), -1)[group.rank()]
        if gathers:
            buffer.zero_()
            own.copy_(part)
        else:
            buffer.copy_(whole)
        torch.distributed.all_reduce(buffer, op or torch.distributed.ReduceOp.SUM, group)
        output_tensor.copy_(buffer if gathers else own)


def sharded(model: nn.Module, blocks: Iterable[nn.Module], **options: Any) -> nn.Module:
    """Makes each block a unit, and the rest of a model one."""
    on_buffers = OnBuffers()
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh_of(), **options)
        block.set_custom_all_gather(on_buffers)
        block.set_custom_reduce_scatter(on_buffers)
    return model


def of_units(options: dict[str, Any]) -> nn.Module:
    """Returns eight blocks, each a unit."""
    model = nn.Sequential()
    for _ in range(UNITS):
        model.append(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)))
    prefetches = options.pop("prefetches", False)
    blocks = list(model)
    sharded(model, blocks, **options)
    if prefetches:
        for before, block, after in zip(model, model[1:], model[2:], strict=False):
            before.set_modules_to_forward_prefetch([block, after])
            after.set_modules_to_backward_prefetch([block, before])
    return model


def planned(options: dict[str, Any], parts: tuple[float, ...]) -> tuple[int, list[Any]]:
    """Returns the peak of a region for each unit, and plans, each with whether gradients are those without."""
    model = of_units(dict(options))
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))

    def step(model: nn.Module) -> None:
        model(x).square().mean().backward()

    def gradients() -> list[torch.Tensor]:
        with as_before(model):
            step(model)
            return [one.grad.to_local().clone() for one in model.parameters()]

    plain, blocks, plans = gradients(), ["*"], []
    with as_before(model), apply_checkpointing(model, blocks, recorded=True):
        by_hand = memory_ledger(lambda: step(model)).peak.nbytes
    for part in parts:
        # Each rank is content with the first plan that fits: both run as many steps.
        plan = plan_memory(model, step, int(by_hand * part), blocks=blocks, tolerance=1.0)
        with plan.apply():
            is_same = all(map(torch.equal, gradients(), plain))
        plans.append((dataclasses.replace(plan, _search=None, _model=None), is_same))
    return by_hand, plans


def check(results: list[tuple[int, list[Any]]], within: float) -> None:
    for by_hand, plans in results:
        for plan, is_same in plans:
            assert is_same
            assert plan.measured_peak <= plan.budget
            assert plan.predicted_peak == pytest.approx(plan.measured_peak, rel=within)
            assert plan.least_peak == pytest.approx(by_hand, rel=within)


@pytest.mark.parametrize("options", [{}, {"prefetches": True}], ids=str)
def test_units_of_one_rank(one_rank, options):
    check(one_rank.run(planned, options, (1.05, 1.4)), 5e-3)


@pytest.mark.parametrize("part", [1.05, 1.4, 1.6])
def test_units_of_two_ranks(ranks, part):
    check(ranks.run(planned, {}, (part,)), 5e-3)


def trained(kind: str, lengths: list[list[int]], on: bool) -> Any:
    """Returns losses and parameters of a loop, and of one with a budget the peaks, the budget and what blocks keep."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    model: nn.Module = GPT(4)
    applied = apply_checkpointing(model, memory_budget=4_500_000 if kind == "ddp" else 0.5) if on else None
    if kind == "ddp":
        outer: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        outer = sharded(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(rank)
    losses = []
    for of_ranks in lengths:
        loss = outer(torch.randint(0, 50, (4, of_ranks[rank])))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    left = [getattr(one, "_local_tensor", one).detach().clone() for one in model.parameters()]
    if applied is None or applied.plan is None:
        return losses + left, None
    plans = [applied.plan, *applied.plan.others]
    return losses + left, (applied.peaks, applied.budget, [[block.kept for block in plan.blocks] for plan in plans])


def check_loops(ranks: Any, kind: str, lengths: list[list[int]]) -> None:
    plain, planned = ranks.run(trained, kind, lengths, False), ranks.run(trained, kind, lengths, True)
    for (without, _), (under, _) in zip(plain, planned, strict=True):
        assert all(map(torch.equal, without, under))
    (peaks, budget, kept), *others = [of_plan for _, of_plan in planned]
    assert all(of_plan == (peaks, budget, kept) for of_plan in others)
    assert len(peaks) == 2
    assert max(peaks) <= budget * 1.005  # collectives of gloo free memory on a thread of theirs


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_budget_as_an_option_of_two_ranks(ranks, kind):
    """Ranks with unequal data have one plan, and the losses of the loop without."""
    check_loops(ranks, kind, [[48, 64]] * 4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_budget_as_an_option_of_four_ranks(four_ranks, kind):
    check_loops(four_ranks, kind, [[48, 64, 32, 56]] * 4)


def test_larger_shapes_of_one_rank_are_a_step_of_all(ranks):
    lengths = [[32, 32]] * 3 + [[32, 64]] * 6
    plain, found = ranks.run(trained, "ddp", lengths, False), ranks.run(trained, "ddp", lengths, True)
    for (without, _), (under, _) in zip(plain, found, strict=True):
        assert all(map(torch.equal, without, under))
    (_, one), (_, other) = found
    assert one == other
    assert len(one[2]) == 2
