"""The rows of a step: allocations, frees and marks in the order of time, read from the profiler's events.

Marks are moments of a step, noted by empty ranges of the profiler.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from ckpt_hooks._torch.autograd import sequence_number
from ckpt_hooks._torch.profiling import IS_ALLOCATION, NOT_OPERATORS, profiler_range

_PREFIX = "ckpt_hooks##"
_NODE = "autograd::engine::evaluate_function: "
_STEP = "Optimizer."


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
    """One mark."""

    moment: Moment
    data: Any
    sequence: int | None  # the number of the next node of autograd on the ledger's thread; None on another thread


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
        self._is_open = False

    def range_of(self, moment: Moment, data: Any = None) -> Any:
        """Returns a new mark's range of the profiler, to be entered."""
        name = f"{_PREFIX}{self._next()}"
        is_own = threading.get_ident() == self._thread
        self._marks[name] = Mark(moment, data, sequence_number() if is_own else None)
        return profiler_range(name)

    def add(self, moment: Moment, data: Any = None) -> None:
        if self._is_open:
            with self.range_of(moment, data):
                pass

    def get(self, name: str) -> Mark | None:
        return self._marks.get(name)


class Place(NamedTuple):
    """The ranges of the profiler around a row."""

    # The outermost operator in the innermost of the others, as in ``"aten::linear"``; None outside of operators.
    operator: str | None
    node: str | None  # the name of the running node of backward; None outside of backward
    sequence: int  # the number of the node, or for an accumulation of a gradient of the node before
    optimizer: str | None  # the call of an optimizer, as in ``"AdamW.step"``
    line: str | None  # the line of the program which called into torch


NOWHERE = Place(None, None, -1, None, None)


class Row(NamedTuple):
    """An allocation, a free, or a mark."""

    time: int  # in ns, on the profiler's clock
    place: Place
    mark: Mark | None  # None for an allocation or free
    address: int = 0
    nbytes: int = 0  # negative for a free
    device: Any = None
    total: int = 0  # the bytes of the device in use afterwards, as the allocator counts; 0 where unknown
    run: int = 0  # the number of the run of the operator around; 0 outside of operators


def rows_of(events: Iterable[Any], marks: Marks) -> tuple[list[Row], set[int]]:
    """Returns the rows of a step, and the runs of operators which made a node of autograd."""
    differentiable: set[int] = set()
    rows = list(_walk(events, marks, differentiable))
    rows.sort(key=attrgetter("time"))  # threads have trees of their own; a stable sort leaves the order within one
    return rows, differentiable


def _walk(events: Iterable[Any], marks: Marks, differentiable: set[int]) -> Iterator[Row]:
    latest: dict[int, int] = {}  # the number of the latest node with one, by thread
    # Whether a result has a gradient is in no event. The profiler tells the number of the next node with each operator.
    # By thread, the latest run of an operator, and the number of the next node when it began: a node which is there when the
    # next operator begins is of this run.
    begun: dict[int, tuple[int, int]] = {}
    num_runs = 0
    todo: list[tuple[Any, Place, int]] = [(event, NOWHERE, 0) for event in reversed([*events])]
    while todo:
        event, place, run = todo.pop()
        if event.tag == IS_ALLOCATION:
            memory = event.extra_fields
            yield Row(
                event.start_time_ns,
                place,
                None,
                memory.ptr,
                memory.alloc_size,
                memory.device,
                memory.total_allocated or 0,
                run,
            )
            continue
        children = event.children
        name: str = event.name
        mark = marks.get(name)
        if mark is None and not run and place.node is None and event.extra_fields.scope not in NOT_OPERATORS:
            num_runs = run = num_runs + 1
            sequence = event.extra_fields.sequence_number
            if sequence >= 0:
                before, number = begun.get(event.start_tid, (0, sequence))
                if number < sequence:
                    differentiable.add(before)
                begun[event.start_tid] = run, sequence
        if mark is not None:
            if mark.moment is Moment.CALL:
                place = place._replace(operator=None, line=mark.data)
            else:
                yield Row(event.start_time_ns, place, mark)
        elif not children:
            if name.startswith(_NODE):
                _sequence_of(event, latest)
            continue
        elif name.startswith(_NODE):
            place = place._replace(operator=None, node=name[len(_NODE) :], sequence=_sequence_of(event, latest))
        elif name.startswith(_STEP):
            place = place._replace(operator=None, optimizer=name.partition("#")[2])
        elif place.operator is None and event.extra_fields.scope not in NOT_OPERATORS:
            place = place._replace(operator=name)
        todo += [(child, place, run) for child in reversed(children)]


def _sequence_of(event: Any, latest: dict[int, int]) -> int:
    # A gradient belongs to the node before, which made it: the engine runs both in a row.
    number: int = event.extra_fields.sequence_number
    if number >= 0:
        latest[event.start_tid] = number
    return latest.get(event.start_tid, -1)
