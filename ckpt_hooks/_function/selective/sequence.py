"""The operators of a selective region in the order in which they ran, and comparing those of a recompute with them.

An output that is kept is known by the place of its operator in that order, and stands in for the operator that comes to that
place in a recompute. So a recompute must run the same operators. Two things are compared. Each operator with the one at its
place, as it runs. And, when the recompute has ended and before anything of it is handed out, how many operators ran before
which of the tensors that the region saves: one that is left out has those behind it move up, and where these are of its own
kind, and nothing else runs before the recompute stops, then the operators alone do not tell.

A recompute that runs others ends, and another one lays its operators beside those of forward
(:mod:`.alignment`), by the nodes of autograd's graph that were made before each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._core.paths import RegionPath, format_path
from ckpt_hooks._operators.facts import same_operator
from ckpt_hooks._torch import sequence_number
from ckpt_hooks.errors import DeterminismError

__all__ = ["Counts", "OperatorSequence"]

#: What was there when an operator ran: tensors that the region had saved, nodes of autograd's graph that it had made.
Counts = tuple[int, int]


class OperatorSequence:
    """The operators of one run of a region.

    Attributes:
        operators: Those that ran, in order.
        marks: Of each of them, how many tensors the region had saved before it ran.
        nodes: Of each of them, autograd's number of the next node when it ran.
        casts: Before which places parameters were cast that autocast then keeps: one run may find the cast of the other.
        path: That of the region, once it is known.
        complete: Whether forward has ended.
    """

    __slots__ = ("_end", "_start", "casts", "complete", "marks", "nodes", "operators", "path")

    def __init__(self) -> None:
        self.operators: list[Any] = []
        self.marks: list[int] = []
        self.nodes: list[int] = []
        self.casts: list[int] = []
        self.path: RegionPath | None = None
        self.complete = False
        self._start = self._end = 0

    def begin(self) -> None:
        """Begins to count nodes."""
        self._start = sequence_number()

    def end(self) -> None:
        """Ends the run, by an exception or not."""
        self._end = sequence_number()

    def note_cast(self) -> None:
        """Notes that a parameter is cast, which makes a node that the other run may find made."""
        if torch.is_grad_enabled():
            self.casts.append(len(self.operators))

    def nodes_at(self, place: int, found: Sequence[int] = ()) -> int:
        """Returns how many nodes the run had made when it came to a place, but for casts of parameters.

        Args:
            place: The place; that behind the last one for the end of the run.
            found: Numbers of nodes that do not count, in order.
        """
        end = self._end if place >= len(self.nodes) else self.nodes[place]
        return end - self._start - bisect_right(self.casts, place) - bisect_left(found, end)

    def counts(self, found: Sequence[int] = ()) -> list[Counts]:
        """Returns of each operator what was there when it ran; nodes that were found do not count."""
        return [(saved, self.nodes_at(place, found)) for place, saved in enumerate(self.marks)]

    def made(self, number: int) -> bool:
        """Whether the run made the node of a number."""
        return self._start <= number < self._end

    def is_apart_from(self, other: OperatorSequence) -> bool:
        """Whether no node of another run, which goes on, has the number of one of this: threads count by themselves."""
        return self._end <= other._start or sequence_number() <= self._start

    def place_after(self, saved: int) -> int:
        """Returns the place of the first operator that ran when the region had saved that many tensors."""
        return bisect_left(self.marks, saved)

    def compare(self, place: int, operator: Any) -> DeterminismError | None:
        """Looks at an operator that is not the very one that forward ran; returns an error if it should have been.

        Args:
            place: Where it stands in the sequence of the recompute.
            operator: What runs there.
        """
        if place >= len(self.operators):
            if not self.complete:  # a recompute in the middle of forward
                return None
        elif same_operator(self.operators[place], operator):
            return None
        return self.error(place, self.name_at(place), str(operator))

    def compare_marks(self, found: Sequence[int], index: int) -> DeterminismError | None:
        """Compares when operators ran in a recompute that has ended; returns an error if it was not as in forward.

        Args:
            found: Of each operator that the recompute ran, how many tensors it had saved before.
            index: The last tensor that was wanted of it; what ran after that does not matter.
        """
        expected = self.marks
        total, total_found = bisect_right(expected, index), bisect_right(found, index)
        if total == total_found and expected[:total] == found[:total]:
            return None
        shared = min(total, total_found)
        place = next((place for place in range(shared) if expected[place] != found[place]), shared)
        operator = str(self.operators[place])
        now = "missing" if place == total_found else f"{operator} after {found[place]} saved tensors"
        return self.error(place, f"{operator} after {expected[place]} saved tensors", now)

    def name_at(self, place: int, missing: str = "nothing more") -> str:
        """Returns the name of an operator, for an error."""
        return str(self.operators[place]) if place < len(self.operators) else missing

    def error(self, place: int, expected: str, found: str) -> DeterminismError:
        """Returns the error for a recompute that is not as forward.

        Args:
            place: Where the recompute parts from forward.
            expected: What forward ran there.
            found: What the recompute ran there.
        """
        region = format_path(self.path)
        name = f"region {'/'.join(region)!r}: " if region else ""
        return DeterminismError(
            f"{name}operator {place} of the recompute is {found}, where forward ran {expected}. Under a policy a recompute "
            "has to run the operators of forward in their order. Only those through which no gradient flows, and which draw no "
            "random numbers, may run in one of the two alone (a table that is built once, operators for logging). Usual "
            "causes: a branch on is_recomputing(), on a global or on an attribute that changed between forward and backward; a "
            "cache of tensors that require grad and that is gone when backward runs (run backward inside of "
            "`parametrize.cached()`, or fill it in the region); operators that do not return the same twice. Pass "
            "`debug=True` to see the operators of both runs.",
            region=region,
            index=place,
            expected=expected,
            found=found,
        )
