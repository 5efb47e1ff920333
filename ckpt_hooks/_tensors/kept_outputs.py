"""How one tensor is kept for a selective region: as it is, in the hands of saved-tensor hooks, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckpt_hooks._core.hooks import UNPACKS
from ckpt_hooks._core.modes import unseen
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._torch import counted_detach, is_freed, storage_of, version_witness
from ckpt_hooks.errors import MutationError

from .copies import copy_of
from .offloaded import Batch
from .transfers import Transfers

__all__ = ["KeptOutput", "MovedOutput", "PackedOutput", "got", "packed_in", "recomputes"]


class KeptOutput:
    """A tensor that is kept as it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def get(self, *, last: bool) -> torch.Tensor:
        """Returns the tensor, or :data:`MISSING` if it was modified; an object that nobody else has."""
        tensor = self._tensor
        if tensor._version != self._version or is_freed(tensor):
            return MISSING  # type: ignore[no-any-return]
        return tensor if last else counted_detach(tensor)


class PackedOutput:
    """A tensor that was given to somebody's hooks."""

    __slots__ = ("_packed", "_storage", "_strides", "_unpack", "_value", "_version")

    @unseen
    def __init__(self, tensor: torch.Tensor, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self._version = tensor._version
        self._storage = storage_of(tensor)
        self._strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_contiguous() else None
        self._unpack = unpack
        self._value: Any = MISSING
        self._packed = pack(tensor)

    def prepare(self) -> None:
        """Brings the tensor back if a frame has it, whose recompute cannot run from within an operator."""
        if recomputes(self._unpack) and self._packed is not None:
            try:
                self._value = self._unpack(self._packed)
            except MutationError:  # something around the region wrote to it
                self._packed = None

    def forget(self) -> None:
        """Lets go of a tensor that was brought back and not asked for."""
        self._value = MISSING

    @unseen
    def get(self, *, last: bool) -> torch.Tensor:
        """Returns the tensor, or :data:`MISSING` if the hooks have handed on one that was modified."""
        value, self._value = self._value, MISSING
        if value is MISSING:
            if recomputes(self._unpack):
                return MISSING  # type: ignore[no-any-return]
            try:
                value = self._unpack(self._packed)
            except MutationError:  # hooks that look at versions by themselves
                return MISSING  # type: ignore[no-any-return]
            if is_freed(value) or (storage_of(value) == self._storage and value._version > self._version):
                return MISSING  # type: ignore[no-any-return]
        # Its version is 0, as that of any result that a mode sees: below autograd, an alias has a counter of its own.
        tensor: torch.Tensor = value.detach()
        return tensor if self._strides is None or tensor.stride() == self._strides else copy_of(tensor, self._strides)


class MovedOutput:
    """A tensor that is on the host."""

    __slots__ = ("_sent", "_version", "_witness")

    @unseen
    def __init__(self, tensor: torch.Tensor, batch: Batch, transfers: Transfers) -> None:
        self._witness, self._version = version_witness(tensor), tensor._version
        self._sent = batch.send(tensor, transfers)

    @unseen
    def get(self, *, last: bool) -> torch.Tensor:
        """Returns the tensor on its device; :data:`MISSING` if it was modified, maybe while it was copied."""
        if self._witness._version != self._version:
            return MISSING  # type: ignore[no-any-return]
        return self._sent.get()


def recomputes(unpack: Callable[[Any], Any]) -> bool:
    """Whether an unpack hook is that of a region, torch's included, and runs its function again."""
    return unpack in UNPACKS or getattr(unpack, "__module__", None) == "torch.utils.checkpoint"


def got(value: Any, *, last: bool) -> Any:
    if isinstance(value, (KeptOutput, PackedOutput, MovedOutput)):
        return value.get(last=last)
    if isinstance(value, (list, tuple)):
        outputs = [got(one, last=last) for one in value]
        return MISSING if any(one is MISSING for one in outputs) else type(value)(outputs)
    return value


def packed_in(value: Any) -> Iterator[PackedOutput]:
    if isinstance(value, PackedOutput):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from packed_in(one)
