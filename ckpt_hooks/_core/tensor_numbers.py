"""Numbers of tensors and storages, for events and reports; never used twice.

Addresses will not do: the next tensor of a program often has the address of a dead tensor. A weak reference to the Python
object of a storage lasts as long as the storage, since torch keeps a referenced object alive.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from ckpt_hooks._torch.tensors import dry_storages, storage_of

_next_number = itertools.count(1).__next__

# By the identity of what is numbered, which leaves before another thing has the same.
_numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
# The identity of what is numbered, by the number.
_identities: dict[int, int] = {}


# Observers, by the number of the storage.
_audience: dict[int, weakref.WeakSet[Any]] = {}


def _forget(key: int, number: int, _: Any) -> None:
    del _numbers[key], _identities[number]
    for observer in _audience.pop(number, ()):
        observer.freed(number)


def number_of(thing: Any) -> int:
    found = _numbers.get(id(thing))
    if found is not None:
        return found[1]
    number = _next_number()
    _identities[number] = id(thing)
    _numbers[id(thing)] = weakref.ref(thing, partial(_forget, id(thing), number)), number
    return number


def storage_and_size(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Returns the number of a tensor's storage, the same for all views, and its size in bytes; (None, 0) without a storage."""
    if storage_of(tensor) is None:
        return None, 0
    storage = tensor.untyped_storage()
    return number_of(storage), storage.nbytes()


def address_in(storage: Any) -> int:
    """Returns the address of the memory of a storage, in a dry run of its object; 0 without memory, as of fake tensors."""
    if storage.device.type == "meta":
        return storage._cdata if storage._cdata in dry_storages else 0
    try:
        return int(storage.data_ptr())
    except RuntimeError:
        return 0


def address_of(storage: int | None) -> int:
    """Returns the address of the memory of a storage with a number; 0 if the storage is gone, or has no memory."""
    key = None if storage is None else _identities.get(storage)
    found = None if key is None else _numbers[key][0]()
    return 0 if found is None else address_in(found)


def tell_when_freed(storage: int, observers: Iterable[Any]) -> None:
    """Registers observers to hear when a storage is freed, each once. Observers are held weakly."""
    _audience.setdefault(storage, weakref.WeakSet()).update(observers)
