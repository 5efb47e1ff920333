"""Regions in the stages of a pipeline, under torch's schedules."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch.distributed.pipelining")

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from ckpt_hooks import checkpoint, checkpoint_region, policies
from tests.distributed.training import FEW, FORMS, WIDTH, Block, assert_equal, results
from tests.measure import CountOps

PARTS = 4

#: Forms whose values stay for the second part of a backward.
SPLIT = {
    "call, split": checkpoint(split_backward=True),
    "policy, split": checkpoint(split_backward=True, policy=policies.dots_saveable),
    "region, split": checkpoint_region(split_backward=True),
    "kept products, split": checkpoint_region(split_backward=True, policy=policies.dots_saveable),
}

#: Each schedule, with the stages of the two processes.
SCHEDULES = {
    "GPipe": (ScheduleGPipe, ((0,), (1,))),
    "1F1B": (Schedule1F1B, ((0,), (1,))),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}


class Stage(torch.nn.Module):
    """Two blocks, in a region."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        for block in self.blocks:  # buffers would have what the stages' look at shapes makes of uninitialised memory
            block.norm = torch.nn.LayerNorm(WIDTH)
        self.form = {**FORMS, **SPLIT}[form]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the result of both blocks."""
        return self.form(lambda x: self.blocks[1](self.blocks[0](x)))(x)


def losses_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).pow(2).mean()


def steps(schedule: str, form: str, gelus: list[int] | None = None) -> list[torch.Tensor]:
    """Trains for two steps; notes how often each step ran ``gelu``, the operator that only forwards of blocks run."""
    make, numbers = SCHEDULES[schedule]
    rank, num_stages = torch.distributed.get_rank(), sum(map(len, numbers))
    torch.manual_seed(0)
    modules = [Stage(form) for _ in range(num_stages)]
    mine = [modules[number] for number in numbers[rank]]
    shape = torch.empty(3, WIDTH, requires_grad=True)  # told, or else the processes ask each other by way of NumPy
    stages = [
        PipelineStage(modules[number], number, num_stages, torch.device("cpu"), input_args=shape, output_args=shape)
        for number in numbers[rank]
    ]
    is_single = len(stages) == 1
    found = []
    runner = make(stages[0] if is_single else stages, PARTS, loss_fn=losses_of, scale_grads=False)
    optimizer = torch.optim.AdamW([parameter for module in mine for parameter in module.parameters()], 0.01)
    torch.manual_seed(2)
    x, target = torch.randn(3 * PARTS, WIDTH), torch.randn(3 * PARTS, WIDTH)
    for _ in range(2):
        losses: list[torch.Tensor] = []
        has_first, has_last = 0 in numbers[rank], num_stages - 1 in numbers[rank]
        with CountOps() as ops:
            runner.step(*((x,) if has_first else ()), **({"target": target, "losses": losses} if has_last else {}))
        if gelus is not None:
            gelus.append(ops.counts["gelu"])
        found += [*losses, *(tensor for module in mine for tensor in results(module))]
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in found]


def every_form(schedule: str) -> None:
    expected = steps(schedule, "plain")
    for form in (*FEW, "call with values", "region in a call"):
        assert_equal(steps(schedule, form), expected, form)


def skip_where_it_hangs(schedule: str) -> None:
    if schedule == "ZBVZeroBubble" and torch.__version__ < "2.12":
        pytest.skip("the processes wait for each other under gloo, without regions too")


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_regions_in_stages(ranks, schedule):
    skip_where_it_hangs(schedule)
    ranks.run(every_form, schedule)


def forwards(schedule: str) -> dict[str, int]:
    """Returns how often each form ran forwards of this process's blocks in the second step; the first looks at shapes too."""
    expected, found = steps(schedule, "plain"), {}
    for form in ("plain", "call", "with", *SPLIT):
        gelus: list[int] = []
        assert_equal(steps(schedule, form, gelus), expected, form)
        found[form] = gelus[1]
    return found


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_schedules_without_bubbles_run_each_forward_twice(ranks, schedule):
    """Under ``split_backward`` once in forward and once for both parts of the backward; without it once more for each part."""
    skip_where_it_hangs(schedule)
    runs = 2 * 2 * PARTS  # of two stages with two blocks
    for found in ranks.run(forwards, schedule):
        assert found.pop("plain") == runs
        assert found.pop("call") > 2 * runs < found.pop("with")
        assert found == dict.fromkeys(SPLIT, 2 * runs)
