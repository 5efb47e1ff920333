"""Handles of function frames, which stand in the graph for dropped tensors, and the values brought back by one backward.

Before a recompute a frame has to know the living handles. A handle is a tuple of its frame and a number. The number is an
integer object held only by the handle and the frame's list of numbers: while the number has a holder besides the list, its
handle is alive. (A weak reference to each handle does the same, at the cost of a class of handles and a third more time for
each saved tensor.)
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from sys import getrefcount
from typing import Any

import torch

from ckpt_hooks._ambient.current import Made
from ckpt_hooks._ambient.positions import Position
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.frame import Frame, Mark, overlap_error
from ckpt_hooks._core.groups import group_scope
from ckpt_hooks._core.holdings import Reason, Saved, nbytes_of
from ckpt_hooks._core.scopes import MISSING, SPLIT, graph_task_scope
from ckpt_hooks._core.split_backward import Uses
from ckpt_hooks._torch.autograd import graph_exec_group, graph_task_id
from ckpt_hooks.errors import InternalError

__all__ = ["FIRST", "Handle", "HandleFrame", "Pass"]

#: The number of a frame's first saved tensor. Up here every sum is a new object; small integers are shared by all their
#: users, and the count of their holders would tell nothing.
FIRST = 1 << 20

# Stands in autograd's graph for one saved tensor: the frame which can bring the tensor back, and the number of tensors saved
# before by the frame, counted from FIRST.
Handle = tuple["HandleFrame", int]

# The result of ``getrefcount`` for a number held by a list of numbers alone.
_UNHELD = next(map(getrefcount, [FIRST + 1]))


class Pass:
    """The values which a recompute brought back for one frame in one scope.

    Attributes:
        values: An entry for each handle, in the order of saving: the tensor, or :data:`MISSING`. A dictionary where the pass
            is for one handle.
        made: The devices and streams which made the values, to hand these to other streams; None without a device.
        taken: Indices in the order of their taking.
    """

    __slots__ = ("made", "taken", "values")

    def __init__(self, values: list[torch.Tensor] | dict[int, torch.Tensor], made: Made | None = None) -> None:
        self.values: Any = values
        self.made = made
        self.taken: list[int] = []


class SplitPass(Pass):
    """The values of one frame for the two parts of a backward, which lie apart from the values handed out."""

    __slots__ = ("uses",)

    def __init__(self, values: list[torch.Tensor], made: Made | None) -> None:
        Pass.__init__(self, values, made)
        self.uses = Uses()

    def value_at(self, index: int, alive: Callable[[], list[bool]]) -> torch.Tensor:
        """Returns a value, :data:`MISSING` if the value is not there, or a backward has written to its memory.

        Args:
            index: The index of the handle.
            alive: Returns for each handle whether it is alive. Values of dead handles are dropped, once in each backward.
        """
        if self.uses.is_next_part():
            self.values = [value if lives else MISSING for value, lives in zip(self.values, alive(), strict=False)]
        value: torch.Tensor = self.values[index] if index < len(self.values) else MISSING
        return value if value is MISSING or self.uses.is_untouched(index, value) else MISSING


class HandleFrame(Frame):
    """A function frame with handles, and with their values in one backward.

    Attributes:
        collector: The collector of the running rerun (:class:`.collector.Collector`); None outside of reruns.
        is_split: Whether values stay for a second backward (:mod:`ckpt_hooks._core.split_backward`).
        marks: Marks of the regions inside, in forward.
        numbers: A number for each packed tensor, in order, held by this list and by a living handle only. A kept tensor has a
            number without a handle.
        facts: Metadata of each packed tensor, compared on recompute. Kept tensors have the metadata of :data:`MISSING`.
        positions: How far random streams had moved, by the indices of packed tensors before which they had; at index -1 where
            they began. None where a rerun draws anew.
        fingerprints: Fingerprints of the values of each packed tensor; empty if values are not compared.
        without_grad: The numbers of packed tensors that require no grad.
    """

    __slots__ = ("collector", "facts", "fingerprints", "is_split", "marks", "numbers", "positions", "without_grad")

    kind = "function"
    passes: dict[int, Pass]

    def __init__(
        self, name: str, parent: Frame | None, observers: tuple[Observer, ...], module: torch.nn.Module | None = None
    ) -> None:
        Frame.__init__(self, name, parent, observers, module)
        self.collector: Any = None
        self.is_split = False
        self.marks: list[Mark] = []
        self.numbers: list[int] = []
        self.facts: list[Any] = []
        self.positions: dict[int, Position] | None = None
        self.fingerprints: Sequence[Any] = ()
        self.without_grad: list[int] = []

    def saved(self) -> list[Saved]:
        """Returns the tensors which backward may still ask for; see :meth:`Frame.saved`."""
        return [self._describe(index) for index, alive in enumerate(self.alive()) if alive]

    def describe(self, packed: Any) -> Saved:
        """Returns a description of a handle's tensor; see :meth:`Frame.describe`."""
        return self._describe(packed[1] - FIRST)

    def _describe(self, index: int) -> Saved:
        noted = self.facts[index]
        if not isinstance(noted, tuple):  # metadata is not compared
            return Saved(format_path(self.path), index, self.fate_at(index), None, None, None)
        shape, dtype = noted[:2]
        return Saved(format_path(self.path), index, self.fate_at(index), shape, dtype, nbytes_of(shape, dtype))

    def note_saved(self, index: int, tensor: torch.Tensor) -> None:
        """Notes a tensor dropped for a handle, where observers watch."""

    def fate_at(self, index: int) -> Reason:
        """Returns the fate of a tensor dropped for a handle."""
        return Reason.DROPPED

    def alive(self) -> list[bool]:
        """Returns for each packed tensor whether its handle is alive."""
        return list(map(_UNHELD.__lt__, map(getrefcount, self.numbers)))

    @abc.abstractmethod
    def recompute(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        """Brings tensors back, and tells observers.

        Called with the frame's lock held. Leaves the frame as it was, whether the recompute returns or raises.

        Args:
            wanted: Indices of the handles to fill; None for all living handles.

        Returns:
            An entry for each handle, up to the last one wanted: the detached tensor, or :data:`MISSING` for a tensor not
            wanted, or modified in the course of the recompute; the latter has to be asked for alone.
        """

    def made(self) -> Made | None:
        """Returns the devices and streams of a recompute's values, to hand these to other streams; None without a device."""
        return None if self.current is None else Made(self.current)

    def open_pass(self, index: int) -> Pass:
        """Returns this frame's pass in the scope of this thread; recomputes if there is none yet (Rule 3).

        Args:
            index: The handle being unpacked. Outside of a backward nothing tells when values may go, so that handle alone is
                brought back, for the caller alone.
        """
        group = graph_exec_group()
        key = graph_task_id() if group is None else group_scope(group).key
        with self._lock:
            if key == -1:
                return Pass(self.recompute((index,)), self.made())
            if self.is_split and graph_task_id() != -1:
                return self._open_split_pass(index)
            opened = self.passes.get(key)  # a group's, or one that another engine thread has just made (Rule 11)
            if opened is None:
                opened = Pass(self.recompute(None), self.made())
                self.keep_pass(opened, graph_task_scope(key) if group is None else group_scope(group))
            return opened

    def _open_split_pass(self, index: int) -> Pass:
        """Returns a pass, for the caller alone, with the value of one handle in a backward in two parts."""
        kept = self.passes.get(SPLIT)
        value = kept.value_at(index, self.alive) if isinstance(kept, SplitPass) else MISSING
        if not isinstance(kept, SplitPass) or value is MISSING:
            kept = SplitPass(self.recompute(None), self.made())
            self.passes = {SPLIT: kept}
            value = kept.values[index]
            if value is MISSING:  # modified in the course of the recompute: such a value has to be asked for alone
                return Pass(self.recompute((index,)), self.made())
        if not kept.uses.hand_out(index, value):
            kept.values[index] = MISSING
        return Pass({index: value}, kept.made)

    def reopen_pass(self, opened: Pass, index: int) -> torch.Tensor:
        """Brings back a value missing in a pass: taken before, or packed after the recompute.

        Raises:
            OverlapError: In a group, whose backwards must not share a tensor.
        """
        with self._lock:
            taken = opened.taken
            wanted = [index]
            if index in taken:
                if graph_exec_group() is not None:
                    raise overlap_error(self.path, index)
                # A node asked twice for its tensors asks for all, in order. The values taken after this one come back too: one
                # recompute serves the node, and each value is asked for soon.
                since = taken.index(index)
                wanted += taken[since + 1 :]
                del taken[since:]
            values = self.recompute(frozenset(wanted))
            if opened.made is not None:
                opened.made.renew()
            opened.values.extend([MISSING] * (len(values) - len(opened.values)))
            for position in wanted:
                if position < len(values):  # values of dead handles are not brought back
                    opened.values[position] = values[position]
            value: torch.Tensor = opened.values[index]
            if value is MISSING and len(wanted) > 1:
                value = self.recompute((index,))[index]
            opened.values[index] = MISSING
            taken.append(index)
            if value is MISSING:
                raise InternalError(
                    f"a recompute of region {'/'.join(format_path(self.path))!r} did not bring back tensor {index}. This is a "
                    "bug in ckpt_hooks. Please report it with the program.",
                    region=format_path(self.path),
                )
            return value
