"""Parameters under autocast, of which autograd saves casts.

Without autocast a parameter whose value backward needs is saved itself, and its version is compared when it comes back. What is
saved under autocast is a cast, which a rerun makes anew from the parameter as it is then: an optimizer's step between forward
and backward would give other gradients without a word, where plain autograd, which has the cast of forward, gives the right
ones. So there the versions of the parameters that a region reaches are noted as well.

A region may reach parameters that it does not read, and those may well change in between: an optimizer that steps in the course
of a backward has changed the layers behind. So a rerun that finds some changed goes on, watched, and fails as soon as an
operator reads one of them. Those that forward itself writes to, as to clamp them, are left out: they change in any case.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from ._dispatch import QuietDispatchMode
from ._module_plan import plan_of

__all__ = ["WatchReads", "Weights"]

_NotedTensors = list[tuple["weakref.ref[torch.Tensor]", int]]


def _now(noted: _NotedTensors, *, changed: bool) -> _NotedTensors:
    """Returns those that have changed, or those that have not; what is gone is neither."""
    return [
        (reference, version)
        for reference, version in noted
        if (parameter := reference()) is not None and (parameter._version != version) is changed
    ]


class Weights:
    """The parameters of modules and among other tensors, and their versions when a forward began."""

    __slots__ = ("_noted",)

    def __init__(self, modules: Iterable[Module], tensors: Iterable[torch.Tensor] = ()) -> None:
        found = dict.fromkeys(parameter for module in modules for parameter in plan_of(module).parameters())
        found.update(dict.fromkeys(tensors))
        self._noted: _NotedTensors = [
            (weakref.ref(parameter), parameter._version)
            for parameter in found
            if type(parameter) is torch.nn.Parameter and not parameter.is_inference()
        ]

    def settle(self) -> None:
        """Leaves out those that were written to, now that forward has ended."""
        self._noted = _now(self._noted, changed=False)

    def changed(self) -> _NotedTensors:
        """Returns those that were written to since, and the versions that they should have."""
        return _now(self._noted, changed=True)


class WatchReads(QuietDispatchMode):  # type: ignore[no-untyped-call]
    """Fails as soon as an operator reads a tensor that has changed.

    Attributes:
        found: The error, which the function may have swallowed.
    """

    def __init__(self, changed: _NotedTensors, error: Callable[[torch.Tensor, int], Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expected = {id(reference()): version for reference, version in changed}
        self._error = error
        self.found: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._expected:
                self.found = self._error(value, self._expected[id(value)])
                raise self.found
        return func(*args, **(kwargs or {}))
