"""What a selective region remembers of its operators: which ones ran, and the outputs that a policy said to keep.

Operators are known by their place in the sequence that ran in forward (:mod:`.sequence`). A recompute runs the same
sequence and is held to it; so an output stands in for the operator that made it, and never for another one that came to its
place because something was left out before it.

An output that is kept is a cache, no more: where it is not what the operator returned any longer, or not there, the operator
runs again. That is so for outputs that were modified since (their version tells, and forward sees who writes to them), for
those that an earlier recompute took because its backward did not retain the graph, and for outputs that share memory with an
input, which are not kept at all.

What is kept goes by way of the saved-tensor hooks around the region, as everything does that a region keeps until backward. If
those are a frame's, then what is kept is that frame's to bring back: a region inside a region that recomputes everything keeps
nothing through it, and finds what it kept when the outer one has been rerun.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ckpt_hooks._ambient.draws import Draw, skip_draw
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.modes import is_compiled_code_running, past_modes, unseen
from ckpt_hooks._core.passes import MISSING
from ckpt_hooks._core.paths import RegionPath
from ckpt_hooks._operators.kinds import Kind
from ckpt_hooks._tensors.copies import copies_of
from ckpt_hooks._tensors.kept_outputs import KeptOutput, MovedOutput, PackedOutput, got, packed_in, recomputes
from ckpt_hooks._tensors.offloaded import Batch
from ckpt_hooks._tensors.transfers import transfers_for
from ckpt_hooks._torch import counted_detach, storage_of, version_witness
from ckpt_hooks.errors import DeterminismError

from .alignment import compare_all
from .sequence import OperatorSequence

__all__ = ["Selection", "tensors_of"]

T = TypeVar("T")

_NO_NUMBERS: Sequence[int] = ()
_NOT_RUN: Sequence[int] = []
_NO_VALUES: Sequence[torch.Tensor] = ()
_HOLDS_TENSORS = (torch.Tensor, list, tuple, dict)
_NO_ALIASES: Sequence[tuple[torch.Tensor, int]] = ()


class _Entry:
    """What was kept of one operator.

    Attributes:
        value: Its output, with something to :meth:`get` in place of each tensor.
        draw: What it drew from a random stream, if it did.
        aliases: What tells of tensors that share memory with it and have version counters of their own, and their versions.
        stays: Whether the operator has an effect, and must not run again. What is kept and what is handed out are copies.
    """

    __slots__ = ("aliases", "draw", "stays", "value")

    stays: bool
    value: Any
    draw: Draw | None
    aliases: Sequence[tuple[torch.Tensor, int]]


class Selection:
    """The operators of one forward, and what was kept of them.

    Attributes:
        sequence: Those operators, in order.
        numbers: One a tensor that the region has saved.
        entries: What was kept, by place in that order.
        places: Where in that order, by the storage of what was kept.
        when_closed: What is called then, with the operators.
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
        "_batch",
        "_hooks",
        "_is_in_frame",
        "_num_kept",
        "_num_values",
        "aligned",
        "differs",
        "entries",
        "has_run_effects",
        "has_stopped",
        "last",
        "marks_of_rerun",
        "numbers",
        "places",
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
        self.entries: dict[int, _Entry] = {}
        self.places: dict[int | None, int] = {}
        self.when_closed: Callable[[list[Any]], None] | None = None
        self.last = False
        self.has_stopped: Callable[[], bool] = _never
        self._batch: Batch | None = None
        self.rerun: tuple[OperatorSequence, Collection[tuple[int, int]], Sequence[int]]
        self.aligned = False
        self.differs = self.has_run_effects = False
        self._num_kept = 0  # those included that are forgotten by the time that forward ends, which is left to chance
        self._is_in_frame = False
        self._hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None

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
        if hooks is not None and (respect_hooks or are_of_frame(hooks)):
            self._hooks, self._is_in_frame = hooks, are_of_frame(hooks)

    def keep(self, place: int, output: Any, args: Any, kwargs: Any, draw: Draw | None, kind: Kind, *, offload: bool) -> None:
        """Keeps the output of an operator, unless it is not the operator's own, or in a buffer that compiled code uses again.

        Args:
            place: Where the operator stands in the sequence.
            output: What it returned.
            args: Its arguments.
            kwargs: Its keyword arguments.
            draw: What it drew, if it did.
            kind: What kind the operator is of. What a collective returned is not complete yet, and kept past everybody's hooks.
            offload: Whether to move it to the host, if that can be and is worth it.
        """
        if kind is Kind.EFFECT:
            self._keep_for_good(place, output, draw, offload=offload)
            return
        if is_compiled_code_running() or (self._is_in_frame and not _has_node(args, kwargs)):
            return
        outputs = (output,) if type(output) is torch.Tensor else tuple(tensors_of(output))
        storages = [storage_of(tensor) for tensor in outputs]
        for arg in args:
            if type(arg) is torch.Tensor:
                if storage_of(arg) in storages:
                    return
            elif isinstance(arg, _HOLDS_TENSORS) and any(storage_of(other) in storages for other in tensors_of(arg)):
                return
        if kwargs and any(storage_of(other) in storages for other in tensors_of(kwargs)):
            return
        if any(tensor.is_inference() for tensor in outputs):  # whose versions nobody counts
            return
        aliases: Sequence[tuple[torch.Tensor, int]] = _NO_ALIASES
        if len(outputs) > 1:  # among them what subclasses hold, which others may write to
            aliases = [(version_witness(tensor), tensor._version) for tensor in outputs]
        for storage in storages:
            self.places[storage] = place
        as_it_is = kind is Kind.COLLECTIVE
        entry = _Entry()  # attributes one by one: half the cost of an ``__init__``
        entry.value = self._kept(output, offload=offload and not as_it_is, as_it_is=as_it_is)
        entry.draw = draw
        entry.aliases = aliases
        entry.stays = False
        self.entries[place] = entry
        self._num_kept += 1

    def _keep_for_good(self, place: int, output: Any, draw: Draw | None, *, offload: bool) -> None:
        """Keeps the output of an operator that must not run again."""
        entry = self.entries[place] = _Entry()
        entry.value = self._kept(past_modes(copies_of, output), offload=offload)
        entry.draw, entry.aliases, entry.stays = draw, _NO_ALIASES, True

    def _kept(self, output: Any, *, offload: bool, as_it_is: bool = False) -> Any:
        if isinstance(output, torch.Tensor):
            kept = counted_detach(output)
            transfers = transfers_for(kept) if offload and not self._is_in_frame else None
            if transfers is not None:
                self._batch = self._batch or Batch()
                return MovedOutput(kept, self._batch, transfers)
            if self._hooks is None or (as_it_is and not self._is_in_frame):
                return KeptOutput(kept)
            return PackedOutput(kept, *self._hooks)
        if isinstance(output, (list, tuple)):
            return type(output)(self._kept(one, offload=offload, as_it_is=as_it_is) for one in output)
        return output

    def forget(self, args: Any) -> None:
        """Lets go of what shares memory with an operator's arguments, which it wrote to."""
        places = self.places
        for tensor in tensors_of(args):
            place = places.get(storage_of(tensor))
            if place is not None:
                self.entries.pop(place, None)

    @unseen
    def watch(self, args: Any, outputs: Any) -> None:
        """Watches what an operator made out of something that was kept, without a version counter in common."""
        for tensor in tensors_of(args):
            entry = self.entries.get(self.places.get(storage_of(tensor), -1))
            if entry is not None:
                more = ((version_witness(output), output._version) for output in tensors_of(outputs))
                entry.aliases = (*entry.aliases, *more)

    def close(self, parent: Frame | None, *, early_stop: bool) -> None:
        """Ends the forward: what was kept after the last tensor that the region saved, no recompute comes to.

        Args:
            parent: The frame around, which is told of what is kept by way of its hooks.
            early_stop: Whether recomputes stop early.
        """
        self.sequence.complete = True
        if parent is not None and self.sequence.path is not None and self._is_in_frame:
            parent.note_inside(self._num_kept, self.sequence.path)
        if self.when_closed is not None:
            self.when_closed(self.sequence.operators)
        if early_stop and self.numbers is not _NO_NUMBERS:
            end = self.sequence.place_after(len(self.numbers))
            for place in [place for place, entry in self.entries.items() if place >= end and not entry.stays]:
                del self.entries[place]

    def prepare(self, values: list[torch.Tensor], *, last: bool, has_stopped: Callable[[], bool]) -> None:
        """Gets ready for a recompute, before it has begun.

        Args:
            values: Gets one entry a tensor that the recompute saves.
            last: Whether what is kept may go as it is used.
            has_stopped: Says whether the recompute was told to stop; what a function does that goes on is of no interest.
        """
        self.values, self.last, self.has_stopped = values, last, has_stopped
        self.differs = self.has_run_effects = False
        for saved in self._recomputed():
            saved.prepare()
        if self._batch is not None:
            self._batch.fetch_with_next()

    def settle(self) -> None:
        """Forgets the recompute, which has ended and would be kept alive."""
        self._num_values = len(self.values)
        if self.last and self.aligned:
            self.entries = {place: entry for place, entry in self.entries.items() if entry.stays}
        self.values, self.last, self.has_stopped = _NO_VALUES, False, _never
        for saved in self._recomputed():
            saved.forget()

    def _recomputed(self) -> Iterator[PackedOutput]:
        """Goes through what was kept in the hands of a frame."""
        if self._hooks is not None and recomputes(self._hooks[1]):
            for entry in self.entries.values():
                yield from packed_in(entry.value)

    def take(self, place: int, operator: Any, args: Any, kwargs: Any, *, last: bool, draw_modes: int) -> Any:
        """Returns what an operator returned in forward, :data:`MISSING` where that is not to be had any more.

        Args:
            place: Where the operator stands in the sequence.
            operator: The operator.
            args: Its arguments in the recompute.
            kwargs: Its keyword arguments.
            last: Whether to let go of it.
            draw_modes: How many modes that watch draws were active when the recompute began.
        """
        entry = self.entries[place]
        output = _output_of(entry, last=last)
        if output is MISSING:
            return MISSING
        if entry.draw is not None:
            skip_draw(operator, args, kwargs, entry.draw, modes=draw_modes)
        if entry.stays:
            return past_modes(copies_of, output)
        if last:
            del self.entries[place]
        return output

    def peek(self, place: int) -> Any:
        """Returns what an operator returned in forward, :data:`MISSING` where that was not kept or has gone."""
        entry = self.entries.get(place)
        return MISSING if entry is None else _output_of(entry, last=False)

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


def _has_node(args: Any, kwargs: Any) -> bool:
    """Whether gradients flow through an operator.

    One without may build a table, which the rerun of a region around finds built: its output must not be counted there.
    """
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))


def _output_of(entry: _Entry, *, last: bool) -> Any:
    if entry.aliases and any(alias._version != version for alias, version in entry.aliases):
        return MISSING
    value = entry.value
    return value.get(last=last) if type(value) is KeptOutput else got(value, last=last)


def _never() -> bool:
    return False


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Goes through the tensors in a value; after a subclass that wraps others, through those that it wraps."""
    if isinstance(value, torch.Tensor):
        yield value
        if type(value) is not torch.Tensor and hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from tensors_of(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
