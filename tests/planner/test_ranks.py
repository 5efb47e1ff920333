"""Plans of several processes: one for all ranks, within the budget on each, and an error on all where one fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torch.distributed.fsdp")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt_hooks import memory_ledger, plan_memory
from ckpt_hooks.errors import CheckpointError
from ckpt_hooks.planner import Plan, profiling
from tests.distributed.conftest import started
from tests.planner.models import as_before

pytestmark = pytest.mark.distributed

FREE = 0.0, 0.0  # prices of regions, at which no block is called again

WIDTH, ROWS, BLOCKS = 16, 256, 3
#: Collectives of gloo let go of memory some time later, on threads of its own.
MARGIN = 0.1


@pytest.fixture(scope="module")
def two():
    """Two processes with a process group."""
    yield from started(2)


@pytest.fixture(scope="module")
def four():
    """Four processes with a process group."""
    yield from started(4)


class Block(nn.Module):
    """Multiplies twice."""

    def __init__(self, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), act(), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input and more."""
        return x + self.down(self.act(self.up(self.norm(x))))


def rank() -> int:
    return torch.distributed.get_rank()


def in_ddp(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def in_units(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_parts(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {"ddp": in_ddp, "fsdp": in_units, "tensor": in_parts}
BLOCKS_OF = {"ddp": ["module.*"], "fsdp": ["*"], "tensor": ["*"]}


def by_operations(prices: tuple[float, float]) -> None:
    """Has plans of this process not depend on times."""
    profiling.PRICES = prices
    plan_memory.__kwdefaults__["cost"] = "operations"


def made(kind: str) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """Returns a model and a step, in which ranks have batches of other sizes where the model's parts are not those of one."""
    by_operations(FREE)
    torch.manual_seed(0)
    model = WRAPPERS[kind](nn.Sequential(*(Block() for _ in range(BLOCKS))))
    own = 0 if kind == "tensor" else rank()
    x = torch.randn(ROWS + 64 * own, WIDTH, generator=torch.Generator().manual_seed(own))

    def step(model: nn.Module) -> None:
        model(x).square().mean().backward()

    step(model)  # in which gloo connects, and DDP makes its buckets anew
    step(model)
    model.zero_grad()
    return model, step


def gradients(model: nn.Module, step: Callable[[nn.Module], None]) -> list[torch.Tensor]:
    with as_before(model):
        step(model)
        return [getattr(one.grad, "_local_tensor", one.grad).clone() for one in model.parameters()]


def planned(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns what a rank finds of a plan for a part, and of one for bytes."""
    model, step = made(kind)
    runs = [0]

    def counted(model: nn.Module) -> None:
        runs[0] += 1
        step(model)

    plain = gradients(model, step)
    found: dict[str, Any] = {"plans": [], "peaks": []}
    options = {"margin": MARGIN, "blocks": BLOCKS_OF[kind], **options}
    # The threads of gloo let go of tensors late, of which parts of a model have more than the budget leaves between.
    plan = plan_memory(model, counted, 0.75 if kind == "tensor" else 0.5, **options)
    for one in (plan, plan_memory(model, counted, int(plan.budget * 1.2), **options)):
        with one.apply():
            assert all(map(torch.equal, gradients(model, step), plain))
            with as_before(model):
                found["peaks"].append((memory_ledger(lambda: step(model)).peak.nbytes, one.budget))
        found["plans"].append(one.to_json())
    return {**found, "steps": runs[0], "words": str(plan)}


def check(results: list[dict[str, Any]]) -> None:
    first = results[0]
    for result in results:
        assert (result["plans"], result["steps"], result["words"]) == (first["plans"], first["steps"], first["words"])
        for peak, budget in result["peaks"]:
            assert peak <= budget
    for plan in first["plans"]:
        assert plan["measured_peak"] <= plan["budget"] * (1 - MARGIN)
    assert 0 < first["plans"][0]["recomputed"] < 1


@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_two_ranks_have_one_plan(two, kind):
    check(two.run(planned, kind, {}))


@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_four_ranks_have_one_plan(four, kind):
    check(four.run(planned, kind, {}))


def test_seconds_are_those_of_the_slowest(two):
    check(two.run(planned, "ddp", {"cost": "seconds"}))


def test_blocks_that_are_found(two):
    check(two.run(planned, "ddp", {"blocks": None}))


def of_one(batch: int, act: type[nn.Module] = nn.GELU) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """Returns a model without collectives, and a step."""
    by_operations(FREE)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(act if at == 2 else nn.GELU) for at in range(BLOCKS))), torch.ones(batch, WIDTH)
    return model, lambda model: model(x).square().mean().backward()


def largest() -> tuple[Plan, Plan | None]:
    """Plans for unequal batches, and on the rank of the larger one again, alone."""
    alone = [torch.distributed.new_group([one]) for one in range(2)]
    model, step = of_one((ROWS, 2 * ROWS)[rank()])
    plan = plan_memory(model, step, 0.5, blocks="*")
    return plan, plan_memory(model, step, 0.5, blocks="*", group=alone[1]) if rank() == 1 else None


def test_peaks_are_the_largest(two):
    """A plan for two ranks is for the one that needs more memory, and knows the shapes of both."""
    (first, _), (second, alone) = two.run(largest)
    assert first == second
    assert first.plain_peak == alone.plain_peak
    assert (first.least_peak, first.measured_peak, first.budget) == (alone.least_peak, alone.measured_peak, alone.budget)
    assert first.predicted_peak == first.measured_peak
    assert [len(block.shapes) for block in first.blocks] == [2] * BLOCKS


def from_one_profile(batch: int) -> list[Any]:
    model, step = of_one(batch * (1 + rank()))
    plan = plan_memory(model, step, 0.5, blocks="*")
    added = plan.add(of_one(batch * (1 + rank()) + 32)[1])
    points = [(point.name, point.peak, point.recomputed) for front in [plan.pareto()] for point in (*front.plans, *front.torch)]
    return [plan.to_json(), added.to_json(), plan.replan(0.3).to_json(), plan.replan(0.2, step).to_json(), points]


def test_plans_of_one_profile(two):
    first, second = two.run(from_one_profile, ROWS)
    assert first == second
    assert first[2]["predicted_peak"] > first[3]["predicted_peak"]


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    """Returns the class and the words of the error of a function."""
    with pytest.raises((CheckpointError, ValueError)) as caught:
        function()
    return type(caught.value).__name__, str(caught.value)


def failing(number: int, *, is_waited_for: bool) -> tuple[str, str]:
    """Fails in a step of the second rank, before its collective or after it."""
    model, step = made("ddp")
    runs = [0]

    def fail(model: nn.Module) -> None:
        runs[0] += 1
        fails = rank() == 1 and runs[0] == number
        if not (fails and is_waited_for):
            step(model)
        if fails:
            raise ValueError("a bad batch")

    return error_of(lambda: plan_memory(model, fail, 0.5, blocks=["module.*"]))


STEPS = {"as it is": 1, "profiled": 2, "under the plan": 3}


@pytest.mark.parametrize("number", list(STEPS.values()), ids=list(STEPS))
def test_a_rank_fails_while_another_one_waits(two, number):
    """The one that waits in a collective of its step is fetched out of it."""
    try:
        first, second = two.run(failing, number, is_waited_for=True)
    finally:
        two.stop()  # whose group is closed
    assert first[0] == "CheckpointError"
    assert "Rank 1 failed" in first[1]
    assert "ValueError: a bad batch" in first[1]
    assert second == ("ValueError", "a bad batch")


@pytest.mark.parametrize("number", list(STEPS.values()), ids=list(STEPS))
def test_a_rank_fails_after_its_collectives(two, number):
    """The group serves as before."""
    first, second = two.run(failing, number, is_waited_for=False)
    assert first[0] == "CheckpointError"
    assert "Rank 1 failed" in first[1]
    assert second == ("ValueError", "a bad batch")
    check(two.run(planned, "ddp", {}))


def test_the_first_of_four_ranks_fails(four):
    try:
        errors = four.run(fails_first)
    finally:
        four.stop()
    assert errors[0] == ("ValueError", "a bad batch")
    assert [kind for kind, _ in errors[1:]] == ["CheckpointError"] * 3
    assert all("Rank 0 failed" in words for _, words in errors[1:])


def fails_first() -> tuple[str, str]:
    model, step = made("fsdp")

    def fail(model: nn.Module) -> None:
        if rank() == 0:
            raise ValueError("a bad batch")
        step(model)

    return error_of(lambda: plan_memory(model, fail, 0.5, blocks=["*"]))


def wrongly_applied() -> tuple[str, str, bool]:
    """Applies a plan to another model on the second rank."""
    model, step = of_one(ROWS)
    plan = plan_memory(model, step, 0.5, blocks="*")
    before = memory_ledger(lambda: step(model)).peak.nbytes
    kind, words = error_of(lambda: plan.apply(nn.Linear(2, 2) if rank() else model))
    return kind, words, memory_ledger(lambda: step(model)).peak.nbytes == before


def test_a_rank_fails_in_apply(two):
    first, second = two.run(wrongly_applied)
    assert (first[0], second[0]) == ("CheckpointError", "ValueError")
    assert "Rank 1 failed" in first[1]
    assert (first[2], second[2]) == (True, True)  # no region is left


def from_files(values: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Applies a plan from a file of the rank's own."""
    model, _ = of_one(ROWS)
    plan = Plan.from_json(values[rank()])
    if values[0] == values[1]:
        plan.apply(model).undo()
        return None
    return error_of(lambda: plan.apply(model))


def test_plans_from_files(two):
    """A plan is for all ranks; of two that differ the block is named which does."""
    model, step = of_one(ROWS)
    one, other = (plan_memory(model, step, part, blocks="*") for part in (0.2, 0.8))
    first, second = (json.loads(json.dumps(plan.to_json())) for plan in (one, other))
    assert two.run(from_files, [first, first]) == [None, None]
    errors = two.run(from_files, [first, second])
    assert errors[0] == errors[1]
    name = next(a.name for a, b in zip(one.blocks, other.blocks, strict=True) if a.kept != b.kept)
    assert f"Rank 1 and rank 0 differ in what block {name!r} keeps" in errors[0][1]


def unlike(what: str) -> tuple[str, str]:
    """Plans for something else on the second rank."""
    is_other = rank() == 1
    model, step = of_one(ROWS, nn.SiLU if is_other and what == "operators" else nn.GELU)
    if is_other and what == "kind":
        model[1] = nn.Sequential(*model[1].children())
    budget = 0.6 if is_other and what == "budget" else 0.5
    return error_of(lambda: plan_memory(model, step, budget, blocks="*"))


DIFFERENCES = {"budget": "memory_budget", "operators": "the operators of block '2'", "kind": "block '1'"}


@pytest.mark.parametrize(("what", "words"), list(DIFFERENCES.items()), ids=list(DIFFERENCES))
def test_ranks_that_differ(two, what, words):
    first, second = two.run(unlike, what)
    assert first == second
    assert first[0] == "CheckpointError"
    assert f"Rank 1 and rank 0 differ in {words}. " in first[1]


def alone() -> tuple[str, str] | None:
    """Plans on the first rank, without the other one."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=1))
    single = torch.distributed.new_group([0])
    if rank() == 1:
        return None
    model, step = of_one(ROWS)
    assert plan_memory(model, step, 0.5, blocks="*", group=single).is_measured
    return error_of(lambda: plan_memory(model, step, 0.5, blocks="*", group=group))


def test_a_rank_which_never_comes(two):
    """Is named after the timeout of the group; a group of one rank waits for none."""
    first, _ = two.run(alone)
    assert first[0] == "CheckpointError"
    assert "Rank 1 did not join within 1 s" in first[1]


def outliving() -> int:
    """Measures a plan again on the second rank, once the process group is gone."""
    own = rank()
    model, step = of_one(ROWS)
    plan = plan_memory(model, step, 0.5, blocks="*")
    torch.distributed.destroy_process_group()
    if own == 1:
        plan.apply().undo()
        return plan.replan(0.5, step).measured_peak
    return plan.measured_peak


def test_a_plan_outlives_its_group(two):
    try:
        first, second = two.run(outliving)
    finally:
        two.stop()
    assert first == second


def staged() -> tuple[dict[str, Any], int]:
    """Plans the stages of a pipeline, each for a group of its own."""
    groups = [torch.distributed.new_group([one]) for one in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS * (1 + rank()))))
    shape = torch.empty(ROWS, WIDTH, requires_grad=True)
    stage = PipelineStage(model, rank(), 2, torch.device("cpu"), input_args=shape, output_args=shape)
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, target: (y - target).square().mean(), scale_grads=False)
    x, target = torch.randn(2 * ROWS, WIDTH), torch.randn(2 * ROWS, WIDTH)
    runs = [0]

    def step(_: nn.Module) -> None:
        runs[0] += 1
        schedule.step(*(() if rank() else (x,)), **({"target": target} if rank() else {}))

    plain = gradients(model, step)
    runs[0] = 0
    plan = plan_memory(model, step, 0.3 + 0.4 * rank(), group=groups[rank()])
    count = runs[0]
    with plan.apply():
        assert all(map(torch.equal, gradients(model, step), plain))
    return plan.to_json(), count


def test_stages_of_a_pipeline(two):
    """Each has a plan of its own, and all run as many steps, in which they wait for each other."""
    (first, steps), (second, others) = two.run(staged)
    assert steps == others
    assert len(first["blocks"]) < len(second["blocks"])
