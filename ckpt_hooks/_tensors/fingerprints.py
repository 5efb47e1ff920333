"""Fingerprints of saved tensors, for frames of both kinds to compare a recompute's values with forward's.

The package takes and compares fingerprints past all modes of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ckpt_hooks._core.modes import past_modes
from ckpt_hooks._torch.autograd import node_number, sequence_number
from ckpt_hooks._torch.tensors import storage_of

__all__ = ["Fingerprints", "may_be_unfilled"]


def _is_random_state(tensor: torch.Tensor) -> bool:
    """Whether a tensor saved by attention may be a generator's state, which attention fills only under dropout."""
    # Two integers of 64 bits, or one number each for seed and offset. Lengths of sequences, saved as well, have 32 bits.
    return tensor.dtype in _LONG or tensor.dim() == 0


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a workspace of cuDNN's or MIOpen's, of which only the library knows the filled part."""
    return tensor.dtype is torch.uint8


def _is_any(tensor: torch.Tensor) -> bool:
    return True


_RRELU = "RreluWithNoiseBackward"
_LONG = (torch.int64, torch.uint64)

#: Nodes of operators which save memory partly unfilled, with a test for such tensors, all without gradient: oneDNN's workspace,
#: the paths of shorter sequences, the noise of a leaky rectifier in evaluation, the generator's state of attention without
#: dropout, and workspaces of cuDNN and MIOpen.
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
    """Returns a test for possibly unfilled tensors without gradient saved by a node; None for a node without such tensors."""
    if node is None:
        return None
    name = node.name().rstrip("0123456789")
    return None if name == _RRELU and node._saved_training else _UNFILLED.get(name)


def may_be_unfilled(node: Any, tensor: torch.Tensor) -> bool:
    """Whether a saved tensor without gradient may be memory unfilled by the node's operator."""
    is_unfilled = _unfilled_by(node)
    return is_unfilled is not None and is_unfilled(tensor)


def _node_at_work(tensor: torch.Tensor) -> Any:
    """Returns the node which is saving its own result ``tensor``; None if the tensor is no result of that node."""
    node = None if tensor._is_view() else tensor.grad_fn  # asking a view may make another node
    return None if node is None or node_number(node) != sequence_number() - 1 else node


class Fingerprints:
    """Fingerprints of tensors saved in forward, each taken once the value is complete.

    An operator may save a tensor before filling it (:mod:`ckpt_hooks._function.collector`), so a tensor without gradient waits
    until another operator saves, or forward ends. Memory which operators never fill has no fingerprint.
    """

    __slots__ = ("_fingerprint", "_is_unfilled", "_left_out", "_sequence", "_unfilled", "_waiting", "taken")

    def __init__(self, fingerprint: Callable[[torch.Tensor], Any], left_out: Collection[int | None]) -> None:
        self._fingerprint = fingerprint
        self._left_out = left_out
        self._waiting: list[tuple[int, torch.Tensor, int]] = []
        self._sequence = self._unfilled = -1
        self._is_unfilled: Callable[[torch.Tensor], bool] = _is_any
        self.taken: list[Any] = []

    def note(self, tensor: torch.Tensor, *, kept: bool = False) -> None:
        """Takes the fingerprint of a saved tensor, now or later.

        Args:
            tensor: The tensor.
            kept: Whether the tensor is kept, which leaves nothing to compare.
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
        """Takes the waiting fingerprints, except for tensors modified meanwhile or never filled."""
        for index, tensor, version in self._waiting:
            if tensor._version == version and not (self._sequence == self._unfilled and self._is_unfilled(tensor)):
                self.taken[index] = past_modes(self._fingerprint, tensor)
        self._waiting.clear()

    def close(self) -> None:
        """Ends forward, and drops the list: the frame has its fingerprints, and the pack hook keeps this object alive."""
        self.finish()
        self.taken = []
