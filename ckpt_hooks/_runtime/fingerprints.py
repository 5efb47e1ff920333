"""Fingerprints of saved tensors, by which frames of both kinds compare values of a recompute with those of forward.

To take and compare them is the package's business alone, so no mode of the user's gets to see it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ckpt_hooks._dispatch import past_modes
from ckpt_hooks._torch import sequence_number, storage_of

__all__ = ["Fingerprints", "saves_unfilled_memory"]

#: Nodes of operators that save memory without filling all of it: oneDNN's workspace, the paths of shorter sequences.
_UNFILLED = frozenset({"MkldnnRnnLayerBackward", "CtcLossBackward"})


def saves_unfilled_memory(grad_fn: str | None) -> bool:
    """Whether a node of some name has among its saved tensors memory with whatever was there before."""
    return (grad_fn or "").rstrip("0123456789") in _UNFILLED


class Fingerprints:
    """Fingerprints of what forward saves, each taken as soon as the value is complete.

    An operator may save what it fills only then (see :mod:`ckpt_hooks._filling`), so a tensor that requires no grad waits until
    another operator saves, or forward ends.
    """

    __slots__ = ("_fingerprint", "_left_out", "_sequence", "_waiting", "taken")

    def __init__(self, fingerprint: Callable[[torch.Tensor], Any], left_out: Collection[int | None]) -> None:
        """Prepares to take fingerprints.

        Args:
            fingerprint: Returns that of a tensor; runs past all modes.
            left_out: Storages of tensors of which none is taken.
        """
        self._fingerprint = fingerprint
        self._left_out = left_out
        self._waiting: list[tuple[int, torch.Tensor, int]] = []
        self._sequence = -1
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
            self.taken.append(None if kept else past_modes(self._fingerprint, tensor))
        else:
            self._sequence = sequence_number()
            self._waiting.append((len(self.taken), tensor, tensor._version))
            self.taken.append(None)

    def finish(self) -> None:
        """Takes those that wait, but for tensors that were modified meanwhile."""
        for index, tensor, version in self._waiting:
            if tensor._version == version:
                self.taken[index] = past_modes(self._fingerprint, tensor)
        self._waiting.clear()

    def close(self) -> None:
        """Ends forward; the frame has what was taken, this is held by the pack hook."""
        self.finish()
        self.taken = []
