"""What a rerun does with each tensor that autograd saves in it.

The hook made here takes the tensors in order, as the values of the handles of the same numbers, and ends the rerun as soon as
the last handle that is still alive has its value (Rule 5), by an exception: there the operator that saves has not even run
yet. Two things follow from that.

*User code must not swallow the stop* (Rule 8): it derives from ``BaseException``, and a function that swallows it all the
same meets it again at the next tensor it saves; however it ends, every value is there already.

*The value must be complete*. Operators save their inputs before they run, and one of them, ``rrelu_with_noise``, saves a
fresh tensor that it fills only then (https://github.com/pytorch/pytorch/issues/193671); version counters do not tell. So
where the operator that saves the last value has saved another tensor before it, one that needs no gradient, the stop waits
until that operator is through: until the next tensor saved by another one, or the end of the function. (The tensor saved last
needs no such care, unless something else was saved after it in forward: rrelu saves its noise first. Dropout saves its mask
last, and a whole tensor of memory hangs on stopping there.) Tensors that one operator saves share autograd's sequence number.
A test goes through the schemas of all operators for more of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain, repeat
from typing import Any

import torch

from ckpt_hooks._core.frame import Mark
from ckpt_hooks._core.modes import only_quiet_modes, unseen
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._tensors.copies import stand_in_for
from ckpt_hooks._torch import detach_past_modes, sequence_number, storage_of
from ckpt_hooks.errors import MutationError

from .handles import HandleFrame
from .state.leftovers import Leftovers

__all__ = ["Collector", "StopRecompute"]

#: Stands for the last value wanted, among booleans that say of each tensor that forward saved whether it is.
_STOP: Any = object()

_copy = unseen(stand_in_for)


class StopRecompute(BaseException):
    """Ends a rerun that has all it came for. Not an ``Exception``, so that no handler for those sees it (Rule 8)."""


class Collector:
    """The values of one rerun.

    Attributes:
        doubt: How many of the last values wanted are not to be trusted, and what returns the error for one of them; or None.
        early_stop: Whether the rerun ends when every value is there.
        frame: Whose values they are.
        function: What is called again.
        last: The number of the last tensor that is wanted.
        leftovers: What follows tensors that forward left in objects, if it did.
        marks: Those that regions inside left in this rerun.
        values: One entry a tensor that the rerun saved so far: the tensor, or :data:`MISSING` where it was not wanted.
        stopped: Whether the rerun was told to stop, which it is when every value is there.
        versions: The version at which each tensor was saved, where a hook notes it; see :meth:`noting_versions`.
        wanted: Which handles are to be filled; None for all that are alive.
        without_grad: Which tensors required no gradient.
    """

    __slots__ = (
        "_detach",
        "doubt",
        "early_stop",
        "frame",
        "function",
        "last",
        "leftovers",
        "marks",
        "stopped",
        "values",
        "versions",
        "wanted",
        "without_grad",
    )

    def __init__(self, frame: HandleFrame, function: Any, *, early_stop: bool, selective: bool = False) -> None:
        """Prepares to fill handles.

        Args:
            frame: Whose handles.
            function: What is called again, for an error to name tensors in it.
            early_stop: Whether to end the rerun when everything wanted is there.
            selective: Whether a selective policy's mode will be active in the rerun.
        """
        self._detach = detach_past_modes if selective and only_quiet_modes() else torch.Tensor.detach
        self.frame = frame
        self.function = function
        self.early_stop = early_stop
        self.values: list[torch.Tensor] = []
        self.marks: list[Mark] = []
        self.leftovers: Leftovers | None = None
        self.wanted: Collection[int] | None = None
        self.without_grad: list[int] = []
        self.last = -1
        self.stopped = False
        self.doubt: tuple[int, Callable[[], MutationError]] | None = None  # how many wanted values are not to be trusted
        self.versions: list[int] | None = None

    def distrust(self, error: Callable[[], MutationError]) -> None:
        """Tells that the rerun is about to read what has changed since forward, which ends it: no value to come is right.

        Args:
            error: Returns the error for whoever asks for one of those values.
        """
        trusted = len(self.values)
        if trusted <= self.last:
            self.doubt = self.last + 1 - trusted, error
            self.last = trusted - 1
            if self.early_stop:
                self._stop()

    def hook(
        self,
        wanted: Collection[int] | None,
        exchanged: frozenset[int | None] = frozenset(),
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the pack hook of the rerun.

        What it hands to autograd for the graph of the rerun is what it keeps as the value, so that user code may run backward
        on that graph: the tensor without its history. Parameters are taken by an alias of their own also where they need no
        gradient, since a framework that frees one by giving it another storage would leave the value empty. (To take the
        history off all values at once when the rerun has ended was tried: no faster, for the holders that it takes.)

        Args:
            wanted: Which handles to fill; None for all that are alive.
            exchanged: Storages whose content is that of forward during the rerun only: values are copied out of them.
        """
        values = self.values
        asked: list[Any] = self.frame.alive()
        final = len(asked) - 1 if wanted is None else -1
        if wanted is not None:
            asked = [alive and index in wanted for index, alive in enumerate(asked)]
        while asked and not asked[-1]:
            asked.pop()
        self.last, self.wanted = len(asked) - 1, wanted
        if asked and self.early_stop:
            asked[-1] = _STOP
        next_asked = chain(asked, repeat(None)).__next__
        append, append_without_grad = values.append, self.without_grad.append
        plain, detach = torch.Tensor, self._detach
        unfinished = -1  # sequence number of the operator that saved what it may yet write to

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal unfinished
            step = next_asked()
            if step:
                if tensor.requires_grad:
                    tensor = detach(tensor)
                else:
                    index = len(values)
                    append_without_grad(index)
                    if index != final:
                        unfinished = sequence_number()
                    if exchanged and storage_of(tensor) in exchanged:
                        tensor = _copy(tensor)
                    elif type(tensor) is not plain:
                        tensor = detach(tensor)
                append(tensor)
                if step is _STOP and unfinished != sequence_number():
                    self._stop()
                return tensor
            if step is None:
                return self._past_last(tensor, unfinished)
            append(MISSING)
            if tensor.requires_grad:
                return tensor if tensor.is_leaf else detach(tensor)
            index = len(values) - 1
            append_without_grad(index)
            if index != final:
                unfinished = sequence_number()
            return tensor

        return fill

    def noting_versions(self, hook: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a pack hook that notes at which version each value was saved, to be compared with where forward's is higher.

        For a rerun under a dispatch mode whose forward ran without one: under any, torch does some things out of place that it
        does in place otherwise (``torch.nn.functional.linear`` adds its bias so).
        """
        versions = self.versions = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            versions.append(-1 if tensor.is_inference() else tensor._version)
            return hook(tensor)

        return note

    def _stop(self) -> None:
        """Ends the rerun, unless it has to be seen what the function does to objects that it has read."""
        self.stopped = True
        if self.leftovers is None or self.leftovers.first is None:
            raise StopRecompute

    def _past_last(self, tensor: torch.Tensor, unfinished: int) -> torch.Tensor:
        self.values.append(MISSING)
        if self.early_stop:
            if unfinished != sequence_number():
                self._stop()
        elif self.frame.complete and len(self.values) > len(self.frame.numbers):
            raise StopRecompute
        return tensor.detach()

    def let_go(self) -> None:
        """Ends the collection. Autograd keeps the hook as long as the graph of the rerun, which may last (Rule 9)."""
        self.values.clear()
        if self.leftovers is not None:
            self.leftovers.let_go()
        del self.frame, self.function, self.doubt
