"""The memory of a selective region: the operators of its forward, and their kept outputs.

Operators are known by their place in the sequence of forward (:mod:`.sequence`). A recompute must run the same sequence, and is
checked. So a kept output stands in for its own operator, and never for another operator, moved to the same place because an
earlier operator was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

from ckpt_hooks._core.descriptions import RegionPath
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._tensors.containers import instances_in
from ckpt_hooks._tensors.held_tensors import HeldOnHost
from ckpt_hooks._torch.tensors import storage_of
from ckpt_hooks.errors import DeterminismError

from .alignment import compare_all
from .outputs import KeptOutputs
from .sequence import OperatorSequence

T = TypeVar("T")

_NO_NUMBERS: Sequence[int] = ()
_NOT_RUN: Sequence[int] = []
_NO_VALUES: Sequence[torch.Tensor] = ()


class Selection:
    """The operators of one forward, and their kept outputs."""

    __slots__ = (
        "_num_values",
        "aligned",
        "differs",
        "has_run_effects",
        "has_stopped",
        "last",
        "marks_of_rerun",
        "numbers",
        "outputs",
        "places_of_saved",
        "policy_in_words",
        "rerun",
        "sequence",
        "values",
        "when_closed",
    )

    def __init__(self) -> None:
        self.sequence = OperatorSequence()  # the operators, in order
        # For each operator of the latest recompute, the number of tensors saved before.
        self.marks_of_rerun: Sequence[int] = _NO_NUMBERS
        self.numbers: Sequence[int] = _NO_NUMBERS  # an entry for each tensor saved by the region
        self.values: Sequence[torch.Tensor] = _NO_VALUES  # an entry for each tensor saved by the running recompute
        self.outputs = KeptOutputs()  # the kept outputs
        # The place of the operator which returned a saved tensor, by the tensor's index; where observers watch.
        self.places_of_saved: dict[int, int] = {}
        self.policy_in_words: Callable[[], str] | None = None  # returns the policy in words
        self.when_closed: Callable[[list[Any]], None] | None = None  # called with the operators when forward has ended
        self.last = False  # whether the beginning recompute is the last, and may take kept outputs
        self.has_stopped: Callable[[], bool] = _never  # returns whether the beginning recompute has been told to stop
        # The latest aligned recompute: its operators, the pairs of places of operators with other values than in forward, and
        # the numbers of nodes made by forward.
        self.rerun: tuple[OperatorSequence, Collection[tuple[int, int]], Sequence[int]]
        self.aligned = False  # whether a recompute has run other operators, so that the next recomputes run all operators
        # ``differs``: whether the recompute has run another operator than forward; ``has_run_effects``: whether the recompute
        # has run an operator with an effect.
        self.differs = self.has_run_effects = False

    def attach(
        self,
        numbers: list[int],
        path: RegionPath,
        hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None,
        *,
        respect_hooks: bool,
    ) -> None:
        """Makes this the selection of a frame."""
        if self.sequence.path is not None:
            raise ValueError(
                "the contexts of create_selective_checkpoint_contexts are for one region, which has run: its operators are "
                "known by their places. Pass a context_fn that makes new ones each time, as functools.partial("
                "create_selective_checkpoint_contexts, policy) does."
            )
        self.numbers, self.sequence.path = numbers, path
        passed = hooks is not None and (respect_hooks or are_of_frame(hooks))
        self.outputs.attach(path, hooks if passed else None)

    def close(self, parent: Frame | None, *, early_stop: bool) -> None:
        """Ends forward; with early stop, drops outputs kept after the last saved tensor, which no recompute reaches."""
        self.sequence.complete = True
        if parent is not None and self.sequence.path is not None and self.outputs.is_in_frame:
            parent.note_inside(self.outputs.num_kept, self.sequence.path)
        if self.when_closed is not None:
            self.when_closed(self.sequence.operators)
        if early_stop and self.numbers is not _NO_NUMBERS:
            end = self.sequence.place_after(len(self.numbers))
            for place in [place for place, entry in self.outputs.entries.items() if place >= end and not entry.stays]:
                del self.outputs.entries[place]

    def prepare(self, values: list[torch.Tensor], *, last: bool, has_stopped: Callable[[], bool]) -> None:
        """Prepares for a recompute."""
        self.values, self.last, self.has_stopped = values, last, has_stopped
        self.differs = self.has_run_effects = False
        self.outputs.bring_back()

    def note_saved(self, index: int, tensor: torch.Tensor) -> None:
        """Notes the operator whose kept output a saved tensor is, if any."""
        place = self.outputs.places.get(storage_of(tensor))
        # Hooks may let go of a kept output, whose address the next tensor has then.
        if place is not None and self.outputs.hooks is None:
            self.places_of_saved[index] = place

    def fate_at(self, index: int) -> Reason:
        """Returns the fate of a saved tensor; see :meth:`Selects.fate_at`."""
        entry = self.outputs.entries.get(self.places_of_saved.get(index, -1))
        if entry is None:
            return Reason.DROPPED
        return Reason.OFFLOADED if any(instances_in(entry.value, HeldOnHost)) else Reason.POLICY

    def kept_operators(self) -> Collection[Any]:
        """Returns the operators with an output kept by forward, taken since or not."""
        operators = self.sequence.operators
        return {operators[place] for place in (*self.outputs.places.values(), *self.outputs.entries)}

    def settle(self) -> None:
        """Forgets the ended recompute, which would be kept alive."""
        self._num_values = len(self.values)
        if self.last and self.aligned:
            self.outputs.entries = {place: entry for place, entry in self.outputs.entries.items() if entry.stays}
        self.values, self.last, self.has_stopped = _NO_VALUES, False, _never
        self.outputs.let_go()

    def recompute(self, rerun: Callable[[], T]) -> T:
        """Reruns the region; once more with all its operators, if the rerun has run other operators than forward."""
        if not self.aligned:
            self.marks_of_rerun, self.differs = _NOT_RUN, False
            try:
                return rerun()
            except Exception:
                marks = self.marks_of_rerun  # not run, if the rerun failed before the call of the function
                differs = self.differs or self.sequence.compare_marks(marks, self._num_values - 1) is not None
                differs = differs and marks is not _NOT_RUN
                if not (differs and self.sequence.complete) or self.has_run_effects:
                    raise
            self.aligned = True
        return rerun()

    def check(self, index: int, explain: Callable[[DeterminismError], None], cause: Exception | None = None) -> None:
        """Checks that the ended recompute ran the operators of forward up to a saved tensor."""
        sequence = self.sequence
        if self.aligned:
            found = compare_all(sequence, *self.rerun, index)
        else:
            found = sequence.compare_marks(self.marks_of_rerun, index)
        if found is not None:
            try:
                explain(found)
                raise found from cause
            finally:
                del found, cause  # their tracebacks hold this call, and this call would hold them: a cycle


def _never() -> bool:
    return False
