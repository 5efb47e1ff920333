"""Numbers that stand for tensors and storages in events and reports, and are never used again.

Addresses will not do: the next tensor of a program often has that of one that just died. A weak reference to the Python object
of a storage lasts as long as the storage, since torch keeps that object while it is referenced.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch

from ckpt_hooks._torch import storage_of

__all__ = ["number_of", "storage_number", "tell_when_freed"]

_next_number = itertools.count(1).__next__

# By the identity of what is numbered, which leaves before another thing has the same.
_numbers: dict[int, tuple[weakref.ref[Any], int]] = {}


class _Told(Protocol):
    """An observer of storages."""

    def freed(self, storage: int) -> None:
        """A storage is freed."""


# Who is told, by the number of the storage.
_audience: dict[int, weakref.WeakSet[Any]] = {}


def _forget(key: int, number: int, _: Any) -> None:
    del _numbers[key]
    for observer in _audience.pop(number, ()):
        observer.freed(number)


def _numbered(thing: Any) -> int:
    found = _numbers.get(id(thing))
    if found is not None:
        return found[1]
    number = _next_number()
    _numbers[id(thing)] = weakref.ref(thing, partial(_forget, id(thing), number)), number
    return number


def number_of(tensor: torch.Tensor) -> int:
    """Returns the number of a tensor."""
    return _numbered(tensor)


def storage_number(tensor: torch.Tensor) -> int | None:
    """Returns the number of the storage of a tensor, the same for all views of it; None for a tensor that has none."""
    return None if storage_of(tensor) is None else _numbered(tensor.untyped_storage())


def tell_when_freed(storage: int, observers: Iterable[_Told]) -> None:
    """Has observers told when a storage is freed, each once, as long as they are there.

    Args:
        storage: Its number.
        observers: Who is told.
    """
    _audience.setdefault(storage, weakref.WeakSet()).update(observers)
