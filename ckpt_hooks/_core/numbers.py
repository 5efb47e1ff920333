"""Numbers of tensors and storages, for events and reports; never used twice.

Addresses will not do: the next tensor of a program often has the address of a dead tensor. A weak reference to the Python
object of a storage lasts as long as the storage, since torch keeps a referenced object alive.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch

from ckpt_hooks._torch import storage_of

__all__ = ["number_of", "storage_and_size", "tell_when_freed"]

_next_number = itertools.count(1).__next__

# By the identity of what is numbered, which leaves before another thing has the same.
_numbers: dict[int, tuple[weakref.ref[Any], int]] = {}


class _Told(Protocol):
    """An observer of storages."""

    def freed(self, storage: int) -> None:
        """A storage is freed."""


# Observers, by the number of the storage.
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


def storage_and_size(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Returns the number of a tensor's storage, the same for all views, and its size in bytes; (None, 0) without a storage."""
    if storage_of(tensor) is None:
        return None, 0
    storage = tensor.untyped_storage()
    return _numbered(storage), storage.nbytes()


def tell_when_freed(storage: int, observers: Iterable[_Told]) -> None:
    """Registers observers to hear when a storage is freed, each once. Observers are held weakly.

    Args:
        storage: The storage's number.
        observers: The observers.
    """
    _audience.setdefault(storage, weakref.WeakSet()).update(observers)
