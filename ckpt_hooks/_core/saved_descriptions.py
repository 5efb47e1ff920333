"""Descriptions of saved tensors: the region, and the tensor's fate until backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ckpt_hooks._torch.tensors import is_kept_anyway
from ckpt_hooks.errors import CheckpointError

from .holdings import Cause, Reason

__all__ = ["Kept", "Saved", "TrackedKept", "cause_of_kept", "nbytes_of"]

# Stands in autograd's graph for a saved tensor that is kept: the tensor, its version when it was saved, and the path of the
# region that saved it. That is a leaf that requires grad, a parameter mostly, which costs nothing since the graph holds it in
# any case; or a tensor that nothing can be compared of, a nested one without a shape.
Kept = list[Any]


class TrackedKept(list[Any]):
    """The same, with support for weak references.

    Attributes:
        cause: The reason for keeping the tensor; unset for a leaf that requires grad.
        needed_by: Adds the operator which saved the tensor to an error; unset outside of debug mode.
    """

    __slots__ = ("__weakref__", "cause", "needed_by")

    cause: Cause
    needed_by: Callable[[CheckpointError], None]


class Saved(NamedTuple):
    """The description of a saved tensor.

    Attributes:
        region: Names of the region and of the regions around, outermost first.
        position: The number of tensors the region saved before. A recorded region counts tensors with a handle alone; others
            have a negative position.
        fate: DROPPED, LOST, or the reason for holding the tensor.
        shape: The sizes; None for a nested tensor, or where unknown: in a recorded region without observers, and where
            metadata is not compared.
        dtype: The dtype; None where unknown, likewise.
        nbytes: The size in bytes; None where unknown.
        made_by: The operator which returned the tensor; None where unknown.
    """

    region: tuple[str, ...]
    position: int
    fate: Reason
    shape: torch.Size | None
    dtype: torch.dtype | None
    nbytes: int | None
    made_by: str | None = None


def cause_of_kept(packed: Kept) -> Cause:
    """Returns the reason for a tensor that stands in the graph itself."""
    cause: Cause = getattr(packed, "cause", _INPUT)
    return _PARAMETER if is_kept_anyway(packed[0]) else cause


_PARAMETER, _INPUT = Cause(Reason.PARAMETER), Cause(Reason.INPUT)


def nbytes_of(shape: torch.Size, dtype: torch.dtype) -> int | None:
    """Returns the size of a dense tensor in bytes; None for a nested tensor with a ragged dimension."""
    return shape.numel() * dtype.itemsize if all(type(size) is int for size in shape) else None
