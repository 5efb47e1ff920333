"""The fuzzing itself: programs one after the other, and what came of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from ckpt_hooks import errors

from .features import CORE
from .generate import generate
from .implementations import Implementation, under_mode
from .observe import difference, observe, plain
from .prelude import copied, unchanged
from .programs import Program
from .scripts import load, load_on, script
from .shrink import shrink

__all__ = ["Difference", "Tally", "check", "fuzz", "is_failure", "minimal"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A program that is not what it was.

    Attributes:
        seed: Makes the program.
        kind: ``"output"``, ``"gradient"``, ``"stream"`` and so on, ``"raised"``, or ``"no error"``. The latter is ``"lenient"``
            where plain autograd complains of a write to a saved tensor and the gradients are those that were before the write,
            and ``"silent"`` where they are not. ``"strict"`` is a complaint of a write that plain autograd has not; ``"kept"``
            is one of a write to what the policy of a recorded region had kept;
            ``"clear error"`` is any other error of the package's own;
            ``"unnoticed"`` is what plain autograd makes of a write to a saved tensor that no version tells of, as where batch
            normalisation updates what it read in evaluation, where a leaf that autograd saved gets other storage, or where
            hooks of the program keep the tensor itself: the other run may have the gradients from before the write.
            ``"shifted"`` is a complaint, under a policy, of operators that run in forward only, or what comes of swallowing
            it. ``"unfreed"`` is a way into the graph of a step that failed in a recompute, which plain autograd has freed;
            the runs are alike where neither frees it. ``"overlooked"`` is any other difference that is not there without the
            writes after forward. ``"mode"`` is one that torch itself makes where regions run under a dispatch mode that does
            nothing.
        explanation: What differs.
        error: Type of the error that plain autograd raises, or None.
    """

    seed: int
    kind: str
    explanation: str
    error: str | None


def is_failure(found: Difference | None, features: frozenset[str]) -> bool:
    """Whether a difference is a fault, and not a limit that a runtime may have.

    To go on with the values from before a write is no fault, where plain autograd complains, or has not noticed. To complain
    where plain autograd does not is none where programs write to what regions were given, or where the memory that forward
    saw is gone: a rerun needs more than plain autograd does. Nor is it one to complain of writes to what a policy keeps as it
    is, to overlook a write to what a region read from outside and nothing saved, nor what torch does otherwise under any
    dispatch mode, nor to complain of operators that a policy met in forward only, nor to keep the graph of a failed step.
    """
    limits = {
        "kept": features,
        "lenient": features,
        "mode": features,
        "unfreed": features,
        "unnoticed": features,
        "shifted": features & {"first_run_only", "side_effects"},
        "strict": features & {"closure_mutation", "input_mutation", "stale_saves", "step_in_backward", "storages"},
        "overlooked": features & {"closure_mutation", "stale_saves"},
    }
    return found is not None and not limits.get(found.kind)


def check(
    program: Program, implementation: Implementation, device: str | None = None
) -> tuple[Difference | None, tuple[str, str] | None]:
    """Runs a program twice; returns how the runs differ, if so, and the error of the plain one, if any."""
    source = program.source()
    loaded = load if device is None else functools.partial(load_on, device)
    try:
        function = loaded(source, program.seed)
    except SyntaxError as error:
        return None, ("SyntaxError", str(error))
    expected, other = observe(function, plain), observe(function, implementation.start())
    found = difference(expected, other)
    error = expected[1]
    if found is None or difference(expected, observe(function, plain)) is not None:  # the program is of two minds itself
        return None, error
    kind, explanation = found
    if implementation.has_modes and difference(observe(function, under_mode), other) is None:
        return Difference(program.seed, "mode", explanation, error and error[0]), error
    if kind == "raised" and _is_of_write(*other[1]):
        kind = "kept" if "kept by the policy" in other[1][1] else "strict"
    elif kind == "raised" and implementation.has_modes and "is_recomputing" in source and _may_be_shifted(other[1][0], source):
        kind = "shifted"
    elif kind == "raised" and hasattr(errors, other[1][0]):
        kind = "clear error"
    elif kind != "no error" and program.after:
        unwritten = dataclasses.replace(program, after=[])
        kind = kind if check(unwritten, implementation, device)[0] else "overlooked"
    # On the host, hooks of the program may keep the tensor itself, and what it holds later.
    copying = source.replace("save_on_cpu()", "saved_tensors_hooks(copied, unchanged)").replace("(t.detach(),)", "(copied(t),)")
    if kind != "no error" and ("BatchNorm" in source or copying != source):
        intended = observe(_with_copies(loaded(copying, program.seed)), plain)
        # With some of it in regions and some not, the other run is neither of the two. Copies of what rrelu saves are noise.
        is_stale = "rrelu" not in source.lower() and difference(intended, expected) is not None
        if is_stale or difference(intended, other) is None:
            kind = "unnoticed"
    if kind != "no error" and ".data" in source:
        # What hooks hand out for a second backward of a gradient stays at its memory.
        runs = (observe(function, _with_copies_inside), observe(_with_copies(function, unchanged), plain))
        kind = "unnoticed" if any(difference(one, other) is None for one in runs) else kind
    if kind == "no error" and program.failure is not None and "through the graph a second time" in error[1]:
        retaining = loaded(source.replace(".backward()", ".backward(retain_graph=True)"), program.seed)
        kind = kind if difference(observe(retaining, plain), observe(retaining, implementation.start())) else "unfreed"
    if kind == "no error" and (_is_of_write(*error) or _is_of_swap(*error)):
        intended = observe(_with_copies(function), plain)
        # Without an answer to compare with it gets the benefit of the doubt: rrelu saves noise before it has filled it.
        unknown = intended[1] is not None or "rrelu" in source.lower()
        kind = "lenient" if unknown or difference(intended, other) is None else "silent"
    return Difference(program.seed, kind, explanation, error and error[0]), error


