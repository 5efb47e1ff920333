"""Regions under a policy: the implementations that take one, and what a backward pass runs under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

import ckpt_hooks
from ckpt_hooks import policies
from tests.measure import CountOps

from .programs import Program, Region, plain

_ATEN = torch.ops.aten
#: Matrix products and attention: five outputs a block.
_SAVED = [_ATEN.addmm.default, _ATEN._scaled_dot_product_flash_attention_for_cpu.default]
POLICIES = {"matmuls and attention": _SAVED, "save_every second addmm": policies.save_every(_ATEN.addmm.default, 2)}
#: Operators that must not run in backward when their outputs are kept.
KEPT: dict[str, list[str]] = {
    "matmuls and attention": [operator._schema.name.partition("::")[2] for operator in _SAVED],
    "save_every second addmm": [],
}
BLOCKS = ["block of width 32", "block of width 256", "4 blocks of width 256"]


def regions_under(policy: Any) -> dict[str, Region]:
    """Returns the ways to run a region under a policy, by the names of :data:`.programs.REGIONS`."""

    def torchs(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        started = policy.start() if isinstance(policy, policies.Policy) else policy
        contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, started)
        output: Tensor = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False, context_fn=contexts)
        return output

    def ours(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        contexts = partial(ckpt_hooks.create_selective_checkpoint_contexts, policy)
        output: Tensor = ckpt_hooks.checkpoint(function, x, context_fn=contexts)
        return output

    def region(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with ckpt_hooks.checkpoint_region(policy=policy):
            return function(x)

    return {"ours": ours, "torch": torchs, "region": region}


def run_in_backward(program: Program, region: Region) -> Counter[str]:
    """Counts the operators that a backward pass runs, by name, the recomputed ones among them."""
    output = program.forward(region)
    with CountOps() as run:
        output.sum().backward()  # type: ignore[no-untyped-call]
    return run.counts


def check(program: Program, region: Region, kept: list[str]) -> None:
    """Asserts that gradients are bitwise those without checkpointing, and that operators do not run again."""
    ours, without = (program.gradients(program.step_in(way)) for way in (region, plain))
    assert all(torch.equal(one, other) for one, other in zip(ours, without, strict=True))
    run = run_in_backward(program, region)
    assert [run[name] for name in kept] == [0] * len(kept)
