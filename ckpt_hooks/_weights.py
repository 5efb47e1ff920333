"""Parameters under autocast, of which autograd saves casts.

Without autocast a parameter whose value backward needs is saved itself, and its version is compared when it comes back. What is
saved under autocast is a cast, which a rerun makes anew from the parameter as it is then: an optimizer's step between forward
and backward would give other gradients without a word, where plain autograd, which has the cast of forward, gives the right
ones. So there the versions of a module's parameters are noted as well.

Those that forward itself writes to, as to clamp them, are left out: they are at another version in backward in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn import Module

from ._module_plan import plan_of

__all__ = ["Weights"]


class Weights:
    """The parameters of modules, and their versions when a forward began."""

    __slots__ = ("_noted",)

    def __init__(self, modules: Iterable[Module]) -> None:
        found = dict.fromkeys(parameter for module in modules for parameter in plan_of(module).parameters())
        self._noted = [(parameter, parameter._version) for parameter in found if not parameter.is_inference()]

    def settle(self) -> None:
        """Leaves out those that were written to, now that forward has ended."""
        self._noted = [(parameter, version) for parameter, version in self._noted if parameter._version == version]

    def compare(self, error: Callable[[torch.Tensor, int], Exception]) -> None:
        """Raises if a parameter was written to since.

        Args:
            error: Returns the error for a tensor, and the version that it should have.
        """
        for parameter, version in self._noted:
            if parameter._version != version:
                raise error(parameter, version)
