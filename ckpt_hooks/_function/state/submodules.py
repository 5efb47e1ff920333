"""Submodules: a rerun finds the ones of forward, by name and in order; afterwards the module has those from before the rerun.

A module may have another submodule by the time of backward (``model.head = other``), one less (``del layers[2]``), or the same
in another order. :mod:`.attributes` takes out submodules which forward added, since the function may add these once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch.nn import Module

from .container_contents import same

#: A module, the dictionary of its submodules before a rerun, and a copy.
Before = list[tuple[Module, dict[str, Any], dict[str, Any]]]

_modules: Callable[[Module], dict[str, Module | None]] = attrgetter("_modules")
_values: Callable[[dict[str, Module | None]], Iterable[Module | None]] = dict.values


def _children_of(modules: Sequence[Module]) -> list[Module | None]:
    return list(chain.from_iterable(map(_values, map(_modules, modules))))


class Submodules:
    """The submodules of some modules, as one forward found them. A frame holds these: forward's may be bound nowhere else."""

    __slots__ = ("_children", "_modules", "_names")

    def __init__(self, modules: Sequence[Module], children: Sequence[Module | None], names: Sequence[Sequence[str]]) -> None:
        self._modules, self._children, self._names = modules, children, names

    def are_bound(self) -> bool:
        """Whether the modules have these submodules."""
        now = _children_of(self._modules)
        return len(now) == len(self._children) and all(map(is_, now, self._children))

    def bind(self) -> Before:
        """Binds these submodules where others are bound; returns what :meth:`unbind` restores."""
        before: Before = []
        if not self.are_bound():
            children = iter(self._children)
            for module, names in zip(self._modules, self._names, strict=True):
                noted, own = dict(zip(names, children)), module._modules  # noqa: B905 (the next module takes on from there)
                if not same(own, noted):
                    before.append((module, own, own.copy()))
                    _refill(own, noted)
        return before

    def unbind(self, before: Before) -> None:
        """Binds the submodules from before the rerun, also where the function was stopped amid changes of its own."""
        if before:
            for module, own, content in before:
                module.__dict__["_modules"] = own  # which ``del layers[-1]`` in the function replaces
                _refill(own, content)
        else:
            self.bind()


def _refill(own: dict[str, Any], content: dict[str, Any]) -> None:
    own.clear()
    own.update(content)


class Parents:
    """The modules, of some, which have submodules, for forwards to take from. Refers to all weakly: it lives in a table."""

    __slots__ = ("_children", "_ids", "_modules", "_names")

    def __init__(self, modules: Sequence[Module]) -> None:
        # Containers that are empty yet are among them: ``insert`` calls none of torch's hooks of registration.
        parents = [module for module in modules if module._modules or type(module).__module__ == "torch.nn.modules.container"]
        children = _children_of(parents)
        self._modules = [weakref.ref(module) for module in parents]
        self._names = [tuple(module._modules) for module in parents]
        self._ids = ids = list(map(id, children))
        # Another module may come to the place of a dead one in memory. A proxy registered as a submodule is held instead.
        self._children = [
            child if type(child) in weakref.ProxyTypes else weakref.ref(child, lambda _: ids.clear())
            for child in children
            if child is not None
        ]

    def are_those_of(self, modules: Sequence[Module]) -> bool:
        """Whether these are all submodules that some modules have."""
        return list(map(id, _children_of(modules))) == self._ids

    def submodules(self) -> Submodules | None:
        """Returns the present submodules; None if they are others than these."""
        try:
            modules: list[Any] = [reference() for reference in self._modules]
            children = _children_of(modules)
        except AttributeError:  # of a module that is gone
            return None
        return Submodules(modules, children, self._names) if list(map(id, children)) == self._ids else None
