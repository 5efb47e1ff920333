"""The order of operators and regions inside of a region: counts both, and finds the ones of forward in a recompute."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from ckpt_hooks._torch.autograd import graph_task_id

__all__ = ["Order", "Position"]


class Position(NamedTuple):
    """The position of a run of an operator.

    Attributes:
        place: The number of operators before, in this forward or this recompute.
        policy_index: The index at which a policy is asked, or was in forward, if any.
        repeats: In a recompute, region and place of forward's operator, if known.
    """

    place: int
    policy_index: int | None
    repeats: tuple[int, int] | None


class _Ran(NamedTuple):
    """An operator of forward, as a recompute looks for it.

    Attributes:
        name: The operator's name.
        is_loose: Whether another run of the same program may have the operator or not: views, and casts of parameters.
        policy_index: The index at which a policy is asked about the operator, if any.
    """

    name: str
    is_loose: bool
    policy_index: int | None


class _Entry:
    """One entry of a region in forward."""

    __slots__ = ("id", "inside", "operators")

    def __init__(self, number: int) -> None:
        self.id = number
        self.inside: list[_Entry] = []
        self.operators: list[_Ran] = []


class _Counts:
    """The counts of one run of a region, of forward or of a recompute.

    Attributes:
        num_operators: The number of operators.
        num_asked: The number of operators that policies are asked about, those of regions inside included.
        num_inside: The number of regions inside.
        found: The place in forward of the latest operator of a rerun; None if forward had no such operator there.
    """

    __slots__ = ("_next", "found", "num_asked", "num_inside", "num_operators")

    def __init__(self) -> None:
        self.num_operators = self.num_asked = self.num_inside = self._next = 0
        self.found: int | None = None

    def start_again(self) -> None:
        """Looks for operators and regions from forward's first one on."""
        self._next = self.num_inside = 0

    def find(self, name: str, operators: list[_Ran], *, is_loose: bool) -> None:
        """Finds the next operator of a rerun among those of forward.

        Args:
            name: The operator's name.
            operators: The operators of forward.
            is_loose: Whether either run may lack the operator.
        """
        self.found = None
        for place in range(self._next, len(operators)):
            other = operators[place]
            if other.name == name and other.is_loose == is_loose:
                self.found, self._next = place, place + 1
                return
            # Past loose ones: autograd makes some views in one run alone, and autocast keeps a parameter's cast for a while.
            if not other.is_loose:
                return


class Order:
    """The order of operators and regions inside of one region.

    Attributes:
        repeats: In a rerun of a region around, the number of forward's entry of this region, if known.
    """

    __slots__ = ("_around", "_counts", "_entry", "_runs", "_task", "repeats")

    def __init__(self, number: int, outer: Order | None, *, in_recompute: bool) -> None:
        self._entry = _Entry(number) if outer is None else outer._enter_inside(number, in_recompute=in_recompute)
        self.repeats = None if self._entry.id == number else self._entry.id
        # Those of forward, then those of each recompute that runs: one may run in the middle of forward, or of another.
        self._counts = [_Counts()]
        # The region around whose policy is asked about operators of this region, too.
        self._around = outer
        self._task = graph_task_id()
        # Of each operator on the tape: the number of values before; region and place in forward, if known; the policy's index.
        self._runs: list[tuple[int, tuple[int, int] | None, int | None]] = []

    def share_tape(self, outer: Order) -> None:
        """Notes that a recorded region is on the tape of the region around: the replay of one runs operators of the other."""
        # The policy around is not asked about operators of this region, so it need not hear of these.
        self._runs, self._around = outer._runs, outer._around

    def begin_recompute(self) -> None:
        """A recompute begins."""
        self._counts.append(_Counts())

    def end_recompute(self) -> None:
        """A recompute ended."""
        self._counts.pop()

    def start_again(self) -> None:
        """A rerun begins with the first operator, perhaps for the second time in one recompute."""
        self._counts[-1].start_again()

    def find(self, name: str, *, is_loose: bool) -> None:
        """Finds forward's operator which a rerun is about to repeat, or to take the kept output of.

        Args:
            name: The operator's name.
            is_loose: Whether another run of the same program may have the operator or not.
        """
        self._counts[-1].find(name, self._entry.operators, is_loose=is_loose)

    def note(self, name: str, asked_in: int | None, number: int | None, *, is_loose: bool, is_found: bool) -> Position:
        """Notes an operator which the program ran, in forward or in a rerun.

        Args:
            name: The operator's name.
            asked_in: The graph task which ran the operator; None for an operator that policies are not asked about.
            number: In a recorded region, the number of values on the tape before; else None.
            is_loose: Whether another run of the same program may have the operator or not.
            is_found: Whether :meth:`find` has heard of the operator.
        """
        counts, operators = self._counts[-1], self._entry.operators
        place, counts.num_operators = counts.num_operators, counts.num_operators + 1
        index: int | None = None
        repeats: tuple[int, int] | None = None
        if self._repeats_forward():
            if not is_found:
                self.find(name, is_loose=is_loose)
            if counts.found is not None:
                repeats, index = (self._entry.id, counts.found), operators[counts.found].policy_index
            source = repeats
        else:
            index = None if asked_in is None else self._next_index(asked_in)
            source = self._entry.id, len(operators)
            operators.append(_Ran(name, is_loose, index))
        if number is not None:
            self._runs.append((number, source, index))
        return Position(place, index, repeats)

    def note_again(self, number: int | None) -> Position:
        """Notes an operator which a replay ran.

        Args:
            number: The number of the operator on the tape; None for an operator of a custom function.
        """
        counts = self._counts[-1]
        place, counts.num_operators = counts.num_operators, counts.num_operators + 1
        at = -1 if number is None else bisect.bisect_left(self._runs, (number,)) - 1
        _, repeats, index = self._runs[at] if at >= 0 else (0, None, None)
        return Position(place, index, repeats)

    def _next_index(self, task: int) -> int | None:
        """Returns the index at which a policy is asked about an operator of a graph task; regions around count it, too."""
        index: int | None = None
        order: Order | None = self
        while order is not None:
            if task == order._task:  # policies are not asked in a backward inside the region
                counts = order._counts[-1]
                if order is self:
                    index = counts.num_asked
                counts.num_asked += 1
            order = order._around
        return index

    def _enter_inside(self, number: int, *, in_recompute: bool) -> _Entry:
        """Returns the entry of a region inside; in a rerun that of forward with the same place."""
        inside, counts = self._entry.inside, self._counts[-1]
        at, counts.num_inside = counts.num_inside, counts.num_inside + 1
        if in_recompute:
            return inside[at] if self._repeats_forward() and at < len(inside) else _Entry(number)
        inside.append(_Entry(number))
        return inside[-1]

    def _repeats_forward(self) -> bool:
        """Whether the program runs forward's operators again, all in their order: in a rerun of this region, or one around."""
        return len(self._counts) > 1 or self.repeats is not None  # a replay runs no program that enters regions
