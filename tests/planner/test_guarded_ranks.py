"""Guarded steps of several ranks: undone on all where one takes more than the limit, and an error on all where one fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp")

from ckpt_hooks import memory_ledger, plan_memory
from ckpt_hooks.planner import profiling
from tests.distributed.conftest import started
from tests.planner.models import same, state_of
from tests.planner.test_ranks import BLOCKS_OF, MARGIN, WIDTH, made, rank

#: At which blocks are called again.
PRICES = 3_000_000.0, 500_000.0

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two():
    """Two processes with a process group."""
    yield from started(2)


class Training:
    """A model in a wrapper, with an optimizer; ranks have batches of other sizes."""

    def __init__(self, kind: str) -> None:
        self.model, self.profiled = made(kind)
        profiling.PRICES = PRICES
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, rows: int) -> float:
        self.optimizer.zero_grad()
        x = torch.randn(rows + 64 * rank(), WIDTH, generator=torch.Generator().manual_seed(rows))
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, torch.Tensor]:
        own = state_of(self.model)
        own |= {f"momentum {at}": one["momentum_buffer"].clone() for at, one in enumerate(self.optimizer.state.values())}
        return {name: getattr(one, "_local_tensor", one) for name, one in own.items()}


def limited(kind: str) -> dict[str, Any]:
    plain, guarded = Training(kind), Training(kind)
    losses, peaks = [], []
    lengths = [64, 256, 128, 200, 256, 96, 240, 32]
    for rows in lengths:
        with memory_ledger() as found:
            losses.append(plain.step(rows))
        peaks.append(found.peak.nbytes)
    # What gloo frees late is no sign that called blocks hold their arguments.
    options = {"margin": MARGIN, "tolerance": MARGIN, "blocks": BLOCKS_OF[kind]}
    plan = plan_memory(guarded.model, guarded.profiled, 1.0, **options)
    limit = torch.tensor(sorted(peaks)[3])
    torch.distributed.all_reduce(limit, torch.distributed.ReduceOp.MAX)
    with plan.guard(limit=int(limit)) as guard:
        assert [guard(guarded.step, rows) for rows in lengths] == losses
    assert same(plain.state(), guarded.state())
    assert any(not block.recorded for block in guard.plan.blocks)
    return {"log": guard.log, "blocks": guard.plan.to_json()["blocks"]}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_step_above_the_limit_on_one_rank_runs_again_on_all(two, kind):
    first, second = two.run(limited, kind)
    assert first["log"]
    assert first == second


def out_of_memory() -> dict[str, Any]:
    training = Training("ddp")
    plan = plan_memory(training.model, training.profiled, 1.0, margin=MARGIN, blocks=BLOCKS_OF["ddp"])
    training.step(64)
    before = training.state()

    def step() -> None:
        training.step(64)
        if rank() == 1:
            raise torch.OutOfMemoryError("no memory")

    with plan.guard() as guard:
        try:
            guard(step)
        except Exception as error:
            return {"error": type(error).__name__, "words": str(error), "as before": same(before, training.state())}
    return {}


def test_an_error_of_the_device_on_one_rank_is_one_on_all(two):
    first, second = two.run(out_of_memory)
    two.stop()  # whose connections are closed
    assert (second["error"], second["as before"]) == ("OutOfMemoryError", True)
    assert (first["error"], first["as before"]) == ("CheckpointError", True)
    assert "Rank 1 failed" in first["words"]
    assert "no memory" in first["words"]
