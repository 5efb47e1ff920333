"""Recorded regions: under policies against function regions, what keeping everything costs, and what an operator does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from pytest_benchmark.fixture import BenchmarkFixture
from train_charlm import peak_bytes

import ckpt_hooks
from ckpt_hooks import policies

from .bookkeeping import python_bytes_an_operator
from .interleave import interleave
from .programs import build, chain, chain_saving_one, plain
from .selective import BLOCKS, KEPT, POLICIES, check, regions_under, run_in_backward
from .small_ops import microseconds_an_operator, run_under


@pytest.mark.benchmark(group="region under a policy", max_time=0.5, min_rounds=5)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_region_under_a_policy(benchmark: BenchmarkFixture, note: Callable[[str], None], name: str, policy: str) -> None:
    """A step against function regions under the same policy, torch's and ours; what was kept is not computed again."""
    program, regions = build(name), regions_under(POLICIES[policy])
    steps = {key: program.step_in(region) for key, region in regions.items()}
    if not benchmark.disabled:
        seconds = interleave(steps, seconds=4.0 if "32" in name else 12.0)
        peaks = {key: peak_bytes(step) for key, step in steps.items()}
        words = [f"region: {name}, {policy} kept: peak {peaks['region']:,} bytes"]
        for other in ("torch", "ours"):
            ratio, peak_ratio = seconds["region"] / seconds[other], peaks["region"] / peaks[other]
            benchmark.extra_info.update({f"ratio_to_{other}": ratio, f"peak_ratio_to_{other}": peak_ratio})
            words.append(f"{ratio:.3f} of the step and {peak_ratio:.3f} of the peak of {other}")
        benchmark.extra_info["peak_bytes"] = peaks["region"]
        note(", ".join(words))
    benchmark(steps["region"])
    check(program, regions["region"], KEPT[policy])


@pytest.mark.benchmark(group="region that keeps everything", max_time=0.5, min_rounds=5)
@pytest.mark.parametrize("name", BLOCKS)
def test_everything_saveable(benchmark: BenchmarkFixture, note: Callable[[str], None], name: str) -> None:
    """Only views are computed again, and the peak is no higher than without checkpointing: that part is asserted."""
    program, region = build(name), regions_under(policies.everything_saveable)["region"]
    steps = {"region": program.step_in(region), "none": program.step_in(plain)}
    peaks = {key: peak_bytes(step) for key, step in steps.items()}
    if not benchmark.disabled:
        seconds = interleave(steps, seconds=4.0 if "32" in name else 8.0)
        ratio = seconds["region"] / seconds["none"]
        benchmark.extra_info.update(ratio_to_none=ratio, peak_bytes=peaks["region"], peak_ratio=peaks["region"] / peaks["none"])
        note(
            f"region: {name}, everything kept: {ratio:.3f} of the step without checkpointing, "
            f"peak {peaks['region']:,} bytes, without {peaks['none']:,}"
        )
    benchmark(steps["region"])
    check(program, region, [])
    again = run_in_backward(program, region) - run_in_backward(program, plain)
    assert set(again) <= {"view", "t", "transpose", "permute", "unbind"}
    assert peaks["region"] <= peaks["none"]


@pytest.mark.benchmark(group="recording an operator")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "not packed"])
def test_recording_an_operator(benchmark: BenchmarkFixture, note: Callable[[str], None], packed: bool) -> None:
    """A forward of a hundred small operators in a region, each saving a tensor for backward or none of them."""
    x = torch.randn(4, 4, requires_grad=packed)
    if not benchmark.disabled:
        us = microseconds_an_operator({"region": ckpt_hooks.checkpoint_region}, x)
        benchmark.extra_info.update(
            us_per_operator=us["region"],
            us_over_pass_through=us["region"] - us["pass-through"],
            us_over_plain=us["region"] - us["plain"],
        )
        note(
            f"an operator in a region ({'packed' if packed else 'not packed'}): {us['region']:.2f} us, "
            f"{us['region'] - us['pass-through']:.2f} us over a mode that does nothing ({us['pass-through']:.2f} us), "
            f"{us['region'] - us['plain']:.2f} us over no mode ({us['plain']:.2f} us)"
        )
    in_region = run_under(ckpt_hooks.checkpoint_region, x)
    assert torch.equal(benchmark(in_region), run_under(nullcontext, x)())


