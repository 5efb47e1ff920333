"""The rows of ``python -m pytest bench`` on a device: small programs, where the host's work is what counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import ckpt_hooks
from bench.bookkeeping import all_python_bytes, python_bytes
from bench.programs import IMPLEMENTATIONS, PROGRAMS, REGIONS, Program, Region, chain, chain_saving_one, plain
from bench.selective import regions_under
from bench.small_ops import PassThrough, run_under
from ckpt_hooks import policies
from tests.measure import CountOps

from .measure import Bench, Row, Step, compared

Table = tuple[str, Callable[[Bench], list[Row]]]

_TINY = ["one op", "chain of 10 ops", "block of width 32"]
_BLOCKS = ["block of width 32", "block of width 256", "4 blocks of width 256"]
#: What has Python objects in such numbers that to count them takes long.
_LARGE = "2000 regions in a row"


def build(name: str, bench: Bench) -> Program:
    """Builds a program with its tensors on the device."""
    torch.manual_seed(0)
    with torch.device(bench.device):
        return PROGRAMS[name]()


def is_exact(program: Program, region: Region) -> bool | None:
    """Whether gradients are bitwise those without checkpointing; None where two runs without it differ."""
    first, second, found = (program.gradients(program.step_in(way)) for way in (plain, plain, region))
    if not all(map(torch.equal, first, second)):
        return None
    return all(map(torch.equal, found, first))


def step_table(bench: Bench, *, name: str) -> list[Row]:
    """Times a step of each implementation."""
    program = build(name, bench)
    rows = bench.table(name, {key: program.step(key) for key in IMPLEMENTATIONS})
    for row in rows:
        if row.name in REGIONS:
            row.exact = is_exact(program, REGIONS[row.name])
            if name != _LARGE:
                row.figures["python_bytes"] = python_bytes(program, row.name)
    return rows


def attention_of(program: Program) -> list[Any]:
    """Returns the operators of attention that a program runs on its device."""
    with CountOps() as ops, torch.no_grad():
        program.forward(plain)
    return [getattr(torch.ops.aten, name).default for name in ops.counts if "scaled_dot_product" in name]


def policy_table(bench: Bench, *, name: str) -> list[Row]:
    """Times a step under policies: of functions, of recorded regions, and of torch's functions."""
    program, addmm = build(name, bench), torch.ops.aten.addmm.default
    kept: dict[str, Any] = {
        "products and attention saved": [addmm, *attention_of(program)],
        "each second addmm saved": policies.save_every(addmm, 2),
    }
    ways = {f"{key}, {words}": way for words, policy in kept.items() for key, way in regions_under(policy).items()}
    everything = regions_under(policies.everything_saveable)
    ways.update({f"{key}, everything saved": everything[key] for key in ("ours", "torch", "region")}, none=plain)
    rows = bench.table(f"{name}, policies", {key: program.step_in(way) for key, way in ways.items()})
    for row in rows:
        row.exact = is_exact(program, ways[row.name])
    return rows


def options_table(bench: Bench) -> list[Row]:
    """Times a step with values compared, and of reruns that return."""
    name = "block of width 32" if bench.is_tiny else "block of width 256"
    program = build(name, bench)
    ways: dict[str, Region] = {
        "ours": ckpt_hooks.checkpoint,
        "ours, compared by the self-check": _checked,
        "torch": REGIONS["torch"],
        **{
            f"ours, {words}": functools.partial(ckpt_hooks.checkpoint, **options)
            for words, options in {
                "determinism_check='values'": {"determinism_check": "values"},
                "early_stop=False": {"early_stop": False},
                "preserve_rng_state=False": {"preserve_rng_state": False},
            }.items()
        },
        "torch, preserve_rng_state=False": functools.partial(
            torch.utils.checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=False
        ),
        "torch, early_stop=False": _torch_to_its_end,
    }
    return bench.table(f"{name}, options", {key: program.step_in(way) for key, way in ways.items()})


