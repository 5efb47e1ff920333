"""Holdings: tensors kept alive by a frame, found by going through its parts, for reports and never on a hot path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ckpt_hooks._torch import is_kept_anyway

from .numbers import storage_and_size
from .parts import parts_of
from .words import describe_kind, kind_of

__all__ = ["Holding", "holdings_in", "size_of"]


class Holding(NamedTuple):
    """A tensor kept alive by a frame.

    Attributes:
        description: Dtype and shape, as in ``"float32[4, 8]"``; with ``" on the host"`` for a tensor moved there.
        reason: The reason, in words.
        nbytes: The tensor's size in bytes. Tensors in one storage share their bytes.
        storage: The number of its storage; None without a storage of its own.
        storage_nbytes: The size of its storage in bytes; 0 without a storage of its own.
        shape: Its sizes; None for a nested tensor.
        dtype: Its dtype.
        device: Its device; None where the user's saved-tensor hooks have the tensor.
    """

    description: str
    reason: str
    nbytes: int
    storage: int | None
    storage_nbytes: int
    shape: torch.Size | None
    dtype: torch.dtype
    device: torch.device | None


def holdings_in(part: Any, reason: str, seen: set[int], skipped: tuple[type, ...] = ()) -> Iterator[Holding]:
    """Yields each tensor in a part of a frame, once; leaves which require grad are not the frame's.

    Args:
        part: A tensor, a container, or an object of this package.
        reason: The reason, in words.
        seen: Identities of objects met before; the function adds to these.
        skipped: Classes of shared objects: frames, with their handles, and objects common to several frames.
    """
    todo = [part]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(getattr(value, "frame", value), skipped):
            continue
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            if value.numel() and not is_kept_anyway(value):  # empty ones tell of versions
                dtype, shape = kind_of(value)
                storage = storage_and_size(value)
                yield Holding(describe_kind(value), reason, size_of(value), *storage, shape, dtype, value.device)
        elif isinstance(value, dict):
            seen.add(id(value))
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            seen.add(id(value))
            todo += value
        elif hasattr(type(value), "holding"):  # it knows what it holds, though the tensor is elsewhere
            seen.add(id(value))
            if (found := value.holding(reason)) is not None:
                yield found
        elif type(value).__module__.startswith("ckpt_hooks.") and not isinstance(value, type):
            seen.add(id(value))
            todo += _attributes(value)


def size_of(tensor: torch.Tensor) -> int:
    """Returns the size of a tensor in bytes; of a tensor of another class or layout, the size of its parts."""
    parts = parts_of(tensor)
    return tensor.nbytes if parts is None else sum(size_of(part) for part in parts if isinstance(part, torch.Tensor))


def _attributes(value: Any) -> list[Any]:
    names = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return [getattr(value, name, None) for name in names] + list(getattr(value, "__dict__", {}).values())
