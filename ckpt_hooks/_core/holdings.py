"""Holdings: tensors kept alive by a frame, found by going through its parts, for reports and never on a hot path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ckpt_hooks._torch import is_kept_anyway
from ckpt_hooks._torch.graphs import SAVED_TENSORS, packed_of

from .numbers import storage_and_size
from .parts import dense_parts, parts_of
from .words import describe_kind, kind_of

__all__ = ["Holding", "holdings_in", "owners_in", "size_of"]


_ATOMS = frozenset({type(None), bool, bytes, float, int, str, torch.device, torch.dtype, torch.Size})


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
        parts: Of a tensor made of others, the number and the size of the storage of each.
    """

    description: str
    reason: str
    nbytes: int
    storage: int | None
    storage_nbytes: int
    shape: torch.Size | None
    dtype: torch.dtype
    device: torch.device | None
    parts: tuple[tuple[int | None, int], ...] = ()

    @property
    def is_on_host(self) -> bool:
        """Whether the tensor was moved to the host."""
        return self.description.endswith(" on the host")


def holdings_in(part: Any, reason: str, seen: set[int], skipped: tuple[type, ...] = ()) -> Iterator[Holding]:
    """Yields each tensor in a part of a frame, once; leaves which require grad are not the frame's.

    Args:
        part: A tensor, a container, or an object of this package.
        reason: The reason, in words.
        seen: Identities of objects met before; the function adds to these.
        skipped: Classes of shared objects: frames, with their handles, and objects common to several frames.
    """
    for value in _found_in(part, seen, skipped):
        if isinstance(value, skipped):
            continue
        if not isinstance(value, torch.Tensor):  # it knows what it holds, though the tensor is elsewhere
            if (found := value.holding(reason)) is not None:
                yield found
        elif value.numel() and not is_kept_anyway(value):  # empty ones tell of versions
            dtype, shape = kind_of(value)
            inner = dense_parts(value)
            is_dense = len(inner) == 1 and inner[0] is value
            storage, parts = storage_and_size(value) if is_dense else (None, 0), () if is_dense else inner
            sizes = tuple(map(storage_and_size, parts))
            yield Holding(describe_kind(value), reason, size_of(value), *storage, shape, dtype, value.device, sizes)


def owners_in(part: Any, kind: type[Any], skipped: tuple[type, ...] = ()) -> list[Any]:
    """Returns each object of a class in a part of a frame, as the owner of a handle too, without those inside others.

    Args:
        part: A container, or an object of this package.
        kind: The class, of frames.
        skipped: Classes of objects not to look into.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [part]
    while todo:
        for value in _found_in(todo.pop(), seen, (kind, *skipped)):
            if isinstance(value, kind):
                found[id(value)] = value
            elif not isinstance(value, (torch.Tensor, skipped)):
                todo += _attributes(value)
    return list(found.values())


def _found_in(part: Any, seen: set[int], skipped: tuple[type, ...]) -> Iterator[Any]:
    """Yields tensors, objects with a ``holding`` of their own, and objects of the skipped classes."""
    todo = [part]
    while todo:
        value = todo.pop()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield value
            continue
        owner = getattr(value, "frame", value)
        if isinstance(owner, skipped):
            yield owner
        elif isinstance(value, dict):
            seen.add(id(value))
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            seen.add(id(value))
            todo += value
        elif isinstance(value, SAVED_TENSORS):
            seen.add(id(value))
            todo.append(packed_of(value))
        elif hasattr(type(value), "holding"):
            seen.add(id(value))
            yield value
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
