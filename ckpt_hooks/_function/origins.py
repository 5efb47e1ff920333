"""Arguments with a history, of which a region holds aliases without history.

The output of an operator holds its history. If the caller later writes to such an argument with a result of the region (``h +=
checkpoint(block, h)``), that history leads to the region, which would own itself: its memory would never be freed. So a region
holds an alias from the end of forward on. A rerun gets the tensor itself while it lives, and then a stand-in: the alias as the
output of an operator, neither a leaf nor a view.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._tensors.copies import alias_with_history
from ckpt_hooks._torch.autograd import has_tangent
from ckpt_hooks._torch.tensors import counted_detach, storage_of

__all__ = ["Origins", "has_history"]


def has_history(tensor: torch.Tensor) -> bool:
    """Whether a tensor that requires grad is the output of an operator, and has stand-ins."""
    # ``is_leaf`` of a view of a modified tensor may give the view a new place in the graph. Such a view is held as it is, and
    # so is a tensor with a tangent, which an alias would lack.
    if type(tensor) is not torch.Tensor or tensor.is_nested or (tensor._is_view() and tensor._version):
        return False
    return not (tensor.is_leaf or has_tangent(tensor))


class Origins:
    """The tensors held by aliases, by their positions among the arguments.

    Attributes:
        hooked: The hooks registered on these tensors, which the graph may hold longer than the tensors live.
    """

    __slots__ = ("_tensors", "hooked")

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        self.hooked: list[Callable[[], dict[int, Any] | None]] = []

    def let_go(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an alias to hold instead of a tensor; the same alias for all positions of the tensor."""
        for reference, number, alias in self._tensors.values():
            if number == id(tensor):
                self._tensors[position] = reference, number, alias
                return alias
        alias = counted_detach(tensor)
        self._tensors[position] = weakref.ref(tensor), id(tensor), alias
        if tensor._backward_hooks:
            self.hooked.append(weakref.ref(tensor._backward_hooks))
        return alias

    def present(self) -> list[torch.Tensor]:
        """Returns the living tensors."""
        return [tensor for reference, *_ in self._tensors.values() if (tensor := reference()) is not None]

    def put_into(self, held: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], dict[int, torch.Tensor]]:
        """Puts originals or stand-ins in place of aliases; returns also the stand-ins by the ``id`` of the original."""
        tensors = list(held)
        stand_ins: dict[int, torch.Tensor] = {}
        for position, (reference, number, alias) in self._tensors.items():
            tensor = reference()
            if tensor is None or storage_of(tensor) != storage_of(alias):  # given another storage
                tensor = stand_ins.get(number)
                if tensor is None:
                    tensor = stand_ins[number] = alias_with_history(alias, alias._version)
            tensors[position] = tensor
        return tensors, stand_ins
