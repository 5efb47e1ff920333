"""A third fuzzer: random programs with regions under ``torch.compile``, against the same programs without.

``python -m tests.fuzz.compiled --programs 180`` runs it. Programs without random numbers are compared with eager autograd.
A compiler may draw otherwise than eager, so programs with random numbers may also equal the compiled program without regions,
or else their derivatives agree with finite differences.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import linecache
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import ckpt_hooks

from .compiled_programs import Program, generate
from .prelude import Square

__all__ = ["Verdict", "check", "shrunk"]

#: Rows of the inputs, a Python number and a flag, for each call of a program; the third call is compiled again.
CALLS = [(4, 2, True), (4, 2, True), (6, 3, False)]


class Layer(nn.Module):
    """A module with parameters and two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x, scale=1.0):
        return x + self.two(F.silu(self.one(x) * scale))


def keep_products(ctx, op, *args, **kwargs):
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and ctx.index % 2
    return ckpt_hooks.CheckpointPolicy.MUST_SAVE if kept else ckpt_hooks.CheckpointPolicy.PREFER_RECOMPUTE


def keep_by_name(ctx, op, *args, **kwargs):
    kept = len(str(op)) % 3 == 0
    return ckpt_hooks.CheckpointPolicy.PREFER_SAVE if kept else ckpt_hooks.CheckpointPolicy.MUST_RECOMPUTE


def namespace(with_regions: bool) -> dict[str, Any]:
    """Returns what programs may name: new parameters and modules, the same each time."""
    torch.manual_seed(11)
    names: dict[str, Any] = {
        "w0": torch.randn(8, 8, dtype=torch.float64).mul_(0.4).requires_grad_(),
        "w1": torch.randn(8, 8, dtype=torch.float64).mul_(0.4).requires_grad_(),
        "lin": nn.Linear(8, 8).double(),
        "bn": nn.BatchNorm1d(8).double(),
        "seq": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()).double(),
        "m0": Layer().double(),
        "m1": Layer().double(),
        "m2": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()).double(),
    }
    names["trained"] = [one for one in names.values() if isinstance(one, nn.Module)]
    if with_regions:
        ckpt_hooks.checkpoint_module(names["m0"])
        ckpt_hooks.checkpoint_module(names["m1"], policy=ckpt_hooks.policies.dots_saveable)
        ckpt_hooks.checkpoint_module(names["m2"], recorded=True)
    aten, policies = torch.ops.aten, ckpt_hooks.policies
    return {
        "__name__": __name__,
        **names,
        **{name: getattr(ckpt_hooks, name) for name in ckpt_hooks.__all__},
        "functools": functools,
        "torch": torch,
        "F": F,
        "aten": aten,
        "policies": policies,
        "Square": Square,
        "keep_products": keep_products,
        "keep_by_name": keep_by_name,
        "made": policies.save_every(aten.mm.default, 2),
    }


