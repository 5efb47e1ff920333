"""Phases of a step: forward, backward, optimizer, and the rest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from .allocations import Change

__all__ = ["Phase", "phases_of"]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a step.

    Attributes:
        name: ``"forward"`` up to a backward, ``"backward"``, ``"optimizer"``, or ``"rest"``.
        begin: The index of its first change.
        end: The index after its last change.
        peak_nbytes: The most bytes in use in it, above those in use when the ledger began.
        end_nbytes: The bytes in use at its end, above those in use when the ledger began.
    """

    name: str
    begin: int
    end: int
    peak_nbytes: int
    end_nbytes: int


def phases_of(changes: Sequence[Change]) -> tuple[Phase, ...]:
    """Returns the phases of a step, in order.

    What allocates nothing, as a pause between two nodes of backward, belongs to the phase before.

    Args:
        changes: The step's allocations and frees.
    """
    runs = []
    for name, numbers in itertools.groupby(range(len(changes)), lambda number: _part_of(changes[number])):
        first, *others = numbers
        runs.append((name, first, first + len(others) + 1))
    found: list[tuple[str, int, int]] = []
    for at, (name, begin, end) in enumerate(runs):
        if name == "rest" and found and all(change.nbytes < 0 for change in changes[begin:end]):
            name = found[-1][0]
        elif name == "rest" and next((later for later, *_ in runs[at + 1 :] if later != "rest"), None) == "backward":
            name = "forward"
        if found and found[-1][0] == name:
            begin = found.pop()[1]
        found.append((name, begin, end))
    if found and found[0][0] == "rest" and all(name != "backward" for name, *_ in found):
        found[0] = "forward", *found[0][1:]
    live = [change.live for change in changes]
    return tuple(Phase(name, begin, end, max(live[begin:end]), live[end - 1]) for name, begin, end in found)


def _part_of(change: Change) -> str:
    place = change.place
    return "backward" if place.node is not None else "optimizer" if place.optimizer is not None else "rest"
