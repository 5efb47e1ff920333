"""Descriptions of saved tensors: the region, and the tensor's fate until backward."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ckpt_hooks._torch import is_kept_anyway
from ckpt_hooks.errors import CheckpointError

__all__ = ["Fate", "Kept", "Saved", "TrackedKept", "fate_of_kept", "nbytes_of"]

# Stands in autograd's graph for a saved tensor that is kept: the tensor, its version when it was saved, and the path of the
# region that saved it. That is a leaf that requires grad, a parameter mostly, which costs nothing since the graph holds it in
# any case; or a tensor that nothing can be compared of, a nested one without a shape.
Kept = list[Any]


class TrackedKept(list[Any]):
    """The same, with support for weak references.

    Attributes:
        needed_by: Adds the operator which saved the tensor to an error; unset outside of debug mode.
    """

    __slots__ = ("__weakref__", "needed_by")

    needed_by: Callable[[CheckpointError], None]


class Fate(enum.Enum):
    """The fate of a tensor saved in a region."""

    #: Dropped, and computed again.
    DROPPED = "dropped"
    #: A leaf which requires grad, kept: the graph holds the leaf in any case.
    LEAF = "leaf"
    #: From outside of the region, kept.
    EXTERNAL = "external"
    #: Kept by a policy.
    POLICY = "by policy"
    #: On the host.
    OFFLOADED = "offloaded"
    #: Cannot be brought back, since the memory was written to or given away.
    LOST = "lost"


class Saved(NamedTuple):
    """The description of a saved tensor.

    Attributes:
        region: Names of the region and of the regions around, outermost first.
        position: The number of tensors the region saved before. A recorded region counts tensors with a handle alone; others
            have a negative position.
        fate: The tensor's fate.
        shape: Its sizes; None for a nested tensor, or where unknown: in a recorded region without observers, and where
            metadata is not compared.
        dtype: Its dtype; None where unknown, likewise.
        nbytes: Its size in bytes; None where unknown.
        made_by: The operator which returned the tensor; None where unknown.
    """

    region: tuple[str, ...]
    position: int
    fate: Fate
    shape: torch.Size | None
    dtype: torch.dtype | None
    nbytes: int | None
    made_by: str | None = None


def fate_of_kept(tensor: torch.Tensor) -> Fate:
    """Returns the fate of a tensor that stands in the graph itself."""
    return Fate.LEAF if is_kept_anyway(tensor) else Fate.EXTERNAL


def nbytes_of(shape: torch.Size, dtype: torch.dtype) -> int | None:
    """Returns the size of a dense tensor in bytes; None for a nested tensor with a ragged dimension."""
    return shape.numel() * dtype.itemsize if all(type(size) is int for size in shape) else None
