"""The model of `examples/train_charlm.py`, step by step in turn: every mode against torch's, in the CPU time of its thread."""

from __future__ import annotations

import dataclasses
import gc
import operator
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from train_charlm import Options, Run, draw_batch, load_tokens

ROUNDS = 11
OPTIONS = Options(
    steps=1, layers=8, width=128, heads=4, context=128, batch=8, dropout=0.1, seed=0, device="cpu", policy="dots_saveable"
)
#: Each mode, with the mode that its time is compared with.
MODES = {
    "none": "torch",
    "torch": "torch",
    "checkpoint": "torch",
    "region": "torch",
    "budget:40MiB": "torch",
    "torch_selective": "torch_selective",
    "selective": "torch_selective",
    "region:dots_saveable": "torch_selective",
}


def seconds_in_turn(steps: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Returns the CPU times of each step, of rounds in which the first one changes."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for number in range(ROUNDS + 2):  # the first two make what lasts
        for name in order:
            gc.collect(0)
            start = time.thread_time()
            steps[name]()
            if number > 1:
                seconds[name].append(time.thread_time() - start)
        order.append(order.pop(0))
    return seconds


@pytest.mark.benchmark(group="example")
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_example(benchmark: object, note: Callable[[str], None], dropout: float) -> None:
    """Losses and gradients of all modes are bitwise equal."""
    text, vocabulary = load_tokens()
    options = dataclasses.replace(OPTIONS, dropout=dropout)
    if benchmark.disabled:  # type: ignore[attr-defined]
        options = dataclasses.replace(options, layers=2, width=16, context=16, batch=2)
    batch = draw_batch(text, options, torch.Generator().manual_seed(0))
    runs = {mode: Run(mode, text, vocabulary, options) for mode in MODES}

    def step_of(run: Run) -> Callable[[], object]:
        def step() -> torch.Tensor:
            run.optimizer.zero_grad()
            torch.manual_seed(1)
            return run.forward_backward(*batch)

        return step

    steps = {mode: step_of(run) for mode, run in runs.items()}
    if not benchmark.disabled:  # type: ignore[attr-defined]
        seconds = seconds_in_turn(steps)
        for mode, base in MODES.items():
            # Of ratios in one round each, which a slow minute leaves as they are.
            ratio, of_none = (
                statistics.median(map(operator.truediv, seconds[mode], seconds[other])) for other in (base, "none")
            )
            peak = runs[mode].peak
            note(f"example, dropout {dropout}, {mode}: {ratio:.3f} of {base}, {of_none:.3f} of none, peak {peak:,} bytes")
    benchmark(steps["checkpoint"])  # type: ignore[operator]
    found = {mode: [steps[mode](), *(one.grad for one in run.model.parameters())] for mode, run in runs.items()}
    assert all(
        torch.equal(one, other) for gradients in found.values() for one, other in zip(gradients, found["none"], strict=True)
    )
