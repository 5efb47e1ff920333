"""The rows of a step: allocations, frees and marks in the order of time, read from the profiler's events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from ckpt_hooks._torch.profiling import IS_ALLOCATION, NOT_OPERATORS

from .marks import Mark, Marks, Moment

__all__ = ["NOWHERE", "Place", "Row", "rows_of"]

_NODE = "autograd::engine::evaluate_function: "
_STEP = "Optimizer."


class Place(NamedTuple):
    """The ranges of the profiler around a row.

    Attributes:
        operator: The outermost operator in the innermost of the others, as in ``"aten::linear"``; None outside of operators.
        node: The name of the running node of backward; None outside of backward.
        sequence: The number of the node, or for an accumulation of a gradient of the node before.
        optimizer: The call of an optimizer, as in ``"AdamW.step"``.
        line: The line of the program which called into torch.
    """

    operator: str | None
    node: str | None
    sequence: int
    optimizer: str | None
    line: str | None


NOWHERE = Place(None, None, -1, None, None)


class Row(NamedTuple):
    """An allocation, a free, or a mark.

    Attributes:
        time: The time in ns, on the profiler's clock.
        place: The ranges around.
        mark: The mark; None for an allocation or free.
        address: The address of the memory.
        nbytes: The size; negative for a free.
        device: The device.
        total: The bytes of the device in use afterwards, as the allocator counts; 0 where unknown.
        run: The number of the run of the operator around; 0 outside of operators.
    """

    time: int
    place: Place
    mark: Mark | None
    address: int = 0
    nbytes: int = 0
    device: Any = None
    total: int = 0
    run: int = 0


def rows_of(events: Iterable[Any], marks: Marks) -> tuple[list[Row], set[int]]:
    """Returns the rows of a step, and the runs of operators which made a node of autograd.

    Args:
        events: The roots of the profiler's tree of events.
        marks: The marks.
    """
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
    """Returns the number of a node. A gradient belongs to the node before, which made it: the engine runs both in a row."""
    number: int = event.extra_fields.sequence_number
    if number >= 0:
        latest[event.start_tid] = number
    return latest.get(event.start_tid, -1)
