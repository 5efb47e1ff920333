"""Memory which its owner frees after forward and can fill again: who owns the memory, and loans of it to replays.

A framework that shards parameters gathers a unit's parameters for the unit's forward and frees them after it. A replay borrows
the memory, which the owner frees when the last borrower gives it back. The one such framework known here is FSDP2.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Owner(Protocol):
    """The owner of some tensors' memory. Equal owners count as the same owner."""

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def fill(self) -> Callable[[], None] | None:
        """Fills the memory; returns a function that frees it again, None where nothing was filled."""


class RefillSource(NamedTuple):
    """The owner of a tensor's memory, and the tensor from which the owner fills it."""

    owner: Owner
    source: torch.Tensor


@functools.cache
def _finder_of_fsdp() -> Callable[[torch.Tensor], tuple[Owner, torch.Tensor] | None]:
    from .fsdp import unit_of  # imports the framework

    return unit_of


def owner_of(tensor: torch.Tensor) -> RefillSource | None:
    """Returns where the contents of a tensor come from; None for memory which stays."""
    if "torch.distributed.fsdp" not in sys.modules:  # a question costs only a look-up
        return None
    found = _finder_of_fsdp()(tensor)
    return None if found is None else RefillSource(*found)


class FilledMemory:
    __slots__ = ("free", "users")

    def __init__(self, free: Callable[[], None]) -> None:
        self.free, self.users = free, 0


_loans: dict[Any, FilledMemory] = {}
_lock = threading.RLock()


def is_lent(owner: Owner) -> bool:
    """Whether a replay has borrowed the memory of an owner: the memory is freed after the last use."""
    return owner in _loans


def borrow(owner: Owner) -> FilledMemory | None:
    """Fills the memory of an owner until :func:`give_back`; returns None if the memory was filled without a loan, and stays."""
    with _lock:
        free, loan = owner.fill(), _loans.get(owner)
        if loan is None:
            if free is None:
                return None
            loan = _loans[owner] = FilledMemory(free)
        elif free is not None:  # the owner had freed the memory in between
            loan.free = free
        loan.users += 1
        return loan


def give_back(owner: Owner, loan: FilledMemory) -> None:
    """Ends a use of borrowed memory, and frees the memory after the last use."""
    with _lock:
        loan.users -= 1
        if not loan.users:
            del _loans[owner]
            loan.free()
