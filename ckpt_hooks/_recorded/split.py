"""The replay of a recorded frame whose backward comes in two parts (``split_backward=True``).

A pipeline schedule runs gradients of inputs and gradients of weights as two backwards. One replay serves both: each value stays
until its handle was unpacked twice, or died. A backward which frees its graph unpacks each handle for the last time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from ckpt_hooks._core.scopes import SPLIT
from ckpt_hooks._torch import graph_task_id, keeps_graph, storage_address, version_witness

from .replay import Replay, Replayable
from .values import Value

__all__ = ["SplitReplay"]


class _Handle(Protocol):
    """A handle, see :class:`.replayed.Handle`."""

    index: int
    value: Value


class SplitReplay(Replay):
    """The tensors of one frame for two backwards. The frame owns this object, so the frame is held weakly.

    Attributes:
        handed_out: A witness and the version of each tensor handed out, by the address of its storage. A view made by a replay
            does not count versions with its base.
        handles: For each handle with uses left: the handle, weakly; the number of its value; the number of uses.
        task: The graph task of the latest request.
    """

    def __init__(self, frame: Replayable, roots: Sequence[Value], handles: Sequence[_Handle]) -> None:
        """Makes a plan.

        Args:
            frame: The frame.
            roots: The values which one backward will ask for.
            handles: The handles which backward will unpack; their values are asked for once more.
        """
        Replay.__init__(self, frame, [*roots, *(handle.value for handle in handles)], SPLIT)
        self.handles: dict[int, tuple[weakref.ref[_Handle], int, int]] = {
            handle.index: (weakref.ref(handle), handle.value.number, 2) for handle in handles
        }
        self.task = graph_task_id()
        self.handed_out: dict[int, list[tuple[torch.Tensor, int]]] = {}

    @property
    def frame(self) -> Replayable:
        """The frame, alive since a handle in use holds it."""
        frame = self._frame()
        assert frame is not None
        return frame

    @frame.setter
    def frame(self, frame: Replayable) -> None:
        self._frame = weakref.ref(frame)

    def expects_handle(self, index: int) -> bool:
        """Whether a handle has uses left, and no backward has written to its memory."""
        task = graph_task_id()
        if task != self.task:
            self.task = task
            self._drop_dead()
        found = self.handles.get(index)
        if found is None:
            return False
        tensor = self.held.get(found[1], self.tensors.get(found[1]))
        if tensor is None:
            return True
        handed_out = self.handed_out.get(storage_address(tensor), ())
        return all(witness._version == version for witness, version in handed_out)

    def used(self, index: int, tensor: torch.Tensor) -> None:
        """Notes a use of a handle.

        Args:
            index: The index of the handle.
            tensor: The tensor handed out.
        """
        reference, number, left = self.handles.pop(index)
        self.handed_out.setdefault(storage_address(tensor), []).append((version_witness(tensor), tensor._version))
        if left == 2:
            if keeps_graph():
                self.handles[index] = reference, number, 1
            else:
                self._release(number, 1)

    def _drop_dead(self) -> None:
        for index, (reference, number, left) in list(self.handles.items()):
            if reference() is None:
                del self.handles[index]
                self._release(number, left)

    def _release(self, number: int, uses: int) -> None:
        self.readers[number] -= uses
        if not self.readers[number]:
            del self.readers[number]
            self.tensors.pop(number, None)
            self.held.pop(number, None)