def load(program: Program, with_regions: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function of a program, and the names it runs in."""
    source, names = program.source(with_regions), namespace(with_regions)
    file = f"<compiled program {program.seed}, {'with' if with_regions else 'without'} regions>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return names["program"], names


def parameters_of(names: dict[str, Any]) -> list[torch.Tensor]:
    return [names["w0"], names["w1"], *(p for module in names["trained"] for p in module.parameters())]


def inputs_of(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    x, y = torch.randn(2, rows, 8, dtype=torch.float64).unbind()
    torch.manual_seed(seed + 1)  # the seed of the program's own random numbers
    return x.clone().requires_grad_(), y.clone().requires_grad_()


def loss_of(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum((one * torch.arange(1.0, one.numel() + 1).view(one.shape).cos()).sum() for one in results)


def run(function: Callable[..., Any], names: dict[str, Any]) -> list[list[torch.Tensor | None]]:
    """Returns results, gradients and buffers after each call."""
    found = []
    for number, (rows, k, flag) in enumerate(CALLS):
        x, y = inputs_of(rows, 100 * number)
        results = function(x, y, k, flag)
        loss_of(results).backward()
        buffers = [b.clone() for module in names["trained"] for b in module.buffers()]
        gradients = [None if p.grad is None else p.grad.clone() for p in (x, y, *parameters_of(names))]
        found.append([*(one.detach().clone() for one in results), *gradients, *buffers])
    return found


def difference(expected: list[Any], found: list[Any]) -> str:
    """Returns where the second differs, or an empty string."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            if a is None or b is None:
                if a is not b:
                    return f"call {number}, tensor {place}: {a} and {b}"
            elif not torch.allclose(a, b, rtol=1e-7, atol=1e-9, equal_nan=True):
                return f"call {number}, tensor {place}: off by {(a - b).abs().max():.3g}"
    return ""


def numeric_difference(function: Callable[..., Any], names: dict[str, Any]) -> str:
    """Returns how derivatives differ from finite differences, or an empty string."""
    rows, k, flag = CALLS[0]
    x, y = inputs_of(rows, 500)
    toward, step = torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), 1e-6

    def value(shift: float) -> torch.Tensor:
        torch.manual_seed(501)
        return loss_of(function((x.detach() + shift * toward).requires_grad_(), y, k, flag))

    torch.manual_seed(501)
    leaf = x.detach().clone().requires_grad_()
    loss_of(function(leaf, y, k, flag)).backward()
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    exact, numeric = (gradient * toward).sum().item(), ((value(step) - value(-step)) / (2 * step)).item()
    return "" if abs(exact - numeric) <= 1e-4 * max(1.0, abs(exact)) else f"derivative {exact:.9g}, numeric {numeric:.9g}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        seed: Of the program.
        kind: ``"same"``; ``"drawn otherwise"`` where random numbers differ and derivatives are right; ``"both raise"``;
            ``"as the compiler"`` where the compiled program without regions differs from eager in the same way; ``"raises"``
            where the program with regions raises alone; ``"differs"``, which is a fault.
        explanation: What differs.
        breaks: The number of graph breaks.
    """

    seed: int
    kind: str
    explanation: str = ""
    breaks: int = 0


def observed(program: Program, with_regions: bool, backend: str | None) -> tuple[Any, str]:
    """Returns what a program shows, and its error."""
    torch._dynamo.reset()
    function, names = load(program, with_regions)
    try:
        return run(function if backend is None else torch.compile(function, backend=backend), names), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def check(program: Program, backend: str = "aot_eager") -> Verdict:
    """Runs a program in eager without regions, and compiled with regions, and compares."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _checked(program, backend)


def _checked(program: Program, backend: str) -> Verdict:
    expected, error = observed(program, False, None)
    torch._dynamo.utils.counters.clear()
    found, error_too = observed(program, True, backend)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())

    def verdict(kind: str, explanation: str = "") -> Verdict:
        return Verdict(program.seed, kind, explanation, breaks)

    if error_too:
        alone = not error and not observed(program, False, backend)[1]
        return verdict("raises" if alone else "both raise", error_too)
    if error:
        return verdict("differs", f"raised nothing, expected {error}")
    explanation = difference(expected, found)
    if not explanation:
        return verdict("same")
    compiled, _ = observed(program, False, backend)
    if compiled is not None and not difference(compiled, found):
        return verdict("same" if program.is_random else "as the compiler", explanation)
    if program.is_random:
        torch._dynamo.reset()
        function, names = load(program, True)
        numeric = numeric_difference(torch.compile(function, backend=backend), names)
        if not numeric:
            return verdict("drawn otherwise", explanation)
        explanation += f"; {numeric}"
    return verdict("differs", explanation)


def shrunk(program: Program, backend: str = "aot_eager") -> Program:
    """Returns a program without the statements that its verdict can do without."""
    wanted = check(program, backend)
    progress = True
    while progress:
        progress = False
        for smaller in program.smaller():
            found = check(smaller, backend)
            if found.kind == wanted.kind and found.explanation[:25] == wanted.explanation[:25]:
                program, progress = smaller, True
                break
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.compiled", description=__doc__)
    parser.add_argument("--programs", type=int, default=180, help="how many programs to run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each program takes the next one")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    parser.add_argument("--scripts", type=int, default=1, help="how many of those that differ to shrink and print")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    write, start, verdicts = sys.stdout.write, time.monotonic(), []
    for seed in range(options.seed, options.seed + options.programs):
        found = check(generate(seed), options.backend)
        verdicts.append(found)
        if found.kind != "same":
            write(f"{seed:8} {found.kind}: {' '.join(found.explanation.split())[:200]}\n")
            sys.stdout.flush()
    write(f"{len(verdicts)} programs in {time.monotonic() - start:.0f} s, {sum(v.breaks > 0 for v in verdicts)} with breaks\n")
    for kind, number in Counter(verdict.kind for verdict in verdicts).most_common():
        write(f"{number:6} {kind}\n")
    failures = [verdict for verdict in verdicts if verdict.kind == "differs"]
    for verdict in failures[: options.scripts]:
        write(f"\n{shrunk(generate(verdict.seed), options.backend).source(True)}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
