"""Contents of a module's small tensors on the host, copied, compared and put back as one string of bytes.

The state of a batch norm is three small tensors, and an operator on each costs more than the bytes do. So their memory is read
and written as it is: one join reads all of them, and one comparison of strings tells whether any has changed.

Memory is read past torch, so it has to be there: before each access the tensors are asked for their addresses. ``set_``,
``resize_``, an assignment to ``data`` and the freeing of a storage change the address. The first two may change a shape
instead, and move the version.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ckpt_hooks._tensors.copies import fill_all, has_storage, is_plain, same_bits
from ckpt_hooks._torch.autograd import hold_versions
from ckpt_hooks._torch.tensors import past_all_modes, set_versions, storage_of

from .tensor_note import TensorNote

R = TypeVar("R")

_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_nbytes: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.nbytes
_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def is_small_on_host(note: TensorNote, limit: int) -> bool:
    """Whether a noted tensor is at most ``limit`` bytes of contiguous memory of the host."""
    tensor, alias = note.reference(), note.alias
    return (
        tensor is not None
        and type(alias) is torch.Tensor
        and is_plain(tensor)
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        and 0 < tensor.nbytes <= limit
        and tensor.is_contiguous()
        and has_storage(tensor)
        and (alias.shape, alias.data_ptr()) == (tensor.shape, tensor.data_ptr())  # not so after a resize in place
    )


class SmallBuffers:
    """Small tensors of one module and its submodules.

    Attributes:
        content: The latest content met by a forward.
        moves: Whether forwards write to any of the tensors; None if unknown.
        notes: The notes of the tensors.
        storages: The storages of the tensors, held by aliases.
        versions: The version of each tensor when the latest forward ended.
    """

    __slots__ = (
        "_addresses",
        "_is_intact",
        "_layouts",
        "_memory",
        "_owner",
        "_references",
        "_sizes",
        "_storages",
        "_strided",
        "_total",
        "content",
        "moves",
        "notes",
        "storages",
        "versions",
    )

    def __init__(self, notes: Sequence[TensorNote]) -> None:
        self.notes = notes
        self._references = [note.reference for note in notes]
        tensors = self.tensors()
        self._addresses, self._layouts = list(map(_address, tensors)), list(map(_layout, tensors))
        #: An assignment to ``data`` may turn a matrix and leave its address and version.
        self._strided = [
            (note.reference, tensor.stride()) for note, tensor in zip(notes, tensors, strict=True) if tensor.dim() > 1
        ]
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._sizes = list(map(_nbytes, self._storages))
        sizes = zip(tensors, self._addresses, strict=True)
        self._memory = [(ctypes.c_char * tensor.nbytes).from_address(address) for tensor, address in sizes]
        self.storages = frozenset(map(storage_of, tensors))
        self.forget()
        self.content = b""
        self.versions = self.read_versions()
        self._total, self._is_intact = 0, True

    def forget(self) -> None:
        """Has the next forward find out whether forwards write."""
        self.moves: bool | None = None
        #: While forwards only read: the output of a node of autograd which has saved the aliases. The node tells of writes in a
        #: third of the time of as many versions.
        self._owner: torch.Tensor | None = None

    def hold(self) -> None:
        """Notes that forwards only read."""
        self.moves = False
        self._owner = hold_versions([note.alias for note in self.notes if note.alias is not None])

    def is_unwritten(self) -> bool:
        """Whether forwards only read the tensors, and nobody has written to one since the latest forward ended."""
        try:
            return self._owner is not None and self._owner.grad_fn.saved_tensors is not None  # type: ignore[union-attr]
        except RuntimeError:
            return False

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors, the alias of each that is gone."""
        pairs = zip(self._references, self.notes, strict=True)
        return [note.alias if (tensor := reference()) is None else tensor for reference, note in pairs]  # type: ignore[misc]

    def read(self) -> bytes | None:
        """Returns the content; None if a tensor has other memory, or another layout since the latest forward."""
        is_there = self._is_intact and self._each(_address) == self._addresses
        for reference, strides in self._strided:
            tensor = reference()
            is_there = is_there and (tensor is None or tensor.stride() == strides)
        return b"".join(self._memory) if is_there else None

    def read_versions(self) -> list[int]:
        """Returns the version of each tensor."""
        return self._each(_version)

    def has_layouts(self) -> bool:
        """Whether the tensors have the shapes, strides and dtypes that they had."""
        return self._each(_layout) == self._layouts

    def _each(self, get: Callable[[torch.Tensor], R]) -> list[R]:
        try:
            return list(map(get, [reference() for reference in self._references]))  # type: ignore[arg-type]
        except (AttributeError, TypeError):  # a tensor is gone
            return list(map(get, self.tensors()))

    def write(self, content: bytes, versions: Sequence[int]) -> None:
        """Writes contents and versions of the tensors, and gives back memory that was exchanged meanwhile."""
        tensors = self.tensors()
        is_there = list(map(_nbytes, self._storages)) == self._sizes and self._each(_address) == self._addresses
        if not is_there or not self.has_layouts():
            aliases = [note.alias for note in self.notes]
            fill_all(zip(tensors, versions, self.pieces(content), aliases, strict=True))
            return
        start = 0
        for memory in self._memory:
            end = start + len(memory)
            memory.raw = content[start:end]
            start = end
        set_versions(tuple(tensors), tuple(versions))

    def pieces(self, content: bytes) -> list[torch.Tensor]:
        """Returns each tensor's part of a content."""
        found, start = [], 0
        for tensor, memory, (shape, _, dtype) in zip(self.tensors(), self._memory, self._layouts, strict=True):
            part = bytearray(content[start : start + len(memory)])
            start += len(memory)
            found.append(past_all_modes(tensor, _tensor_of, part, dtype, shape))
        return found

    def first_difference(self, one: bytes, other: bytes | None) -> torch.Tensor:
        """Returns the first tensor whose part differs between two contents."""
        parts = zip(self.tensors(), self.pieces(one), self.pieces(other or bytes(len(one))), strict=True)
        return next(tensor for tensor, old, new in parts if other is None or not same_bits(old, new))

    def begin(self) -> SmallCopy | None:
        """Begins a forward; returns None if a tensor has other memory, or another shape."""
        content = self.read()
        if content is None:
            return None
        is_known = content == self.content
        if is_known and self.is_unwritten():
            return SmallCopy(self, self.content, self.versions, found_other=False)
        versions = self.read_versions()
        if versions != self.versions and not self.has_layouts():
            return None
        # A rerun of a region around finds lower versions.
        found_other = self.moves is False or (self.moves is True and sum(versions) > self._total)
        self.content, self.versions = self.content if is_known else content, versions
        return SmallCopy(self, self.content, versions, found_other=found_other)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _tensor_of(part: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(part, dtype=dtype).view(shape)


class SmallCopy:
    """The content of small tensors when forward began.

    Attributes:
        after: Versions at the end of forward.
        before: Versions at the beginning of forward.
        content: The content.
        found_other: Whether other code wrote to a tensor since the latest forward.
        group: The tensors.
    """

    __slots__ = ("after", "before", "content", "found_other", "group")

    def __init__(self, group: SmallBuffers, content: bytes, versions: list[int], *, found_other: bool) -> None:
        self.group, self.content, self.found_other = group, content, found_other
        self.before = self.after = versions

    def settle(self, *, failed: bool) -> None:
        """Notes the versions at the end of forward, and whether forward wrote.

        Args:
            failed: Whether forward ended by an exception, perhaps before its writes.
        """
        group = self.group
        if group.is_unwritten():
            return
        self.after = group.versions = group.read_versions()
        group._total = max(group._total, sum(self.after))
        group._is_intact = self.after == self.before or group.has_layouts()
        if group.moves:
            return
        has_written = self.after != self.before or group.read() != self.content
        group.forget()
        if has_written:
            group.moves = True
        elif not failed:
            group.hold()
