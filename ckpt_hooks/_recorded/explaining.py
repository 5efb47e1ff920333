"""Errors of replays: the lines of operators in debug mode, and results of another shape than in forward.

Sizes read by Python are constants on a tape, and so are loops. So a replay of other routes cannot come to the results of
forward. The shapes of forward are noted for the few operators which have shapes from data, and a replay with another shape
names the operators by which it chose.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from ckpt_hooks._core.call_sites import module_names, outermost_module
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.holdings import TrackedKept
from ckpt_hooks._operators.facts import routing_advice
from ckpt_hooks._operators.operator_log import Entry, OperatorLog
from ckpt_hooks._torch.autograd import sequence_number
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks.errors import CheckpointError, DeterminismError

from .values import Op, Tables, Value, flatten, values_on_tape


class Routed(NamedTuple):
    """The results of a routing operator in forward."""

    shapes: list[tuple[int, ...]] | None  # the shapes of the results; None for sizes unknown while torch traces
    chose: bool  # whether the operator chose among floating-point numbers


def routed(op: Op, args: Any, kwargs: Any, out: Any) -> Routed:
    """Returns a note on the results of an operator which has run in forward."""
    return Routed(_shapes_of(out), op.facts.chooses(args, kwargs))


def check_shapes(frame: Frame, op: Op, out: Any) -> None:
    """Compares the shapes of a replay of a frame with the shapes of forward."""
    expected, found = op.routed.shapes, _shapes_of(out)
    if expected is None or found is None or expected == found:
        return
    region, operators = format_path(frame.path), _choices_above(op)
    error = DeterminismError(
        f"region {'/'.join(region)!r}: the replay of {op.facts.operator} came to a result of another shape than forward.\n"
        f"shape in forward: {_in_words(expected)}\nshape in the replay: {_in_words(found)}\n"
        f"{routing_advice(operators).strip()}",
        region=region,
        index=op.number,
        expected=f"{op.facts.operator} with a result of shape {_in_words(expected)}",
        found=f"{op.facts.operator} with a result of shape {_in_words(found)}",
    )
    error.routing = tuple(operators)
    raise error


def _choices_above(op: Op) -> list[str]:
    """Returns the names of the nearest operators which chose among floating-point numbers; comparisons if there are none."""
    chosen: dict[int, Op] = {}
    compared: dict[int, Op] = {}
    seen: set[int] = set()
    todo = [op]
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        routing = current.facts.is_routing
        if routing and current.routed.chose:
            chosen[current.number] = current
            continue
        if routing is None and current.facts.name != "_to_copy":
            compared[current.number] = current
        todo += [above for value in _read_by(current) for above in _makers_of(value)]
    found = chosen or compared or {op.number: op}
    return list(dict.fromkeys(found[number].facts.full_name for number in sorted(found)))


def _read_by(op: Op) -> list[Value]:
    return [value for argument in (*op.args, *op.kwargs.values()) for value in values_on_tape(argument)]


def _makers_of(value: Value | None) -> list[Op]:
    """Returns the operators which made a value or wrote to it, as far as a replay runs them."""
    makers = []
    while value is not None and value.saved is None:
        if value.op is not None:
            makers.append(value.op)
        value = value.before
    return makers


def _shapes_of(out: Any) -> list[tuple[int, ...]] | None:
    shapes = [tuple(one.shape) for one in flatten(out) if isinstance(one, torch.Tensor) and not one.is_nested]
    return shapes if all(type(size) is int for shape in shapes for size in shape) else None


def _in_words(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


class Lines:
    """The lines of the operators of an outermost region, and of those of the regions directly within.

    The log counts values: an operator of the tape is the one during which its number was given.
    """

    __slots__ = ("_entries", "_latest", "_log", "_places", "_root")

    def __init__(self, tables: Tables) -> None:
        latest = self._latest = [-1]  # the number of the node that was made last, as the latest operator began

        def count() -> int:
            latest[0] = sequence_number()
            return tables.number

        self._log: OperatorLog | None = OperatorLog(count)
        self._entries: list[Entry] = self._log.entries
        self._places: dict[int, int] = {}  # by the identity of a handle: the place of the operator that saved its tensor
        root = outermost_module()
        self._root = None if root is None else weakref.ref(root)

    def enter(self) -> None:
        """Begins the log."""
        assert self._log is not None
        self._log.__enter__()

    def exit(self) -> None:
        """Ends the log."""
        assert self._log is not None
        self._log.__exit__()
        self._log = None

    @skipped
    def packing(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Returns a pack hook which notes the saving operator: the next to run, or the latest where its result is saved."""
        entries, places, latest = self._entries, self._places, self._latest
        explain = self._explain

        def note(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            place = len(entries) - (latest[0] == sequence_number())
            if isinstance(packed, list):
                packed = packed if isinstance(packed, TrackedKept) else TrackedKept(packed)
                packed.needed_by = partial(explain, place, "Autograd saved it for")
            else:
                places[id(packed)] = place
            return packed

        return note

    def explain_saved(self, error: CheckpointError, handle: Any) -> None:
        """Adds an operator and its line to the error for the tensor of a handle."""
        saved = handle.value.saved
        if saved is not None and saved.by_policy:
            self._explain(self._place_of(handle.value.number), "It is the result of", error)
        else:
            self._explain(self._places.get(id(handle), -1), "Autograd saved it for", error)

    def explain_replay(self, error: CheckpointError, value: Value, steps: Iterable[Op | Value]) -> None:
        """Adds an operator and its line to the error for a tensor which a replay reads."""
        readers = [
            step.number
            for step in steps
            if type(step) is Op and any(value in values_on_tape(argument) for argument in (*step.args, *step.kwargs.values()))
        ]
        if readers:
            self._explain(self._place_of(min(readers)), "It is read by", error)

    def explain_operator(self, error: CheckpointError, number: int) -> None:
        """Adds the line of an operator to an error."""
        self._explain(self._place_of(number), "In forward it was", error)

    def _place_of(self, number: int) -> int:
        return bisect_left(self._entries, number, key=lambda entry: entry.mark) - 1

    def _explain(self, place: int, words: str, error: CheckpointError) -> None:
        if 0 <= place < len(self._entries):
            entry, names = self._entries[place], module_names(None if self._root is None else self._root())
            error.args = (f"{error}\n{words} {entry.in_words()}\n  at {entry.line(names)}",)
