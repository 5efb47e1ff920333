"""The cross entropy of a head in slices: against the loop by torch's checkpoint, no slices, and torch's own fused function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from train_charlm import peak_bytes

from ckpt_hooks.losses import chunked_cross_entropy

from .interleave import interleave

TOKENS, WORDS, SIZE, CHUNKS = 1024, 8192, 128, 8


def _summed(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


def _loop(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = hidden.new_zeros(())
    for part, words in zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True):
        total = total + torch_checkpoint(_summed, part, weight, words, use_reentrant=False)
    return total / len(labels)


def _whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _summed(hidden, weight, labels) / len(labels)


@pytest.mark.benchmark(group="cross entropy in slices", max_time=0.5, min_rounds=5)
def test_cross_entropy(benchmark: BenchmarkFixture, note: Callable[[str], None]) -> None:
    """A step and its peak; gradients are those of the loop bit for bit."""
    hidden = torch.randn(TOKENS, SIZE, requires_grad=True)
    weight = torch.randn(WORDS, SIZE).div(SIZE**0.5).requires_grad_()
    labels = torch.randint(WORDS, (TOKENS,))
    losses: dict[str, Callable[..., torch.Tensor]] = {
        "ours": partial(chunked_cross_entropy, chunks=CHUNKS),
        "torch": _loop,
        "whole": _whole,
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # new in 2.13
        losses["linear_cross_entropy"] = partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())

    def step(loss: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss(hidden, weight, labels), [hidden, weight])

    steps = {name: partial(step, loss) for name, loss in losses.items()}
    if not benchmark.disabled:
        seconds = interleave(steps, seconds=8.0)
        peaks = {name: peak_bytes(one) for name, one in steps.items()}
        words = [f"cross entropy in {CHUNKS} slices: {1e3 * seconds['ours']:.1f} ms, peak {peaks['ours']:,} bytes"]
        for other in [*losses][1:]:
            ratio, peak_ratio = seconds["ours"] / seconds[other], peaks["ours"] / peaks[other]
            benchmark.extra_info.update({f"ratio_to_{other}": ratio, f"peak_ratio_to_{other}": peak_ratio})
            words.append(f"{ratio:.3f} of the step and {peak_ratio:.3f} of the peak of {other}")
        note(", ".join(words))
    benchmark(steps["ours"])
    assert all(map(torch.equal, steps["ours"](), steps["torch"]()))
