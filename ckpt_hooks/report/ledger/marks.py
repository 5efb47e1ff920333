"""Marks: moments of a step, noted by empty ranges of the profiler, which order them among allocations and frees."""

from __future__ import annotations

import enum
import itertools
import threading
from typing import Any, NamedTuple

from ckpt_hooks._torch.autograd import sequence_number
from ckpt_hooks._torch.profiling import profiler_range

__all__ = ["Mark", "Marks", "Moment"]

_PREFIX = "ckpt_hooks##"


class Moment(enum.Enum):
    """A kind of mark; in parentheses its data."""

    #: A module's forward begins (name, class).
    MODULE_BEGINS = enum.auto()
    MODULE_ENDS = enum.auto()
    #: Forward of a region begins (the :class:`Region`).
    REGION_BEGINS = enum.auto()
    #: ... ends (its number).
    REGION_ENDS = enum.auto()
    RECOMPUTE_BEGINS = enum.auto()
    RECOMPUTE_ENDS = enum.auto()
    #: A region holds a storage from now on (the region, a key for the end, the reason, the address).
    HELD = enum.auto()
    #: A storage that a region does not hold will be needed (the region's number, a key for the end, the address).
    DROPPED = enum.auto()
    #: ... no longer (the region's number, the key).
    LET_GO = enum.auto()
    #: A frame is gone, with all that it held (the region's number).
    FRAME_GONE = enum.auto()
    #: Memory from before the ledger is freed (the address).
    OLDER_FREED = enum.auto()
    #: Storages that hold gradients now (their addresses).
    GRADIENTS = enum.auto()
    #: A call into torch from a line of the program (the line). The range lasts as long as the call.
    CALL = enum.auto()


class Mark(NamedTuple):
    """One mark.

    Attributes:
        moment: The kind.
        data: The data of this kind.
        sequence: The number of the next node of autograd on the ledger's thread; None on another thread.
    """

    moment: Moment
    data: Any
    sequence: int | None


class Marks:
    """The marks of one ledger, by the names of their ranges."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._next = itertools.count().__next__
        self._thread = threading.get_ident()
        self._is_open = True

    def takes_more(self) -> bool:
        """Whether the ledger is still taken: frames keep their observers, and may tell more afterwards."""
        return self._is_open

    def close(self) -> None:
        """Ends the marks."""
        self._is_open = False

    def range_of(self, moment: Moment, data: Any = None) -> Any:
        """Returns a new mark's range of the profiler, to be entered."""
        name = f"{_PREFIX}{self._next()}"
        is_own = threading.get_ident() == self._thread
        self._marks[name] = Mark(moment, data, sequence_number() if is_own else None)
        return profiler_range(name)

    def add(self, moment: Moment, data: Any = None) -> None:
        """Marks the present moment."""
        if self._is_open:
            with self.range_of(moment, data):
                pass

    def get(self, name: str) -> Mark | None:
        """Returns the mark of a range of the profiler, if any."""
        return self._marks.get(name)
