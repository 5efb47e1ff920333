"""Uses of saved tensors by a backward in two parts (``split_backward=True``).

A pipeline schedule runs gradients of inputs and gradients of weights as two backwards. One recompute serves both: each value
stays until its handle was unpacked twice, or died (Rules 3 and 4). A backward which frees its graph unpacks each handle for the
last time. A value in memory which a backward wrote to is brought back anew, since the next must not see the write.
"""

from __future__ import annotations

import torch

from ckpt_hooks._torch.autograd import graph_task_id, keeps_graph
from ckpt_hooks._torch.tensors import storage_of, version_witness

__all__ = ["Uses"]


class Uses:
    """The uses of one frame's values.

    Attributes:
        used: Indices of the handles unpacked once, and kept for a second time.
    """

    __slots__ = ("_handed_out", "_task", "_versions", "used")

    def __init__(self) -> None:
        self._task = graph_task_id()
        # A witness and the version of each tensor handed out, by the address of its storage. A view made by a replay does not
        # count versions with its base.
        self._handed_out: dict[int, list[tuple[torch.Tensor, int]]] = {}
        # The version of each tensor without a storage, such as a sparse one, by the index of its handle: a witness of such a
        # tensor is an alias, which would hold the memory.
        self._versions: dict[int, int] = {}
        self.used: set[int] = set()

    def is_next_part(self) -> bool:
        """Whether another backward than the latest asks, so that values of dead handles may go."""
        latest, self._task = self._task, graph_task_id()
        return latest != self._task

    def is_untouched(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether no backward has written to the memory of a handle's value."""
        storage = storage_of(tensor)
        if storage is None:
            return self._versions.get(index, tensor._version) == tensor._version
        return all(witness._version == version for witness, version in self._handed_out.get(storage, ()))

    def hand_out(self, index: int, tensor: torch.Tensor) -> bool:
        """Notes that a handle is unpacked; returns whether the value stays for a second time."""
        storage = storage_of(tensor)
        if storage is None:
            self._versions[index] = tensor._version
        else:
            self._handed_out.setdefault(storage, []).append((version_witness(tensor), tensor._version))
        if index in self.used or not keeps_graph():
            return False
        self.used.add(index)
        return True
