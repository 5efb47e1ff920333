"""Selective policies: a step against torch's under the same policy, and what it costs to note an operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from pytest_benchmark.fixture import BenchmarkFixture
from train_charlm import peak_bytes

import ckpt_hooks
from ckpt_hooks import policies
from ckpt_hooks._dispatch import QuietDispatchMode
from tests.measure import CountOps

from .interleave import interleave
from .programs import Region, build

_ATEN = torch.ops.aten
#: Matrix products and attention: five outputs a block.
_SAVED = [_ATEN.addmm.default, _ATEN._scaled_dot_product_flash_attention_for_cpu.default]
_POLICIES = {"matmuls and attention": _SAVED, "save_every second addmm": policies.save_every(_ATEN.addmm.default, 2)}


def _regions(policy: Any) -> dict[str, Region]:
    def torchs(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        started = policy.start() if isinstance(policy, policies.Policy) else policy
        contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, started)
        output: torch.Tensor = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False, context_fn=contexts)
        return output

    def ours(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        contexts = partial(ckpt_hooks.create_selective_checkpoint_contexts, policy)
        output: torch.Tensor = ckpt_hooks.checkpoint(function, x, context_fn=contexts)
        return output

    return {"ours": ours, "torch": torchs}


@pytest.mark.benchmark(group="selective step", max_time=0.5, min_rounds=5)
@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("name", ["block of width 32", "block of width 256", "4 blocks of width 256"])
def test_selective_step(benchmark: BenchmarkFixture, note: Callable[[str], None], name: str, policy: str) -> None:
    """A step under a policy: gradients bitwise, time and peak against torch's, and what was kept is not computed again."""
    program, regions = build(name), _regions(_POLICIES[policy])
    steps: dict[str, Callable[[], None]] = {
        key: (lambda region=region: program.forward(region).sum().backward()) for key, region in regions.items()
    }
    if not benchmark.disabled:
        seconds = interleave(steps, seconds=4.0 if "32" in name else 12.0)
        ratio = seconds["ours"] / seconds["torch"]
        ours, theirs = peak_bytes(steps["ours"]), peak_bytes(steps["torch"])
        benchmark.extra_info.update(ratio_to_torch=ratio, peak_bytes=ours, peak_ratio=ours / theirs)
        note(f"{name}, {policy} kept: {ratio:.3f} of torch's step, peak {ours:,} bytes, {ours / theirs:.3f} of torch's")
    benchmark(steps["ours"])
    gradients = []
    for region in (regions["ours"], lambda function, x: function(x)):
        for leaf in program.leaves:
            leaf.grad = None
        program.forward(region).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append([leaf.grad.clone() for leaf in program.leaves if leaf.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    if policy == "matmuls and attention":
        output = program.forward(regions["ours"])
        with CountOps() as recomputed:
            output.sum().backward()  # type: ignore[no-untyped-call]
        assert [recomputed.counts[operator._schema.name.partition("::")[2]] for operator in _SAVED] == [0, 0]


class PassThrough(QuietDispatchMode):
    """Does nothing, and knows how to stay out of the compiler's way: the least that a dispatch mode costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.benchmark(group="noting an operator")
@pytest.mark.parametrize("kind", ["operators", "function"])
def test_noting_an_operator(benchmark: BenchmarkFixture, note: Callable[[str], None], kind: str) -> None:
    """A hundred small operators, none of them kept, under the mode of forward and under one that does nothing."""
    x = torch.randn(4, 4)

    def run() -> None:
        y = x
        for _ in range(50):
            y = y.sin().cos()

    def never(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return policies.CheckpointPolicy.PREFER_RECOMPUTE

    policy = policies.dots_saveable if kind == "operators" else never

    def under(make: Callable[[], Any]) -> Callable[[], None]:
        def step() -> None:
            with make():
                run()

        return step

    steps = {
        "plain": run,
        "pass-through": under(PassThrough),
        "ours": under(lambda: ckpt_hooks.create_selective_checkpoint_contexts(policy)[0]),
        "torch": under(lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)[0]),
    }
    if not benchmark.disabled:
        seconds = {name: value / 100 * 1e6 for name, value in interleave(steps).items()}
        ratio = seconds["ours"] / seconds["pass-through"]
        benchmark.extra_info["ratio_to_pass_through"] = ratio
        note(
            f"an operator under a policy ({kind}): {seconds['ours']:.2f} us, {ratio:.2f} of a mode that does nothing "
            f"({seconds['pass-through']:.2f} us), torch's {seconds['torch']:.2f} us, no mode {seconds['plain']:.2f} us"
        )
    benchmark(steps["ours"])
