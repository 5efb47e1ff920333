"""The values of a function frame whose backward comes in two parts (``split_backward=True``).

A pipeline schedule runs the backward of a stage in parts: gradients of the inputs first, gradients of the weights later, in
graph tasks of their own. The first part recomputes the region. Each value stays until its handle was unpacked twice, or died
(Rules 3 and 4). A part which frees its graph unpacks each handle for the last time.
"""

from __future__ import annotations

import torch

from ckpt_hooks._core.scopes import MISSING, SPLIT
from ckpt_hooks._torch import graph_task_id, keeps_graph

from .handles import HandleFrame, Pass

__all__ = ["open_split_pass"]


class SplitPass(Pass):
    """The values of one frame for two backwards.

    Attributes:
        task: The graph task of the latest request.
        used: The handles unpacked once.
        versions: The version of each value after the recompute. Values in one storage have one counter.
    """

    __slots__ = ("task", "used", "versions")

    def __init__(self, frame: HandleFrame) -> None:
        """Recomputes the values of all living handles.

        Args:
            frame: The frame.
        """
        Pass.__init__(self, frame.observed(frame.recompute, None), frame.made())
        self.task = graph_task_id()
        self.used: set[int] = set()
        self.versions = [value._version for value in self.values]  # None for MISSING

    def drop_dead(self, frame: HandleFrame) -> None:
        """Drops the values of dead handles, once in each backward."""
        task = graph_task_id()
        if task != self.task:
            self.task = task
            for index, alive in enumerate(frame.alive()[: len(self.values)]):
                if not alive:
                    self.values[index] = MISSING

    def take(self, index: int) -> torch.Tensor:
        """Returns a value, :data:`MISSING` if the value is not there.

        A value in memory which a backward wrote to counts as missing: the next must not see the write.

        Args:
            index: The index of the handle.
        """
        value: torch.Tensor = self.values[index] if index < len(self.values) else MISSING
        if value is not MISSING:
            is_written = value._version != self.versions[index]
            if is_written or index in self.used or not keeps_graph():
                self.values[index] = MISSING
            else:
                self.used.add(index)
            if is_written:
                return MISSING  # type: ignore[no-any-return]
        return value


def open_split_pass(frame: HandleFrame, index: int) -> Pass:
    """Returns a pass, for the caller alone, with the value of one handle; the caller holds the frame's lock.

    Args:
        frame: The frame, unpacked by a backward.
        index: The index of the handle.
    """
    kept = frame.passes.get(SPLIT)
    if isinstance(kept, SplitPass):
        kept.drop_dead(frame)
        value = kept.take(index)
        if value is not MISSING:
            return Pass({index: value}, kept.made)
    kept = SplitPass(frame)
    frame.passes = {SPLIT: kept}
    value = kept.take(index)
    if value is MISSING:  # modified in the course of the recompute: such a value has to be asked for alone
        return Pass(frame.observed(frame.recompute, (index,)), frame.made())
    return Pass({index: value}, kept.made)
