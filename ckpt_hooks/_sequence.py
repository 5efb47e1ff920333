"""The operators of a selective region in the order in which they ran, and comparing those of a recompute with them.

An output that is kept is known by the place of its operator in that order, and stands in for the operator that comes to that
place in a recompute. So a recompute must run the same operators. Two things are compared. Each operator with the one at its
place, as it runs. And, when the recompute has ended and before anything of it is handed out, how many operators ran before
which of the tensors that the region saves: one that is left out has those behind it move up, and where these are of its own
kind, and nothing else runs before the recompute stops, then the operators alone do not tell.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from ._operators import Kind
from ._runtime.frame import RegionPath, format_path
from .errors import DeterminismError

__all__ = ["OperatorSequence"]


class OperatorSequence:
    """The operators of one forward.

    Attributes:
        operators: Those that ran, in order.
        marks: Of each of them, how many tensors the region had saved before it ran.
        path: That of the region, once it is known.
        complete: Whether forward has ended.
    """

    __slots__ = ("complete", "marks", "operators", "path")

    def __init__(self) -> None:
        self.operators: list[Any] = []
        self.marks: list[int] = []
        self.path: RegionPath | None = None
        self.complete = False

    def place_after(self, saved: int) -> int:
        """Returns the place of the first operator that ran when the region had saved that many tensors."""
        return bisect_left(self.marks, saved)

    def compare(self, place: int, operator: Any, kind: Kind) -> DeterminismError | None:
        """Looks at an operator that is not the very one that forward ran; returns an error if it should have been.

        Args:
            place: Where it stands in the sequence of the recompute.
            operator: What runs there.
            kind: Its kind.
        """
        if place >= len(self.operators):
            if not self.complete:  # a recompute in the middle of forward
                return None
            expected = "nothing more"
        else:
            before = self.operators[place]
            # Where threads besides the main one run regions, draws get a generator, by another overload.
            if kind in (Kind.RANDOM, Kind.FACTORY) and getattr(before, "overloadpacket", None) is operator.overloadpacket:
                return None
            expected = str(before)
        return self._error(place, expected, str(operator))

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
        return self._error(place, f"{operator} after {expected[place]} saved tensors", now)

    def _error(self, place: int, expected: str, found: str) -> DeterminismError:
        region = format_path(self.path)
        name = f"region {'/'.join(region)!r}: " if region else ""
        return DeterminismError(
            f"{name}operator {place} of the recompute is {found}, where forward ran {expected}. Outputs that a policy kept "
            "are known by their place in the sequence of operators, so a recompute must run the same ones. Usual causes: a "
            "cache that forward filled and the recompute finds there (fill it before the region), a branch on "
            "is_recomputing() or on a global that changed, and operators for logging in one of the two runs only.",
            region=region,
            index=place,
            expected=expected,
            found=found,
        )