def _is_of_write(name: str, message: str) -> bool:
    marks = ("modified by an inplace operation", "modified inplace", "detached in-place")
    return name == "MutationError" or any(mark in message for mark in marks)


def _is_of_swap(name: str, message: str) -> bool:
    return "use_count" in message or "poisoned by swap_tensors" in message


def _may_be_shifted(name: str, source: str) -> bool:
    # Where the program swallows the error, names that the rest would have defined are missing.
    swallowed = name in ("NameError", "UnboundLocalError") and ("except " in source or "suppress(" in source)
    return name == "DeterminismError" or swallowed


def _with_copies(function, pack=copied):
    """Returns a program whose saved tensors are copies, to which nothing is written, or what another pack hook returns."""

    def program(run, see):
        with torch.autograd.graph.saved_tensors_hooks(pack, unchanged):
            function(run, see)

    return program


def _with_copies_inside(function, *args, **kwargs):
    """Runs a function as no region, but with copies of what is saved in it."""
    with torch.autograd.graph.saved_tensors_hooks(copied, unchanged):
        return function(*args, **kwargs)


@dataclasses.dataclass
class Tally:
    """What came of a number of programs.

    Attributes:
        programs: How many there were.
        raising: How many raise under plain autograd.
        differences: Those that differ.
    """

    programs: int = 0
    raising: int = 0
    differences: list[Difference] = dataclasses.field(default_factory=list)

    def by_kind(self) -> Counter[str]:
        return Counter(found.kind for found in self.differences)


def fuzz(
    implementation: Implementation,
    seeds: Iterable[int],
    features: frozenset[str] = CORE,
    tally: Tally | None = None,
    device: str | None = None,
) -> Iterator[Difference | None]:
    """Runs the program of each seed; yields after each one how it differs, or None.

    Args:
        implementation: What to run regions with.
        seeds: Of the programs.
        features: What they are made of.
        tally: Where to count.
        device: Where the tensors of programs are.
    """
    tally = Tally() if tally is None else tally
    for seed in seeds:
        found, error = check(generate(seed, features), implementation, device)
        tally.programs += 1
        tally.raising += error is not None
        if found is not None:
            tally.differences.append(found)
        yield found


def minimal(
    found: Difference, implementation: Implementation, features: frozenset[str] = CORE, device: str | None = None
) -> str:
    """Returns a short script that shows a difference; of a program on a device, its function alone is to be had."""

    def still(program: Program) -> bool:
        now, error = check(program, implementation, device)
        if now is None or now.kind != found.kind or now.error != found.error:
            return False
        if found.kind in ("raised", "clear error", "strict", "kept"):
            return now.explanation.split(":")[0] == found.explanation.split(":")[0]
        # Shrinking must not trade the error that plain autograd raised for another one.
        return error is None or now.explanation[:70] == found.explanation[:70]

    program = shrink(generate(found.seed, features), still)
    now, _ = check(program, implementation, device)
    explanation = (now or found).explanation.splitlines()[0]
    return script(program.source(), implementation, f"Seed {found.seed} under {implementation.name}: {explanation}")
