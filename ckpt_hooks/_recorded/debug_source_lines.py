"""Debug mode of recorded regions: the lines of operators, for errors on tensors modified since forward."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ckpt_hooks._core.call_sites import module_names, outermost_module
from ckpt_hooks._core.holdings import TrackedKept
from ckpt_hooks._operators.operator_log import Entry, OperatorLog
from ckpt_hooks._torch.autograd import sequence_number
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks.errors import CheckpointError

from .tables import Tables
from .values import Op, Value, values_on_tape


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
