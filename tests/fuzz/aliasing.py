"""A second differential fuzzer, of memory alone: views of views, writes through them, regions that share what is written to.

``python -m tests.fuzz.aliasing --programs 5000 --impl ours-region`` runs it. The programs of :mod:`tests.fuzz.generate` know
many operators and leave alone what regions share; in those of :mod:`tests.fuzz.aliasing_programs` regions close over tensors
that are written to before them, in them and after them.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import ckpt_hooks

from .aliasing_programs import Node, Program, generate
from .implementations import _OF_OURS, _READY_MADE, IMPLEMENTATIONS, Arbitrary, Implementation, _number_of
from .observe import difference, observe, plain
from .scripts import load

__all__ = ["Verdict", "check", "recorded", "script", "shrunk"]


def recorded(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what runs regions that no function frame could run again: ``run``, or the share of ``mixed`` that records."""
    if not getattr(run, "__qualname__", "").startswith("mixed."):
        return run

    def record(function: Callable[..., Any]) -> Any:
        number = _number_of(function)
        draw = random.Random(number)
        policy = draw.choice([None, Arbitrary(number, draw.choice([15, 50, 85, 100])), draw.choice(_READY_MADE + _OF_OURS)])
        with ckpt_hooks.checkpoint_region(policy=policy):
            return function()

    return record


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        seed: Of the program.
        kind: ``"same"``; ``"both raise"``; ``"strict"`` where a region complains of a write after it and plain autograd does
            not, a limit that is documented; ``"lenient"`` where plain autograd complains of a write and regions do not;
            ``"differs"`` for anything else, which is a fault.
        explanation: What differs.
        error: The type of the error that plain autograd raises, or None.
    """

    seed: int
    kind: str
    explanation: str = ""
    error: str | None = None


def _is_of_write(error: tuple[str, str]) -> bool:
    marks = ("modified by an inplace operation", "modified inplace", "detached in-place")
    return error[0] == "MutationError" or any(mark in error[1] for mark in marks)


def check(program: Program, implementation: Implementation) -> Verdict:
    """Runs a program plainly and with regions, and compares."""
    function = load(program.source(), program.seed)
    function.__globals__["recorded"] = recorded
    expected, other = observe(function, plain), observe(function, implementation.start())
    found, error, error_too = difference(expected, other), expected[1], other[1]

    def verdict(kind: str) -> Verdict:
        return Verdict(program.seed, kind, "" if found is None else found[1], error and error[0])

    if error is not None and error_too is not None:
        alike = error[0] == error_too[0] or (_is_of_write(error) and _is_of_write(error_too))
        found = found or (None if alike else ("raised", f"raised {error_too}, expected {error}"))
        return verdict("both raise" if found is None else "differs")
    if found is None:
        return verdict("same")
    if error_too is not None and error_too[0] == "MutationError" and program.is_late:
        return verdict("strict")
    if error is not None and _is_of_write(error):
        return verdict("lenient")
    return verdict("differs" if difference(expected, observe(function, plain)) is None else "same")


def shrunk(program: Program, implementation: Implementation) -> Program:
    """Returns a program without the statements that its verdict can do without."""
    wanted = check(program, implementation)

    def still(other: Program) -> bool:
        try:
            found = check(other, implementation)
        except SyntaxError:
            return False
        alike = found.explanation.split()[:2] == wanted.explanation.split()[:2]
        return alike and (found.kind, found.error) == (wanted.kind, wanted.error)

    def without(nodes: list[Node]) -> Iterator[list[Node]]:
        for place, node in reversed(list(enumerate(nodes))):
            before, after = nodes[:place], nodes[place + 1 :]
            yield before + after
            if node.body or node.results:
                yield before + node.unwrapped() + after
                for drop in range(len(node.results) if len(node.results) > 1 else 0):
                    yield [*before, dataclasses.replace(node, results=node.results[:drop] + node.results[drop + 1 :]), *after]
                for body in without(node.body):
                    yield [*before, dataclasses.replace(node, body=body), *after]

    progress = True
    while progress:
        progress = False
        for nodes in without(program.nodes):
            smaller = dataclasses.replace(program, nodes=nodes)
            if still(smaller):
                program, progress = smaller, True
                break
    return program


def script(program: Program, implementation: Implementation) -> str:
    """Returns a script that fails if the program differs."""
    found = check(program, implementation)
    lines = [f"# Seed {found.seed} under {implementation.name}: {found.kind}: {found.explanation.splitlines()[0][:110]}"]
    lines += ["import torch", "import torch.nn.functional as F", "", "from tests.fuzz.aliasing import recorded"]
    lines += ["from tests.fuzz.observe import difference, observe, plain, see_gradients, see_module"]
    lines += ["from tests.fuzz.prelude import Keeping, Square, Tanh", implementation.source, "", "", program.source(), ""]
    lines += ["found = difference(observe(program, plain), observe(program, run))", "assert found is None, found", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.aliasing", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many programs to run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each program takes the next one")
    parser.add_argument("--impl", choices=list(IMPLEMENTATIONS), default="ours-region", help="what runs the regions")
    parser.add_argument("--scripts", type=int, default=1, help="how many of those that differ to shrink and print")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    faulthandler.enable()
    implementation, start = IMPLEMENTATIONS[options.impl], time.monotonic()
    verdicts = [check(generate(seed), implementation) for seed in range(options.seed, options.seed + options.programs)]
    write = sys.stdout.write
    write(f"{len(verdicts)} programs in {time.monotonic() - start:.0f} s under {implementation.name}\n")
    for kind, number in Counter(verdict.kind for verdict in verdicts).most_common():
        write(f"{number:6} {kind}\n")
    failures = [verdict for verdict in verdicts if verdict.kind == "differs"]
    for verdict in failures[:40]:
        write(f"{verdict.seed:12} {verdict.explanation.splitlines()[0][:110]}\n")
    for verdict in failures[: options.scripts]:
        write(f"\n{script(shrunk(generate(verdict.seed), implementation), implementation)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
