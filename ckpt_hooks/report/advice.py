"""Advice: a waste, the bytes that it costs, and a line of code to write."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

from .formatting import Table, format_bytes

__all__ = ["Advice", "Waste", "table_of_advice"]


class Waste(str, enum.Enum):
    """A kind of waste."""

    #: A region alone holds a tensor which needs no gradient, for the recompute; a closure's tensor is held with a copy.
    HELD_INPUT = "input held for recompute"
    #: A region drops nothing, or next to nothing.
    SAVES_NOTHING = "drops nothing"
    #: A region around one leaf, which drops nothing or next to nothing.
    LEAF = "region around a leaf"
    #: A policy by which no region has kept anything.
    UNMATCHED_POLICY = "policy matches nothing"
    #: A result of a region which something outside holds in backward.
    HELD_OUTSIDE = "result held from outside"
    #: Regions in regions in regions.
    NESTED = "nested three times"


@dataclasses.dataclass(frozen=True)
class Advice:
    """A waste, and what following the advice gives.

    Attributes:
        waste: The kind.
        where: The regions, as in ``"layers.0-11 Block"``.
        count: Their number.
        site: The line which entered them, or which made the result; None where unknown.
        peak_nbytes: How much lower the peak of the step is without the waste; 0 where that is not known.
        recomputed_nbytes: The bytes which are no longer computed again.
        code: A line of code to write.
    """

    waste: Waste
    where: str
    count: int
    site: str | None
    peak_nbytes: int
    recomputed_nbytes: int
    code: str

    def to_json(self) -> dict[str, Any]:
        """Returns the advice as values for ``json.dumps``."""
        return {**dataclasses.asdict(self), "waste": self.waste.value}


def table_of_advice(advice: Sequence[Advice]) -> Iterator[Table]:
    """Yields a table of advice, if there is any."""
    rows = [
        [
            format_bytes(one.peak_nbytes) if one.peak_nbytes else "",
            format_bytes(one.recomputed_nbytes) if one.recomputed_nbytes else "",
            one.waste.value,
            f"x{one.count} {one.where}" if one.count > 1 else one.where,
            one.site or "",
            one.code,
        ]
        for one in advice
    ]
    if rows:
        yield Table(["less peak", "less again", "advice", "region", "line", "write"], rows, (0, 1), (3, 5))
