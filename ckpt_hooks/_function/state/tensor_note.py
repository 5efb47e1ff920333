"""Notes of single values: of a tensor a detached alias, which shares memory and version counter; else a weak reference."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from ckpt_hooks._tensors.copies import PLAIN, alias_with_history, as_kind, copy_of, copy_with_history, is_plain
from ckpt_hooks._torch.modes import PastFunctionModes
from ckpt_hooks._torch.tensors import counted_detach, is_freed, is_kept_anyway

from .limits import MOST_COPIED

#: Other tensors of a rerun in place of forward's, by the ``id`` of the latter.
StandIns = dict[int, torch.Tensor]


class GoneError(Exception):
    """A noted value is gone for good; the present value stays."""


class Rerun(Protocol):
    """What a rerun knows of tensors.

    Attributes:
        changed: Gets tensors with a history which were written to since, with their noted versions.
        stand_ins: Arguments of the rerun which differ from the tensors of forward.
    """

    changed: list[tuple[torch.Tensor, int]]
    stand_ins: StandIns


class Weak(weakref.ref[Any]):
    """Notes an object by its identity."""

    __slots__ = ()

    def holds(self, value: Any) -> bool:
        """Whether a value is the object."""
        return value is not None and self() is value

    def present(self, lent: Rerun) -> Any:
        """Returns the object to bind in a rerun.

        Raises:
            GoneError: If it is gone.
        """
        found = self()
        if found is None:
            raise GoneError
        return found


def has_history(tensor: torch.Tensor) -> bool:
    """Whether an operator recorded by autograd made a tensor; views that require grad are not asked."""
    try:
        return tensor.requires_grad and not is_kept_anyway(tensor)
    except RuntimeError:  # a multi-output view of a modified base, which has lost its graph
        return False


def _alias_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a detached alias, or a leaf that requires grad itself; None if an alias is impossible."""
    try:
        if is_kept_anyway(tensor):
            return tensor
        with PastFunctionModes():
            alias = counted_detach(tensor)
            kind = type(tensor)
            return alias if type(alias) is kind or kind in PLAIN else alias.as_subclass(kind)
    except (RuntimeError, NotImplementedError):
        return None


class TensorNote:
    """A noted tensor.

    Attributes:
        alias: A detached alias, or a leaf that requires grad itself; None if an alias is impossible.
        has_history: Whether the tensor has a history. Once the tensor is gone, or written to, a rerun gets a stand-in.
        kind: The tensor's class.
        reference: Refers to the tensor weakly.
        requires_grad: Whether the tensor required grad.
    """

    __slots__ = ("_copy", "_id", "_version", "alias", "has_history", "kind", "reference", "requires_grad")

    alias: torch.Tensor | None

    def __init__(self, tensor: torch.Tensor, *, copied: bool = False) -> None:
        self.kind, self._id = type(tensor), id(tensor)
        self.reference = weakref.ref(tensor)
        self.has_history = has_history(tensor)
        self.requires_grad = self.has_history or tensor.requires_grad
        self._copy: torch.Tensor | None = None
        self._version = -1
        self.alias = _alias_of(tensor)
        if self.has_history and not tensor.is_inference():
            self._version = tensor._version
            if (
                copied
                and self.alias is not None
                and is_plain(self.alias)
                and not tensor.is_meta
                and tensor.nbytes <= MOST_COPIED
            ):
                self._copy = copy_of(self.alias)

    def holds(self, value: Any) -> bool:
        """Whether a value is the tensor, with unchanged ``requires_grad``, and with unchanged version in case of a history."""
        tensor = self.reference()
        return (
            tensor is not None
            and tensor is value
            and tensor.requires_grad is self.requires_grad
            and (not self.has_history or self._version < 0 or tensor._version == self._version)
        )

    def is_of(self, value: Any, stand_ins: StandIns) -> bool:
        """Whether a value is the tensor, or the tensor of a rerun in its place."""
        return value is not None and value is (stand_ins[self._id] if self._id in stand_ins else self.reference())

    def tensor(self) -> torch.Tensor | None:
        """Returns the tensor, or the alias of a dead tensor, to read or write its memory."""
        found: torch.Tensor | None = self.reference()
        return self.alias if found is None else found

    def present(self, lent: Rerun) -> torch.Tensor:
        """Returns the tensor to bind in a rerun.

        Raises:
            GoneError: If neither tensor nor alias is left.
        """
        if self._id in lent.stand_ins:
            return lent.stand_ins[self._id]
        tensor, alias = self.reference(), self.alias
        if tensor is not None and self.holds(tensor):
            return tensor
        if alias is None or is_freed(alias):
            raise GoneError
        if not self.has_history:
            found = as_kind(alias.detach(), self.kind)
            return found.requires_grad_(self.requires_grad)
        if self._version >= 0 and alias._version != self._version:
            if self._copy is not None:
                return copy_with_history(self._copy, self._version)
            lent.changed.append((alias, self._version))
            if tensor is not None:
                return tensor
        return alias_with_history(alias, max(self._version, 0))
