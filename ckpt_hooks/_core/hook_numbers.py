"""Hooks on the tensors of a recompute: which of them it registers, by their numbers, and leaving all as they were.

Torch numbers all hooks of the process from one counter, of modules and of tensors. A rerun has to take back the hooks that it
registers on the arguments, and no others: another thread may register some on the same tensors meanwhile. So the counter is an
integer that notes, when it is counted up, which thread does so in a recompute.
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


class _Number(int):
    """A number of hooks that notes who draws the next one. It is copied and pickled as what it is otherwise, an integer."""

    __slots__ = ()

    def __add__(self, other: int) -> _Number:
        if is_recomputing():
            _registered[int(self)] = get_ident()
        return _Number(int.__add__(self, other))

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def next_hook() -> int:
    """Returns the number of the hook that will be registered next; from now on it is noted who registers any."""
    number = RemovableHandle.next_id
    if type(number) is not _Number:  # torch's own, or what came of loading hooks
        number = RemovableHandle.next_id = _Number(number)
    return number


def hooks_since(first: int) -> list[int]:
    """Returns the numbers of hooks that this thread has registered in recomputes, and forgets them.

    Args:
        first: What :func:`next_hook` returned when the recompute began.
    """
    if RemovableHandle.next_id == first:
        return []
    thread = get_ident()
    numbers = [number for number, other in list(_registered.items()) if other == thread and number >= first]
    for number in numbers:
        del _registered[number]
    return numbers


def hooks_on(tensors: Iterable[torch.Tensor], references: Iterable[Callable[[], dict[int, Any] | None]]) -> Hooks:
    """Returns the hooks that are registered now.

    Args:
        tensors: The tensors to look at.
        references: Refer to hooks of tensors that may be gone.
    """
    found = [(hooks, hooks.copy()) for tensor in tensors if (hooks := tensor._backward_hooks)]
    return found + [(hooks, hooks.copy()) for reference in references if (hooks := reference())]


def take_hooks_off(tensors: Iterable[torch.Tensor], numbers: Sequence[int]) -> None:
    """Takes the hooks of some numbers off tensors."""
    for tensor in tensors:
        if hooks := tensor._backward_hooks:
            for number in numbers:
                hooks.pop(number, None)


def put_hooks_back(before: Hooks) -> None:
    """Registers the hooks again that are not there any more, in the order of their numbers."""
    for hooks, others in before:
        if any(number not in hooks for number in others):
            merged = {**others, **hooks}
            hooks.clear()
            hooks.update((number, merged[number]) for number in sorted(merged))