def _written_to(x: torch.Tensor) -> torch.Tensor:
    h = x * 1
    for _ in range(100):
        h.mul_(0.99)
    return h


@pytest.mark.benchmark(group="recording an operator")
def test_recording_an_operator_that_writes(benchmark: BenchmarkFixture, note: Callable[[str], None]) -> None:
    """A forward of a hundred operators in place in a region."""
    x = torch.randn(4, 4, requires_grad=True)

    def in_region() -> torch.Tensor:
        with ckpt_hooks.checkpoint_region():
            return _written_to(x)

    if not benchmark.disabled:
        seconds = interleave({"region": in_region, "plain": lambda: _written_to(x)})
        us = {name: 1e4 * found for name, found in seconds.items()}
        benchmark.extra_info.update(us_per_operator=us["region"], us_over_plain=us["region"] - us["plain"])
        note(f"an operator that writes, in a region: {us['region']:.2f} us, {us['region'] - us['plain']:.2f} us over no mode")
    assert torch.equal(benchmark(in_region), _written_to(x))


class _Doubled(torch.autograd.Function):
    """A custom function of one operator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0].cos()  # type: ignore[no-any-return]


class _Normed(torch.autograd.Function):
    """A custom function of six operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, scale = ctx.saved_tensors
        return 1.5 * scale * (gradient - x * scale * scale * (gradient * x).mean(-1, keepdim=True))


@pytest.mark.benchmark(group="custom functions")
@pytest.mark.parametrize("function", [_Doubled, _Normed], ids=["one operator", "six operators"])
def test_custom_functions(benchmark: BenchmarkFixture, note: Callable[[str], None], function: Any) -> None:
    """Ten custom functions in a region, forward alone and a step, beside torch's checkpoint; and a plain call after regions."""
    x = torch.randn(8, 32, requires_grad=True)

    def chained(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for _ in range(10):
            x = function.apply(x)
        return x

    def in_region(x: torch.Tensor) -> torch.Tensor:
        with ckpt_hooks.checkpoint_region():
            return chained(x)

    def in_torchs(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(chained, x, use_reentrant=False)  # type: ignore[no-any-return]

    runs = {"plain": chained, "region": in_region, "torch": in_torchs}

    def step(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(run(x).sum(), x)[0]

    if not benchmark.disabled:
        forward = interleave({name: partial(run, x) for name, run in runs.items()})
        steps = interleave({name: partial(step, run) for name, run in runs.items()})
        us = {name: 1e5 * found for name, found in forward.items()}
        ratio = steps["region"] / steps["torch"]
        benchmark.extra_info.update(us_over_plain=us["region"] - us["plain"], share_of_torchs_step=ratio)
        note(
            f"{function.__doc__.rstrip('.')}: {us['region'] - us['plain']:.1f} us of forward over no region, "
            f"{us['torch'] - us['plain']:.1f} us under torch's checkpoint; {ratio:.2f} of torch's step"
        )
    assert torch.equal(benchmark(partial(step, in_region)), step(chained))


@pytest.mark.benchmark(group="Python bytes an operator")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "not packed"])
def test_python_bytes(benchmark: BenchmarkFixture, note: Callable[[str], None], packed: bool) -> None:
    """Python objects that a region leaves for backward for each operator: torch's leaves none where no tensor is saved."""
    make = chain if packed else chain_saving_one
    if not benchmark.disabled:
        sizes = {key: python_bytes_an_operator(make, key) for key in ("region", "ours", "torch", "none")}
        benchmark.extra_info.update(sizes)
        note(
            f"Python bytes an operator ({'packed' if packed else 'not packed'}): region {sizes['region']:,.1f}, "
            f"ours {sizes['ours']:,.1f}, torch {sizes['torch']:,.1f}, none {sizes['none']:,.1f}"
        )
    program = make(100)
    benchmark(program.step("region"))
    region, without = (program.gradients(program.step(key)) for key in ("region", "none"))
    assert all(torch.equal(one, other) for one, other in zip(region, without, strict=True))
