"""What a selective region remembers of its operators: which ones ran, and which outputs of theirs are kept.

Operators are known by their place in the sequence that ran in forward (:mod:`.sequence`). A recompute runs the same
sequence and is held to it; so an output stands in for the operator that made it, and never for another one that came to its
place because something was left out before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.paths import RegionPath
from ckpt_hooks._core.saved import Fate
from ckpt_hooks._tensors.held import HeldOnHost
from ckpt_hooks._tensors.walk import instances_in
from ckpt_hooks._torch import storage_of
from ckpt_hooks.errors import DeterminismError

from .alignment import compare_all
from .outputs import KeptOutputs
from .sequence import OperatorSequence

__all__ = ["Selection"]

T = TypeVar("T")

_NO_NUMBERS: Sequence[int] = ()
_NOT_RUN: Sequence[int] = []
_NO_VALUES: Sequence[torch.Tensor] = ()


class Selection:
    """The operators of one forward, and what was kept of them.

    Attributes:
        sequence: Those operators, in order.
        numbers: One a tensor that the region has saved.
        outputs: What was kept of them.
        when_closed: What is called then, with the operators.
        places_of_saved: Where the operator stands that returned a saved tensor, by the index of that; where observers watch.
        values: One a tensor that the recompute has saved that is running.
        marks_of_rerun: Of each operator of the latest recompute, how many tensors that had saved before.
        last: Whether the recompute that begins is the last one, which may take what was kept.
        differs: Whether the recompute has run another operator than forward.
        has_run_effects: Whether it has run an operator with an effect.
        aligned: Whether a recompute has run others, and the next ones run all.
        rerun: Of the latest recompute since then: its operators, the pairs of places of operators that returned other values
            than in forward, and the numbers of nodes that it found made by forward.
        has_stopped: Whether the recompute that begins has been told to stop.
    """

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
        "rerun",
        "sequence",
        "values",
        "when_closed",
    )

    def __init__(self) -> None:
        self.sequence = OperatorSequence()
        self.marks_of_rerun: Sequence[int] = _NO_NUMBERS
        self.numbers: Sequence[int] = _NO_NUMBERS
        self.values: Sequence[torch.Tensor] = _NO_VALUES
        self.outputs = KeptOutputs()
        self.places_of_saved: dict[int, int] = {}
        self.when_closed: Callable[[list[Any]], None] | None = None
        self.last = False
        self.has_stopped: Callable[[], bool] = _never
        self.rerun: tuple[OperatorSequence, Collection[tuple[int, int]], Sequence[int]]
        self.aligned = False
        self.differs = self.has_run_effects = False

    def attach(
        self,
        numbers: list[int],
        path: RegionPath,
        hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None,
        *,
        respect_hooks: bool,
    ) -> None:
        """Makes this the selection of a frame.

        Args:
            numbers: One a tensor that the frame has packed.
            path: The frame's.
            hooks: Those that are active around the frame, if any.
            respect_hooks: Whether what is kept goes through hooks that are not a frame's.

        Raises:
            ValueError: If it is that of another frame already.
        """
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
        """Ends the forward: what was kept after the last tensor that the region saved, no recompute comes to.

        Args:
            parent: The frame around, which is told of what is kept by way of its hooks.
            early_stop: Whether recomputes stop early.
        """
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
        """Gets ready for a recompute, before it has begun.

        Args:
            values: Gets one entry a tensor that the recompute saves.
            last: Whether what is kept may go as it is used.
            has_stopped: Says whether the recompute was told to stop; what a function does that goes on is of no interest.
        """
        self.values, self.last, self.has_stopped = values, last, has_stopped
        self.differs = self.has_run_effects = False
        self.outputs.bring_back()

    def note_saved(self, index: int, tensor: torch.Tensor) -> None:
        """Notes which output that is kept a saved tensor is, if any."""
        place = self.outputs.places.get(storage_of(tensor))
        if place is not None:
            self.places_of_saved[index] = place

    def fate_at(self, index: int) -> Fate:
        """Returns what has become of a saved tensor; see :meth:`Selects.fate_at`."""
        entry = self.outputs.entries.get(self.places_of_saved.get(index, -1))
        if entry is None:
            return Fate.DROPPED
        return Fate.OFFLOADED if any(instances_in(entry.value, HeldOnHost)) else Fate.POLICY

    def settle(self) -> None:
        """Forgets the recompute, which has ended and would be kept alive."""
        self._num_values = len(self.values)
        if self.last and self.aligned:
            self.outputs.entries = {place: entry for place, entry in self.outputs.entries.items() if entry.stays}
        self.values, self.last, self.has_stopped = _NO_VALUES, False, _never
        self.outputs.let_go()

    def recompute(self, rerun: Callable[[], T]) -> T:
        """Reruns the region; once more, with all its operators, where that has run others than forward.

        Args:
            rerun: Runs the region's function once.
        """
        if not self.aligned:
            self.marks_of_rerun, self.differs = _NOT_RUN, False
            try:
                return rerun()
            except Exception:
                marks = self.marks_of_rerun  # of none, where it failed before the function was called
                differs = self.differs or self.sequence.compare_marks(marks, self._num_values - 1) is not None
                differs = differs and marks is not _NOT_RUN
                if not (differs and self.sequence.complete) or self.has_run_effects:
                    raise
            self.aligned = True
        return rerun()

    def check(self, index: int, explain: Callable[[DeterminismError], None], cause: Exception | None = None) -> None:
        """Looks whether the recompute that has ended ran the operators that forward ran before a tensor was saved.

        Args:
            index: The last tensor that is wanted.
            explain: Is given the error, to raise one that says more.
            cause: What ended the recompute: an output that was handed out in the place of another may be of the wrong shape.

        Raises:
            DeterminismError: If it ran others.
        """
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
                del found, cause  # whose tracebacks have this call, which would keep them alive in turn


def _never() -> bool:
    return False
