"""Selective policies: a step against torch's under the same policy, and what it costs to note an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from pytest_benchmark.fixture import BenchmarkFixture
from train_charlm import peak_bytes

import ckpt_hooks
from ckpt_hooks import policies

from .interleave import interleave
from .programs import build
from .selective import BLOCKS, KEPT, POLICIES, check, regions_under
from .small_ops import microseconds_an_operator, run_under


@pytest.mark.benchmark(group="selective step", max_time=0.5, min_rounds=5)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_selective_step(benchmark: BenchmarkFixture, note: Callable[[str], None], name: str, policy: str) -> None:
    """A step under a policy: gradients bitwise, time and peak against torch's, and what was kept is not computed again."""
    program, regions = build(name), regions_under(POLICIES[policy])
    steps = {key: program.step_in(regions[key]) for key in ("ours", "torch")}
    if not benchmark.disabled:
        seconds = interleave(steps, seconds=4.0 if "32" in name else 12.0)
        ratio = seconds["ours"] / seconds["torch"]
        ours, theirs = peak_bytes(steps["ours"]), peak_bytes(steps["torch"])
        benchmark.extra_info.update(ratio_to_torch=ratio, peak_bytes=ours, peak_ratio=ours / theirs)
        note(f"{name}, {policy} kept: {ratio:.3f} of torch's step, peak {ours:,} bytes, {ours / theirs:.3f} of torch's")
    benchmark(steps["ours"])
    check(program, regions["ours"], KEPT[policy])


@pytest.mark.benchmark(group="noting an operator")
@pytest.mark.parametrize("kind", ["operators", "function"])
def test_noting_an_operator(benchmark: BenchmarkFixture, note: Callable[[str], None], kind: str) -> None:
    """A hundred small operators, none of them kept, under the mode of forward and under one that does nothing."""
    x = torch.randn(4, 4)

    def never(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return policies.CheckpointPolicy.PREFER_RECOMPUTE

    policy = policies.dots_saveable if kind == "operators" else never

    def ours() -> Any:
        return ckpt_hooks.create_selective_checkpoint_contexts(policy)[0]

    def torchs() -> Any:
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)[0]

    if not benchmark.disabled:
        us = microseconds_an_operator({"ours": ours, "torch": torchs}, x)
        ratio = us["ours"] / us["pass-through"]
        benchmark.extra_info["ratio_to_pass_through"] = ratio
        note(
            f"an operator under a policy ({kind}): {us['ours']:.2f} us, {ratio:.2f} of a mode that does nothing "
            f"({us['pass-through']:.2f} us), torch's {us['torch']:.2f} us, no mode {us['plain']:.2f} us"
        )
    benchmark(run_under(ours, x))
