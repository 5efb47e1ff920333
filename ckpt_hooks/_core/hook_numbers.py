"""Hooks registered by a recompute, by their numbers.

Torch numbers all hooks of the process from one counter, of modules and of tensors. A rerun has to take back its own hooks on
arguments, and no others: another thread may register hooks on the same tensors meanwhile. So the counter is an integer which
notes each increment made in a recompute, with the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .stack import is_recomputing

__all__ = ["Hooks", "hooks_on", "hooks_since", "next_hook", "put_hooks_back", "take_hooks_off"]

#: The hooks that are registered on tensors, each dict of them by their numbers, and what was in it.
Hooks = Sequence[tuple[dict[int, Any], dict[int, Any]]]

# The numbers of hooks that were registered in recomputes which still run, and the thread of each.
_registered: dict[int, int] = {}

# An entry for each recompute which runs. Without any, the counter is a plain integer, as Dynamo wants it.
_running: list[None] = []


class _Number(int):
    """A counter of hooks which notes the thread of each increment. Copies and pickles are plain integers."""

    __slots__ = ()

    def __add__(self, other: int) -> _Number:
        if is_recomputing():
            _registered[int(self)] = get_ident()
        return _Number(int.__add__(self, other))

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def next_hook() -> int:
    """Returns the number of the next hook to be registered; until :func:`hooks_since` the registering threads are noted."""
    _running.append(None)
    number = RemovableHandle.next_id
    if type(number) is not _Number:  # torch's own, or what came of loading hooks
        number = RemovableHandle.next_id = _Number(number)
    return number


def hooks_since(first: int) -> list[int]:
    """Returns the numbers of hooks registered by this thread in recomputes, and forgets the numbers.

    Args:
        first: The result of :func:`next_hook` at the begin of the recompute.
    """
    number = RemovableHandle.next_id
    plain = int(number)
    _running.pop()
    if not _running and RemovableHandle.next_id is number:  # at once: Python changes threads in calls and loops
        RemovableHandle.next_id = plain
    if plain == first:
        return []
    thread = get_ident()
    numbers = [number for number, other in list(_registered.items()) if other == thread and number >= first]
    for number in numbers:
        del _registered[number]
    return numbers


def hooks_on(tensors: Iterable[torch.Tensor], references: Iterable[Callable[[], dict[int, Any] | None]]) -> Hooks:
    """Returns the registered hooks.

    Args:
        tensors: The tensors to look at.
        references: References to hooks of tensors which may be gone.
    """
    found = [(hooks, hooks.copy()) for tensor in tensors if (hooks := tensor._backward_hooks)]
    return found + [(hooks, hooks.copy()) for reference in references if (hooks := reference())]


def take_hooks_off(tensors: Iterable[torch.Tensor], numbers: Sequence[int]) -> None:
    """Removes hooks from tensors, by number."""
    for tensor in tensors:
        if hooks := tensor._backward_hooks:
            for number in numbers:
                hooks.pop(number, None)


def put_hooks_back(before: Hooks) -> None:
    """Registers missing hooks again, in the order of their numbers."""
    for hooks, others in before:
        if any(number not in hooks for number in others):
            merged = {**others, **hooks}
            hooks.clear()
            hooks.update((number, merged[number]) for number in sorted(merged))
