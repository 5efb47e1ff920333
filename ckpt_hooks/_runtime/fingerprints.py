"""Fingerprints of saved tensors, by which frames of both kinds compare values of a recompute with those of forward.

To take and compare them is the package's business alone, so no mode of the user's gets to see it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ckpt_hooks._dispatch import past_modes
from ckpt_hooks._torch import sequence_number, storage_of

__all__ = ["Fingerprints", "leaves_memory_unfilled"]

#: Nodes of operators that save memory without filling all of it: oneDNN's workspace, the paths of shorter sequences, and the
#: noise of a leaky rectifier that is not in training.
_UNFILLED = frozenset({"MkldnnRnnLayerBackward", "CtcLossBackward", "RreluWithNoiseBackward"})


def leaves_memory_unfilled(node: Any) -> bool:
    """Whether a node has among its saved tensors memory with whatever was there before."""
    return node is not None and node.name().rstrip("0123456789") in _UNFILLED and not getattr(node, "_saved_training", False)


def _node_at_work(tensor: torch.Tensor) -> Any:
    """Returns the node that saves a tensor, where that is a result of it; else None."""
    node = None if tensor._is_view() else tensor.grad_fn  # to ask a view for its node may make another one
    return None if node is None or node._sequence_nr() != sequence_number() - 1 else node


class Fingerprints:
    """Fingerprints of what forward saves, each taken as soon as the value is complete.

    An operator may save what it fills only then (see :mod:`ckpt_hooks._filling`), so a tensor that requires no grad waits until
    another operator saves, or forward ends. Some operators never fill all that they save: of such memory none is taken.
    """

    __slots__ = ("_fingerprint", "_left_out", "_sequence", "_unfilled", "_waiting", "taken")

    def __init__(self, fingerprint: Callable[[torch.Tensor], Any], left_out: Collection[int | None]) -> None:
        """Prepares to take fingerprints.

        Args:
            fingerprint: Returns that of a tensor; runs past all modes.
            left_out: Storages of tensors of which none is taken.
        """
        self._fingerprint = fingerprint
        self._left_out = left_out
        self._waiting: list[tuple[int, torch.Tensor, int]] = []
        self._sequence = self._unfilled = -1
        self.taken: list[Any] = []

    def note(self, tensor: torch.Tensor, *, kept: bool = False) -> None:
        """Takes the fingerprint of a tensor that is saved, now or later.

        Args:
            tensor: The tensor.
            kept: Whether it is kept, and there is nothing to compare.
        """
        if self._waiting and self._sequence != sequence_number():
            self.finish()
        if self._left_out and storage_of(tensor) in self._left_out:
            self.taken.append(None)
        elif kept or tensor.requires_grad:
            if leaves_memory_unfilled(_node_at_work(tensor)):
                self._unfilled = sequence_number()
            self.taken.append(None if kept else past_modes(self._fingerprint, tensor))
        else:
            self._sequence = sequence_number()
            self.taken.append(None)
            self._waiting.append((len(self.taken) - 1, tensor, tensor._version))

    def finish(self) -> None:
        """Takes those that wait, but for tensors that were modified meanwhile, or that are never filled."""
        for index, tensor, version in self._waiting:
            if tensor._version == version and self._sequence != self._unfilled:
                self.taken[index] = past_modes(self._fingerprint, tensor)
        self._waiting.clear()

    def close(self) -> None:
        """Ends forward; the frame has what was taken, this is held by the pack hook."""
        self.finish()
        self.taken = []