def _checked(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def called(x: Tensor) -> Tensor:
        return function(x)

    # The first pass of other code, which the self-check has not met.
    fresh = FunctionType(called.__code__.replace(), globals(), closure=called.__closure__)
    output: Tensor = ckpt_hooks.checkpoint(fresh, x)
    return output


def _torch_to_its_end(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        output: Tensor = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
        return output


class _Buffered(nn.Module):
    """Takes sines in turn, and has buffers that nobody writes to."""

    def __init__(self, buffers: int) -> None:
        super().__init__()
        for number in range(buffers):
            self.register_buffer(f"buffer{number}", torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin()
        return x


def _modules(bench: Bench) -> dict[str, tuple[nn.Module, Tensor]]:
    convolution = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    dropout = [nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)]
    return {
        "small region with batch norm": (nn.Sequential(*convolution, *convolution), torch.randn(2, 8, 8, 8)),
        "small region with dropout": (nn.Sequential(*dropout, *dropout), torch.randn(16, 32)),
        "region of 8 sines": (_Buffered(0), torch.randn(4, 4)),
        "region of 8 sines, 64 buffers": (_Buffered(64), torch.randn(4, 4)),
        "recurrent region": (nn.GRU(16, 16, 2), torch.randn(4, 2, 16)),
        "recurrent region with dropout": (nn.GRU(16, 16, 2, dropout=0.5), torch.randn(4, 2, 16)),
    }


def state_table(bench: Bench, *, name: str) -> list[Row]:
    """Times a step of a region that draws, or whose module has state."""
    module, x = _modules(bench)[name]
    module, x = module.to(bench.device), x.to(bench.device).requires_grad_()

    def step(region: Region) -> None:
        y: Any = region(module, x)
        (y if isinstance(y, Tensor) else y[0]).sum().backward()  # type: ignore[no-untyped-call]

    return bench.table(name, {key: functools.partial(step, region) for key, region in REGIONS.items() if "reent" not in key})


def _never(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return policies.CheckpointPolicy.PREFER_RECOMPUTE


def operator_table(bench: Bench) -> list[Row]:
    """Times a forward of a hundred small operators under what watches them: microseconds of all hundred."""
    x, leaf = torch.randn(4, 4, device=bench.device), torch.randn(4, 4, device=bench.device, requires_grad=True)
    run, in_torch = run_under(nullcontext, leaf), REGIONS["torch"]

    def contexts(make: Callable[[Any], Any], policy: Any) -> Callable[[], Any]:
        return lambda: make(policy)[0]

    ours, theirs = ckpt_hooks.create_selective_checkpoint_contexts, torch.utils.checkpoint.create_selective_checkpoint_contexts
    steps: dict[str, Step] = {
        "none": run_under(nullcontext, x),
        "none, for backward": run,
        "mode that does nothing": run_under(PassThrough, x),
        "ours, policy of operators": run_under(contexts(ours, policies.dots_saveable), x),
        "torch, policy of operators": run_under(contexts(theirs, policies.dots_saveable), x),
        "ours, policy that is a function": run_under(contexts(ours, _never), x),
        "torch, policy that is a function": run_under(contexts(theirs, _never), x),
        "region, not packed": run_under(ckpt_hooks.checkpoint_region, x),
        "region": run_under(ckpt_hooks.checkpoint_region, leaf),
        "ours": lambda: ckpt_hooks.checkpoint(lambda _: run(), leaf),
        "torch": lambda: in_torch(lambda _: run(), leaf),
    }
    return bench.table("100 small operators, forward", steps, has_memory=False)


def write_table(bench: Bench) -> list[Row]:
    """Times a forward of a hundred operators in place."""
    x = torch.randn(4, 4, device=bench.device, requires_grad=True)

    def written(x: Tensor) -> Tensor:
        h = x * 1
        for _ in range(100):
            h.mul_(0.99)
        return h

    steps = {key: functools.partial(REGIONS[key], written, x) for key in ("none", "ours", "torch", "region")}
    return bench.table("100 operators in place, forward", steps, has_memory=False)


def python_table(bench: Bench) -> list[Row]:
    """Counts Python bytes of an operator more in a region."""
    rows = []
    for words, make in (("packed", chain), ("not packed", chain_saving_one)):
        for key in ("none", "torch", "ours", "region"):
            with torch.device(bench.device):
                short, long = make(100), make(300)
            found = (all_python_bytes(long, key) - all_python_bytes(short, key)) / 200
            rows.append(Row("Python bytes an operator", f"{key}, {words}", {"python_bytes": found}))
    return compared(rows)


def small_tables(bench: Bench) -> Iterator[Table]:
    """Yields the tables of small programs, by name."""
    for name in _TINY if bench.is_tiny else PROGRAMS:
        yield name, functools.partial(step_table, name=name)
    for name in _BLOCKS[:1] if bench.is_tiny else _BLOCKS:
        yield f"{name}, policies", functools.partial(policy_table, name=name)
    yield "options", options_table
    for name in _modules(bench):
        yield name, functools.partial(state_table, name=name)
    yield "100 small operators, forward", operator_table
    yield "100 operators in place, forward", write_table
    yield "Python bytes an operator", python_table
