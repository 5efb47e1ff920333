"""Inputs saved as autograd saves tensors, through the active saved-tensor hooks (Rule 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt_hooks._torch.autograd import SavedTensor, pop_saved_tensors_hooks, push_saved_tensors_hooks, save_tensor

__all__ = ["save_all"]


def save_all(
    tensors: Sequence[torch.Tensor], *, each_occurrence: bool
) -> tuple[list[SavedTensor | int | None], list[torch.Tensor | None]]:
    """Saves tensors through the active hooks; returns the saved tensors, and the kept tensors."""
    saved: list[SavedTensor | int | None] = []
    kept: list[torch.Tensor | None] = []
    positions: dict[int, int] = {}
    for position, tensor in enumerate(tensors):
        first = positions.setdefault(id(tensor), position)
        value = _saved_or_none(tensor) if first == position or each_occurrence else None
        if first != position:
            saved.append(first)
            kept.append(None)
        else:
            # A leaf is kept besides: the graph keeps it anyway, and a rerun gets the very object.
            keep = value is None or (tensor.is_leaf and tensor.requires_grad)
            saved.append(None if keep else value)
            kept.append(tensor if keep else None)
    return saved, kept


def _saved_or_none(tensor: torch.Tensor) -> SavedTensor | None:
    """Returns a tensor as saved, or None where autograd refuses to save: the function may just pass such a tensor on."""
    if tensor.is_inference():
        return None
    try:
        return save_tensor(tensor)
    except RuntimeError:
        # Raised by autograd, as for a view whose base was modified, or by a hook? A hook which does nothing tells.
        push_saved_tensors_hooks(_identity, _identity)
        try:
            save_tensor(tensor)
        except RuntimeError:
            return None
        finally:
            pop_saved_tensors_hooks()
        raise


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
