"""Handles of function frames: what stands in the graph for a tensor that was not kept, and what one backward brings back.

Which handles are alive is what a frame has to know before it recomputes. A handle is a tuple of its frame and a number, and the
number is an integer object that only the handle and the frame's list of numbers hold: as long as it has a holder besides the
list, its handle is alive. (A weak reference to each handle says the same; it costs a class of handles and a third more for each
saved tensor.)
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from sys import getrefcount
from typing import Any

import torch

from ckpt_hooks._ambient.current import Made
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.frame import Frame, overlap_error
from ckpt_hooks._core.groups import group_scope
from ckpt_hooks._core.paths import format_path
from ckpt_hooks._core.patience import patient
from ckpt_hooks._core.saved import Fate, Saved, nbytes_of
from ckpt_hooks._core.scopes import MISSING, graph_task_scope
from ckpt_hooks._torch import graph_exec_group, graph_task_id
from ckpt_hooks.errors import InternalError

__all__ = ["FIRST", "Handle", "HandleFrame", "Pass"]

#: The number of the first tensor that a frame saves. Up here every sum is a new object; small integers are shared by all that
#: use them, and their holders would tell nothing.
FIRST = 1 << 20

# Stands in autograd's graph for one saved tensor: the frame that can bring it back, and how many tensors the frame had saved
# before, counted from FIRST.
Handle = tuple["HandleFrame", int]

# How many holders of a number in a list of numbers ``getrefcount`` tells of.
_UNHELD = next(map(getrefcount, [FIRST + 1]))


class Pass:
    """The values of one frame in one scope.

    Attributes:
        values: One entry a handle, in the order of saving: the tensor, or :data:`MISSING`.
        made: Where the values were made, which hands them to streams of devices; None where no device is in use.
        taken: Indices in the order in which they were taken.
    """

    __slots__ = ("made", "taken", "values")

    def __init__(self, values: list[torch.Tensor], made: Made | None = None) -> None:
        self.values = values
        self.made = made
        self.taken: list[int] = []


class HandleFrame(Frame):
    """A function frame as far as it has handles, and values for them in one backward.

    Attributes:
        numbers: One a tensor packed, in order: held by its handle too as long as that is alive, and by nothing else. A tensor
            that was kept has a number without a handle.
        facts: Of each tensor packed in forward, what a recompute is compared with; those of :data:`MISSING` where it was kept.
        fingerprints: Of each tensor packed in forward, what its values are compared by; empty where they are not compared.
        without_grad: Which of them required no grad.
    """

    __slots__ = ("facts", "fingerprints", "numbers", "without_grad")

    kind = "function"
    passes: dict[int, Pass]

    def __init__(
        self, name: str, parent: Frame | None, observers: tuple[Observer, ...], module: torch.nn.Module | None = None
    ) -> None:
        Frame.__init__(self, name, parent, observers, module)
        self.numbers: list[int] = []
        self.facts: list[Any] = []
        self.fingerprints: Sequence[Any] = ()
        self.without_grad: list[int] = []

    def saved(self) -> list[Saved]:
        """Returns the tensors that backward may still ask for; see :meth:`Frame.saved`."""
        return [self._describe(index) for index, alive in enumerate(self.alive()) if alive]

    def describe(self, packed: Any) -> Saved:
        """Returns what a handle stands for; see :meth:`Frame.describe`."""
        return self._describe(packed[1] - FIRST)

    def _describe(self, index: int) -> Saved:
        noted = self.facts[index]
        if not isinstance(noted, tuple):  # of tensors whose metadata is not compared
            return Saved(format_path(self.path), index, self.fate_at(index), None, None, None)
        shape, dtype = noted[:2]
        return Saved(format_path(self.path), index, self.fate_at(index), shape, dtype, nbytes_of(shape, dtype))

    def note_saved(self, index: int, tensor: torch.Tensor) -> None:
        """Is told of a tensor that was dropped for a handle, where observers watch."""

    def fate_at(self, index: int) -> Fate:
        """Returns what has become of a tensor that was dropped for a handle."""
        return Fate.DROPPED

    def alive(self) -> list[bool]:
        """Returns of each tensor packed whether its handle is alive."""
        return list(map(_UNHELD.__lt__, map(getrefcount, self.numbers)))

    @abc.abstractmethod
    def recompute(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        """Brings tensors back.

        Called with the frame's lock held. Leaves the frame as it was, whether it returns or raises.

        Args:
            wanted: Indices of the handles to fill; None for all that are alive.

        Returns:
            One entry a handle, up to the last one wanted: the tensor, detached, or :data:`MISSING` where it was not wanted, or
            where it was modified in the course of the recompute and has to be asked for by itself.
        """

    def made(self) -> Made | None:
        """Returns what hands the values of a recompute to streams of devices; None where no device is in use."""
        return None if self.current is None else Made(self.current)

    def open_pass(self, index: int) -> Pass:
        """Returns this frame's pass in the scope that is running on this thread; recomputes if there is none yet (Rule 3).

        Args:
            index: The handle that is being unpacked. Outside of a backward nobody says when values may go, so that handle
                alone is brought back, for the caller alone.
        """
        group = graph_exec_group()
        key = graph_task_id() if group is None else group_scope(group).key
        with patient(self._lock, self.path):
            if key == -1:
                return Pass(self.observed(self.recompute, (index,)), self.made())
            opened = self.passes.get(key)  # a group's, or one that another engine thread has just made (Rule 11)
            if opened is None:
                opened = Pass(self.observed(self.recompute, None), self.made())
                self.keep_pass(opened, graph_task_scope(key) if group is None else group_scope(group))
            return opened

    def reopen_pass(self, opened: Pass, index: int) -> torch.Tensor:
        """Brings back a value that a pass does not hold: one that was taken before, or packed after the recompute.

        A node that is asked for its tensors twice asks for all of them again, in order. So everything that was taken after
        this one is brought back with it: one recompute serves the whole node, and nothing lies around that is not about to
        be asked for.

        Raises:
            OverlapError: In a group, whose backwards must not share a tensor.
        """
        with patient(self._lock, self.path):
            taken = opened.taken
            wanted = [index]
            if index in taken:
                if graph_exec_group() is not None:
                    raise overlap_error(self.path, index)
                since = taken.index(index)
                wanted += taken[since + 1 :]
                del taken[since:]
            values = self.observed(self.recompute, frozenset(wanted))
            if opened.made is not None:
                opened.made.renew()
            opened.values.extend([MISSING] * (len(values) - len(opened.values)))
            for position in wanted:
                if position < len(values):  # handles that are dead by now are not brought back
                    opened.values[position] = values[position]
            value = opened.values[index]
            if value is MISSING and len(wanted) > 1:
                value = self.observed(self.recompute, (index,))[index]
            opened.values[index] = MISSING
            taken.append(index)
            if value is MISSING:
                raise InternalError(
                    f"a recompute of region {'/'.join(format_path(self.path))!r} did not bring back tensor {index}. This is a "
                    "bug in ckpt_hooks. Please report it with the program.",
                    region=format_path(self.path),
                )
            return value
