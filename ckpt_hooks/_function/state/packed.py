"""Contents of a module's small buffers, copied, compared and put back all at once.

The state of a batch norm is three small tensors. An operator on each costs more than the bytes do. So the small CPU tensors of
a module are seen as rows of bytes: one operator copies all rows, one compares them, and one puts them back.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from ckpt_hooks._tensors.copies import is_plain
from ckpt_hooks._torch import past_all_modes, set_versions, storage_of

from .noted_values import TensorNote
from .shared_copies import has_storage, is_compared

__all__ = ["Pack", "PackedCopy", "pack_up"]

#: The largest size of a pack before another tensor is added.
_MOST_BYTES = 1 << 20

_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def _is_small(noted: TensorNote) -> bool:
    tensor, alias = noted.reference(), noted.alias
    return (
        tensor is not None
        and type(alias) is torch.Tensor
        and is_plain(tensor)
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        and tensor.nbytes > 0
        and is_compared(tensor)
        and tensor.is_contiguous()
        and has_storage(tensor)
        and (alias.shape, alias.data_ptr()) == (tensor.shape, tensor.data_ptr())  # not so after a resize in place
    )


R = TypeVar("R")
_PLAIN = torch.empty(0)


def _apart(function: Callable[..., R]) -> Callable[..., R]:
    """Makes a function run past all dispatch modes: modes must not see its copies, which hold values under a fake mode too."""

    @functools.wraps(function)
    def run(*args: Any) -> R:
        result: R = past_all_modes(_PLAIN, function, *args)
        return result

    return run


class Pack:
    """Small tensors, as rows of bytes.

    The rows are aliases: they share memory and version counters with the tensors, and stay without history if a tensor gets
    some.
    """

    __slots__ = ("_latest", "_layouts", "_rows", "_sizes", "notes", "storages")

    @_apart
    def __init__(self, notes: Sequence[TensorNote]) -> None:
        """Takes the notes of small tensors."""
        self.notes = notes
        self._rows = [noted.alias.reshape(-1).view(torch.uint8) for noted in notes if noted.alias is not None]
        self._sizes = [row.numel() for row in self._rows]
        self._layouts = [(noted.alias.data_ptr(), noted.alias.shape) for noted in notes if noted.alias is not None]
        #: The storages of the tensors, held by the rows.
        self.storages = frozenset(map(storage_of, self._rows))
        self._latest: Callable[[], torch.Tensor | None] = _nothing

    def is_intact(self) -> bool:
        """Whether each living tensor still has the same memory and shape."""
        for noted, layout in zip(self.notes, self._layouts, strict=True):
            tensor = noted.reference()
            if tensor is None:
                tensor = noted.alias
            if tensor is not None and (tensor.data_ptr(), tensor.shape) != layout:
                return False
        return True

    def versions(self) -> list[int]:
        """Returns the version of each tensor."""
        return list(map(_version, self._rows))

    @_apart
    def read(self) -> torch.Tensor:
        """Returns a copy of all bytes."""
        return torch.cat(self._rows)

    @_apart
    def copy(self) -> torch.Tensor:
        """Returns a copy of all bytes: the latest copy, if alive and equal."""
        copy, latest = torch.cat(self._rows), self._latest()
        if latest is not None and torch.equal(latest, copy):
            return latest
        self._latest = weakref.ref(copy)
        return copy

    @_apart
    def write(self, content: torch.Tensor, versions: Sequence[int]) -> None:
        """Writes contents and versions of the tensors.

        Args:
            content: The bytes.
            versions: The versions.
        """
        torch.split_with_sizes_copy(content, self._sizes, out=self._rows)
        set_versions(tuple(self._rows), tuple(versions))

    @_apart
    def pieces(self, content: torch.Tensor) -> list[tuple[TensorNote, torch.Tensor]]:
        """Returns each tensor's note with the tensor's part of a copy."""
        return [
            (noted, piece.clone().view(alias.dtype).reshape(alias.shape))
            for noted, piece in zip(self.notes, torch.split_with_sizes(content, self._sizes), strict=True)
            if (alias := noted.alias) is not None
        ]

    @_apart
    def differences(self, content: torch.Tensor) -> list[bool]:
        """Returns for each tensor whether its bytes differ from a copy."""
        pieces = torch.split_with_sizes(content, self._sizes)
        return [not torch.equal(row, piece) for row, piece in zip(self._rows, pieces, strict=True)]


def _nothing() -> None:
    return None


class PackedCopy:
    """The content of a pack when forward began.

    Attributes:
        after: Versions at the end of forward.
        before: Versions at the beginning of forward.
        copy: The content.
        pack: The tensors.
    """

    __slots__ = ("after", "before", "copy", "pack")

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self.copy = pack.copy()
        self.before = self.after = pack.versions()

    def settle(self) -> None:
        """Notes the versions at the end of forward."""
        self.after = self.pack.versions()

    def written(self) -> list[torch.Tensor]:
        """Returns the tensors written by forward."""
        notes, count = self.pack.notes, len(self.before)
        differ = self.pack.differences(self.copy) if self.pack.is_intact() else [True] * count
        rows = zip(notes, self.before, self.after, differ, strict=True)
        written = [noted.reference() for noted, before, after, differs in rows if differs or before != after]
        return [tensor for tensor in written if tensor is not None]

    def is_stale(self, versions: Sequence[int], content: torch.Tensor) -> bool:
        """Whether the present versions or contents differ from before forward."""
        return versions != self.before or not past_all_modes(content, torch.equal, content, self.copy)


def pack_up(notes: Iterable[TensorNote]) -> tuple[Pack | None, list[TensorNote]]:
    """Returns a pack of the small tensors, None if there are none, and the notes of others."""
    packed: list[TensorNote] = []
    loose: list[TensorNote] = []
    total = 0
    for noted in notes:
        if noted.reference() is None:
            continue
        if _is_small(noted) and total < _MOST_BYTES:
            packed.append(noted)
            total += noted.alias.nbytes if noted.alias is not None else 0
        else:
            loose.append(noted)
    return (Pack(packed) if packed else None), loose
