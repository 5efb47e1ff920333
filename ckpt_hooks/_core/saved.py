"""Descriptions of saved tensors: which region each belongs to, and what becomes of it until backward asks for it."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch

__all__ = ["Fate", "Kept", "Saved", "TrackedKept", "nbytes_of"]

# Stands in autograd's graph for a saved tensor that is kept: the tensor, its version when it was saved, and the path of the
# region that saved it. That is a leaf that requires grad, a parameter mostly, which costs nothing since the graph holds it in
# any case; or a tensor that nothing can be compared of, a nested one without a shape.
Kept = list[Any]


class TrackedKept(list[Any]):
    """The same, where a weak reference follows it."""

    __slots__ = ("__weakref__",)


class Fate(enum.Enum):
    """What became of a tensor that autograd saved in a region."""

    #: It is computed again.
    DROPPED = "dropped"
    #: It is a leaf that requires grad, and kept: the graph holds it in any case.
    LEAF = "leaf"
    #: It comes from outside of the region, and is kept.
    EXTERNAL = "external"
    #: A policy keeps it.
    POLICY = "by policy"
    #: It is on the host.
    OFFLOADED = "offloaded"
    #: It cannot be brought back: its memory was written to, or given away.
    LOST = "lost"


class Saved(NamedTuple):
    """A saved tensor, described without recomputing anything.

    Attributes:
        region: Names of the region that saved it and of those around, outermost first.
        position: How many tensors the region had saved before, in a recorded region without those that have no handle;
            -1 for one of these.
        fate: What became of it.
        shape: Its sizes; None where it has none, or they are not known: in a recorded region that nobody watches, and where
            metadata is not compared.
        dtype: Its dtype; None where that is not known, likewise.
        nbytes: Its size in bytes; None where that is not known.
        made_by: The operator that returned it; None where that is not known.
    """

    region: tuple[str, ...]
    position: int
    fate: Fate
    shape: torch.Size | None
    dtype: torch.dtype | None
    nbytes: int | None
    made_by: str | None = None


def nbytes_of(shape: torch.Size, dtype: torch.dtype) -> int:
    """Returns the size of a dense tensor in bytes."""
    return shape.numel() * dtype.itemsize
