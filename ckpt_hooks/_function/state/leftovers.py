"""Tensors that forward left in objects, and whether a rerun computes anything from them.

A rerun that sums up a list which forward has added to, or that goes on from a state which forward has replaced, computes other
values of the same shapes. That is noticed by following tensors: those that were put into the objects since forward began, what
operators of the rerun make of them, and whether that is saved. By itself this proves nothing: a table that forward made and
that the rerun finds is the right one. But a rerun that changes the very place again that it has read is another step, not the
same.

So where a saved value comes from such a tensor, the rerun goes on to the end of the function, and it is an error if the place
has changed by then. Objects that are only written to, such as a list of losses, are read by nothing that is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.modes import PausableDispatchMode, count_writes
from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._operators.kinds import Kind
from ckpt_hooks._tensors.walk import instances_in

from .objects import Change, changes_between
from .reached_objects import ObjectNotes

__all__ = ["Leftovers", "leftovers_of"]

_Ids = frozenset[int]
_NO_IDS: _Ids = frozenset()


class Leftovers(PausableDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the tensors that forward left in objects through one rerun.

    Attributes:
        first: The number of the first value saved in the rerun that comes from one of them; None as long as there is none.
    """

    def __init__(self, notes: ObjectNotes, before: list[Any], left: list[torch.Tensor]) -> None:
        """Prepares to follow.

        Args:
            notes: Of the objects.
            before: What is in them when the rerun begins.
            left: The tensors that have been put there since forward began.
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

    def noting(
        self, hook: Callable[[torch.Tensor], torch.Tensor], values: list[torch.Tensor], last: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a pack hook that notes what the values saved up to the last one wanted come from."""
        sources_of, reached = self._sources_of, self._reached

        def note(tensor: torch.Tensor) -> torch.Tensor:
            index = len(values)
            if index <= last and (sources := sources_of(tensor)):
                reached.update(sources)
                if self.first is None:
                    self.first = index
            return hook(tensor)

        return note

    def let_go(self) -> None:
        """Ends the following: autograd keeps the hook as long as the graph of the rerun, which the objects may hold."""
        self._sources.clear()
        del self._notes, self._before

    def changed_again(self) -> Change | None:
        """Returns the first place that saved values have come from and that the rerun has changed."""
        if self.first is None:
            return None
        found = changes_between(self._notes.roots, self._before, self._notes.now()[0])
        return next((change for change in found if not self._reached.isdisjoint(change.tensors_before())), None)


def leftovers_of(notes: ObjectNotes) -> Leftovers | None:
    """Returns what follows the tensors that have been put into objects since forward began; None if there are none."""
    now, left = notes.since()
    return Leftovers(notes, now, left) if left else None
