"""Programs of real sizes: a transformer in mixed precision, and layers whose activations go to the host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from train_charlm import Block

import ckpt_hooks
from bench.programs import REGIONS, Region, plain
from bench.selective import regions_under
from ckpt_hooks import policies
from ckpt_hooks.offload import offload_saved_tensors

from .measure import Bench, Row, Step
from .small import Table

#: A block of code that hooks what autograd saves in it, made anew for each step.
Around = Callable[[], AbstractContextManager[Any]]

_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def _step(modules: nn.ModuleList, x: Tensor, region: Region, around: Around, cast: Around) -> Step:
    """Makes a step through modules, each a region; gradients add up."""

    def step() -> None:
        y = x
        with around(), cast():
            for module in modules:
                y = region(module, y)
        y.float().square().mean().backward()  # type: ignore[no-untyped-call]

    return step


def _pinned(bench: Bench) -> Around:
    return functools.partial(save_on_cpu, pin_memory=bench.device.type == "cuda")


def _unhurried(bench: Bench) -> Bench:
    """Returns the same for steps that take long: fewer rounds of them."""
    return replace(bench, rounds=max(3, bench.rounds // 3), seconds=45.0)


def _check(rows: list[Row], steps: dict[str, Step], leaves: list[Tensor]) -> None:
    """Says of each row whether its gradients are bitwise those of the row ``none``, where two runs of that agree."""

    def gradients(step: Step) -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        step()
        return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]

    fine = {row.name for row in rows if not row.note}
    if "none" not in fine:
        return
    with contextlib.suppress(torch.OutOfMemoryError):
        expected = gradients(steps["none"])
        if all(map(torch.equal, gradients(steps["none"]), expected)):
            for row in rows:
                if row.name in fine:
                    row.exact = all(map(torch.equal, gradients(steps[row.name]), expected))


def transformer_table(bench: Bench) -> list[Row]:
    """Times a step of twelve blocks of width 2048 under autocast to bfloat16, 24,576 tokens."""
    count, width, batch, context = (2, 32, 2, 16) if bench.is_tiny else (12, 2048, 12, 2048)
    torch.manual_seed(0)
    with torch.device(bench.device):
        modules = nn.ModuleList(Block(width, heads=max(2, width // 128), dropout=0.0) for _ in range(count))
        x = torch.randn(batch, context, width, requires_grad=True)
    cast = functools.partial(torch.autocast, bench.device.type, torch.bfloat16)
    kept = regions_under(_PRODUCTS)
    ways: dict[str, tuple[Region, Around]] = {
        "none": (plain, nullcontext),
        "torch": (REGIONS["torch"], nullcontext),
        "ours": (REGIONS["ours"], nullcontext),
        "region": (REGIONS["region"], nullcontext),
        **{f"{key}, products saved": (kept[key], nullcontext) for key in ("torch", "ours", "region")},
        "torch, inputs on the host": (REGIONS["torch"], _pinned(bench)),
        "ours, inputs on the host": (REGIONS["ours"], offload_saved_tensors),
        "region, inputs on the host": (REGIONS["region"], offload_saved_tensors),
    }
    steps = {key: _step(modules, x, region, around, cast) for key, (region, around) in ways.items()}
    rows = _unhurried(bench).table(f"{count} blocks of width {width}, {batch * context:,} tokens, bfloat16", steps)
    _check(rows, steps, [x, *modules.parameters()])
    return rows


def offload_table(bench: Bench) -> list[Row]:
    """Times a step of twelve MLPs of width 4096 in bfloat16, 8,192 tokens, whose activations go to the host."""
    count, width, tokens = (2, 64, 32) if bench.is_tiny else (12, 4096, 8192)
    torch.manual_seed(0)
    with torch.device(bench.device):
        modules = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        ).to(torch.bfloat16)
        x = torch.randn(tokens, width, dtype=torch.bfloat16).requires_grad_()
    kept, moved = regions_under(_PRODUCTS), regions_under(policies.offload_ops(*_PRODUCTS))
    ways: dict[str, tuple[Region, Around]] = {
        "none": (plain, nullcontext),
        "torch": (REGIONS["torch"], nullcontext),
        "ours": (REGIONS["ours"], nullcontext),
        "region": (REGIONS["region"], nullcontext),
        **{f"{key}, products saved": (kept[key], nullcontext) for key in ("torch", "ours", "region")},
        **{f"{key}, products offloaded": (moved[key], nullcontext) for key in ("ours", "region")},
        "offload_saved_tensors": (plain, offload_saved_tensors),
        "save_on_cpu": (plain, _pinned(bench)),
        "ours, inputs on the host": (ckpt_hooks.checkpoint, offload_saved_tensors),
        "torch, inputs on the host": (REGIONS["torch"], _pinned(bench)),
    }
    steps = {key: _step(modules, x, region, around, nullcontext) for key, (region, around) in ways.items()}
    rows = _unhurried(bench).table(f"{count} MLPs of width {width}, {tokens:,} tokens, bfloat16", steps)
    _check(rows, steps, [x, *modules.parameters()])
    return rows


def large_tables(bench: Bench) -> Iterator[Table]:
    """Yields the tables of large programs, by name."""
    yield "transformer", transformer_table
    yield "offload", offload_table
