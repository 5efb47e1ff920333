"""Fingerprints of saved tensors, by which frames of both kinds compare values of a recompute with those of forward.

To take and compare them is the package's business alone, so no mode of the user's gets to see it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ckpt_hooks._core.modes import past_modes
from ckpt_hooks._torch import sequence_number, storage_of

__all__ = ["Fingerprints", "may_be_unfilled"]


def _is_random_state(tensor: torch.Tensor) -> bool:
    """Whether a tensor that attention saved may be the state of a generator, which attention fills only where it drops out.

    That is two integers of 64 bits, or one number for the seed and one for the offset. The lengths of sequences have 32 bits.
    """
    return tensor.dtype in _LONG or tensor.dim() == 0


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a workspace of cuDNN's or MIOpen's, of which the library alone knows what it fills."""
    return tensor.dtype is torch.uint8


def _is_any(tensor: torch.Tensor) -> bool:
    return True


_RRELU = "RreluWithNoiseBackward"
_LONG = (torch.int64, torch.uint64)

#: Nodes of operators that save memory without filling all of it, and which of their tensors without gradient that may be:
#: oneDNN's workspace, the paths of shorter sequences, the noise of a leaky rectifier that is not in training, the generator's
#: state of attention without dropout, and workspaces of cuDNN and MIOpen.
_UNFILLED: dict[str, Callable[[torch.Tensor], bool]] = {
    "MkldnnRnnLayerBackward": _is_any,
    "CtcLossBackward": _is_any,
    _RRELU: _is_any,
    "ScaledDotProductFlashAttentionBackward": _is_random_state,
    "ScaledDotProductEfficientAttentionBackward": _is_random_state,
    "ScaledDotProductCudnnAttentionBackward": _is_random_state,
    "ScaledDotProductFusedAttentionOverrideableBackward": _is_random_state,
    "FlashAttentionBackward": _is_random_state,
    "EfficientAttentionBackward": _is_random_state,
    "CudnnAttentionBackward": _is_random_state,
    "CudnnRnnBackward": _is_bytes,
    "MiopenRnnBackward": _is_bytes,
    "CudnnBatchNormBackward": _is_bytes,
    "MiopenBatchNormBackward": _is_bytes,
    "NativeBatchNormBackward": _is_bytes,
    "BatchNormWithUpdateBackward": _is_bytes,
    "BatchNormNoUpdateBackward": _is_bytes,
}


def _unfilled_by(node: Any) -> Callable[[torch.Tensor], bool] | None:
    """Returns which tensors without gradient a node may have saved with whatever was in memory before; None for none."""
    if node is None:
        return None
    name = node.name().rstrip("0123456789")
    return None if name == _RRELU and node._saved_training else _UNFILLED.get(name)


def may_be_unfilled(node: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor without gradient that a node has saved may be memory that its operator did not fill."""
    is_unfilled = _unfilled_by(node)
    return is_unfilled is not None and is_unfilled(tensor)


def _node_at_work(tensor: torch.Tensor) -> Any:
    """Returns the node that saves a tensor, where that is a result of it; else None."""
    node = None if tensor._is_view() else tensor.grad_fn  # to ask a view for its node may make another one
    return None if node is None or node._sequence_nr() != sequence_number() - 1 else node


class Fingerprints:
    """Fingerprints of what forward saves, each taken as soon as the value is complete.

    An operator may save what it fills only then (see :mod:`ckpt_hooks._function.collector`), so a tensor that requires no grad
    waits until another operator saves, or forward ends. Some operators never fill all that they save: of such memory none is
    taken.
    """

    __slots__ = ("_fingerprint", "_is_unfilled", "_left_out", "_sequence", "_unfilled", "_waiting", "taken")

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
        self._is_unfilled: Callable[[torch.Tensor], bool] = _is_any
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
            is_unfilled = _unfilled_by(_node_at_work(tensor))
            if is_unfilled is not None:
                self._unfilled, self._is_unfilled = sequence_number(), is_unfilled
            self.taken.append(None if kept else past_modes(self._fingerprint, tensor))
        else:
            self._sequence = sequence_number()
            self.taken.append(None)
            self._waiting.append((len(self.taken) - 1, tensor, tensor._version))

    def finish(self) -> None:
        """Takes those that wait, but for tensors that were modified meanwhile, or that are never filled."""
        for index, tensor, version in self._waiting:
            if tensor._version == version and not (self._sequence == self._unfilled and self._is_unfilled(tensor)):
                self.taken[index] = past_modes(self._fingerprint, tensor)
        self._waiting.clear()

    def close(self) -> None:
        """Ends forward; the frame has what was taken, this is held by the pack hook."""
        self.finish()
        self.taken = []
