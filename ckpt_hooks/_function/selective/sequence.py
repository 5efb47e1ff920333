"""The operators of a selective region in the order of their run, and their comparison with the operators of a recompute.

A kept output is known by the place of its operator in that order, and stands in for the operator at the same place in a
recompute. So a recompute must run the same operators. Two things are compared. First, each operator with the operator of
forward at its place, as it runs. Second, at the end of the recompute, before any value is handed out, the number of operators
before each saved tensor of the region. For if an operator is left out, the operators behind move up; where these are of the
same kind, and nothing else runs before the recompute stops, the operators alone do not tell.

A recompute with other operators ends, and another recompute lays its operators beside the operators of forward
(:mod:`.alignment`), by the nodes of autograd's graph made before each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._core.descriptions import RegionPath, format_path
from ckpt_hooks._torch.autograd import sequence_number
from ckpt_hooks.errors import DeterminismError

#: Counts when an operator ran: tensors saved by the region, nodes of autograd's graph made by the region.
Counts = tuple[int, int]


class OperatorSequence:
    """The operators of one run of a region."""

    __slots__ = ("_end", "_start", "casts", "complete", "marks", "nodes", "operators", "path")

    def __init__(self) -> None:
        self.operators: list[Any] = []  # the operators, in order
        self.marks: list[int] = []  # for each operator, the number of tensors saved by the region before
        self.nodes: list[int] = []  # for each operator, autograd's number of the next node
        # Places with a parameter cast before them, which autocast keeps: one run may find the cast of the other.
        self.casts: list[int] = []
        self.path: RegionPath | None = None  # the region's path, once known
        self.complete = False  # whether forward has ended
        self._start = self._end = 0

    def begin(self) -> None:
        """Begins to count nodes."""
        self._start = sequence_number()

    def end(self) -> None:
        """Ends the run, by an exception or not."""
        self._end = sequence_number()

    def note_cast(self) -> None:
        """Notes the cast of a parameter, which makes a node in one of the two runs only, perhaps."""
        if torch.is_grad_enabled():
            self.casts.append(len(self.operators))

    def nodes_at(self, place: int, found: Sequence[int] = ()) -> int:
        """Returns the number of nodes made by the run before a place, without casts of parameters."""
        end = self._end if place >= len(self.nodes) else self.nodes[place]
        return end - self._start - bisect_right(self.casts, place) - bisect_left(found, end)

    def counts(self, found: Sequence[int] = ()) -> list[Counts]:
        """Returns the counts of each operator, without the nodes in ``found``."""
        return [(saved, self.nodes_at(place, found)) for place, saved in enumerate(self.marks)]

    def made(self, number: int) -> bool:
        """Whether the run made the node with a number."""
        return self._start <= number < self._end

    def is_apart_from(self, other: OperatorSequence) -> bool:
        """Whether the nodes of this run and of a running one share no number: each thread counts by itself."""
        return self._end <= other._start or sequence_number() <= self._start

    def place_after(self, saved: int) -> int:
        """Returns the place of the first operator run when the region had saved this number of tensors."""
        return bisect_left(self.marks, saved)

    def compare(self, place: int, operator: Any) -> DeterminismError | None:
        """Compares an operator with forward's at the same place; returns an error if they differ."""
        if place >= len(self.operators):
            if not self.complete:  # a recompute in the middle of forward
                return None
        elif self.operators[place] is operator:
            return None
        return self.error(place, self.name_at(place), str(operator))

    def compare_marks(self, found: Sequence[int], index: int) -> DeterminismError | None:
        """Compares an ended recompute with forward by the tensors saved before each operator; returns the error, if any."""
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
        """Returns the error for a recompute with other operators than forward."""
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
