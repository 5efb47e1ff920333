"""Tensors left in objects by forward, and whether a rerun computes anything from these leftovers.

A rerun may sum up a list to which forward has added, or go on from a state replaced by forward. Then it computes other values
of the same shapes. To notice this, a rerun follows tensors: the tensors put into the objects since forward began, the results
of operators on these, and whether such results are saved. By itself this proves nothing: a table made by forward and found by
the rerun is right. But a rerun that reads a place and then changes the same place again is another step, not the same.

So if a saved value comes from a leftover, the rerun goes on to the end of the function, and a change of the place by then is an
error. Objects only written to, such as a list of losses, have no part in saved values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ckpt_hooks._core.modes import PausableDispatchMode, count_writes
from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._operators.kinds import Kind
from ckpt_hooks._tensors.walk import instances_in

from .objects import Change, changes_between
from .reached_objects import ObjectNotes

__all__ = ["Leftovers", "leftovers_of"]

R = TypeVar("R")

_Ids = frozenset[int]
_NO_IDS: _Ids = frozenset()


class Leftovers(PausableDispatchMode):
    """Follows the tensors left in objects by forward through one rerun.

    Attributes:
        first: The number of the first saved value in the rerun that comes from a leftover; None until then.
    """

    def __init__(self, notes: ObjectNotes, before: list[Any], left: list[torch.Tensor]) -> None:
        """Prepares to follow.

        Args:
            notes: The notes of the objects.
            before: The content of the objects when the rerun begins.
            left: The tensors put there since forward began.
        """
        super().__init__()
        self.first: int | None = None
        self._notes, self._before = notes, before
        self._reached: set[int] = set()
        self._sources: dict[int, tuple[weakref.ref[torch.Tensor], _Ids]] = {}
        for tensor in left:
            self._mark(tensor, frozenset((id(tensor),)))

    def _mark(self, tensor: torch.Tensor, sources: _Ids) -> None:
        key, table = id(tensor), self._sources
        table[key] = weakref.ref(tensor, lambda _: table.pop(key, None)), sources

    def _sources_of(self, tensor: torch.Tensor) -> _Ids:
        found = self._sources.get(id(tensor))
        return _NO_IDS if found is None or found[0]() is not tensor else found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        count_writes(func, args)
        if not self.paused and facts_of(func).kind is not Kind.FACTORY:
            sources = _NO_IDS.union(*map(self._sources_of, instances_in((args, kwargs), torch.Tensor)))
            if sources:
                for one in instances_in(output, torch.Tensor):
                    self._mark(one, sources)
        return output

    def noting(self, hook: Callable[[torch.Tensor], R], values: list[torch.Tensor], last: int) -> Callable[[torch.Tensor], R]:
        """Returns a pack hook which notes the sources of saved values, up to the last value wanted."""
        sources_of, reached = self._sources_of, self._reached

        def note(tensor: torch.Tensor) -> R:
            index = len(values)
            if index <= last and (sources := sources_of(tensor)):
                reached.update(sources)
                if self.first is None:
                    self.first = index
            return hook(tensor)

        return note

    def let_go(self) -> None:
        """Drops all references: autograd keeps the hook as long as the graph of the rerun, which the objects may hold."""
        self._sources.clear()
        del self._notes, self._before

    def changed_again(self) -> Change | None:
        """Returns the first source of saved values changed by the rerun."""
        if self.first is None:
            return None
        found = changes_between(self._notes.roots, self._before, self._notes.now()[0])
        return next((change for change in found if not self._reached.isdisjoint(change.tensors_before())), None)


def leftovers_of(notes: ObjectNotes) -> Leftovers | None:
    """Returns a mode following the tensors put into objects since forward began; None if there are none."""
    now, left = notes.since()
    return Leftovers(notes, now, left) if left else None
