"""The contents of tensors to which forwards write: copied when forward begins, put back for a rerun, restored after it.

A small tensor without gradients (:data:`SMALL`) is copied in each forward. A large tensor or a parameter is copied in the first
forward that meets it, and in later forwards if the first wrote to it. After a change of a flag or a hook the next forward is a
first forward. For a tensor without a copy the version is noted: a write is an error, and later forwards copy the tensor.
Kernels of batch norm and writes to ``.data`` do not change the version, so the first forward also compares contents.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ckpt_hooks._tensors.copies import copy_of, fill_all, has_storage, is_dense, is_on_host, is_plain, same_bits, same_layout
from ckpt_hooks._torch.functions import is_jit_tracing
from ckpt_hooks._torch.tensors import counted_detach, past_all_modes, set_versions, storage_of, version_of

from .notes import SMALL, TensorNote, Use

#: Bytes up to which tensors that no module owns are copied. A larger tensor is more often a batch of data than state.
_MOST_OUTSIDE = 1 << 20
#: Bytes of parameters that a region's first forward copies at most: to copy a large model's weights would double their memory.
_MOST_PARAMETERS = 1 << 24

WRITES = (Use.WRITTEN, Use.UNSEEN)

#: Makes the error for a changed tensor, from the tensor and its earlier version.
Complain = Callable[[torch.Tensor, int], BaseException]
#: A row for :func:`fill_all`: a tensor, its version and its content; None, as the layout stays.
_Before = tuple[torch.Tensor, int, torch.Tensor, None]

_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_version: Callable[[Any], int] = operator.attrgetter("_version")


def is_copied(tensor: torch.Tensor) -> bool:
    return is_dense(tensor) and not (tensor.is_meta or tensor.is_inference()) and has_storage(tensor)


def is_small_on_host(note: TensorNote) -> bool:
    tensor = note.alias
    if tensor is None or type(tensor) is not torch.Tensor or note.requires_grad or not (tensor.is_cpu and is_plain(tensor)):
        return False
    is_as_is = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return is_as_is and version_of(tensor) >= 0 and 0 < tensor.nbytes <= SMALL and has_storage(tensor)


class Group:
    """Small tensors of a module tree, in host memory, read and written as a single string of bytes."""

    # A batch norm has three small tensors, and an operator on each costs more than copying the bytes.

    def __init__(self, notes: Sequence[TensorNote]) -> None:
        self.notes = notes
        self.tensors = [note.alias for note in notes if note.alias is not None]
        self._addresses = list(map(_address, self.tensors))
        self._memory = [(ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) for tensor in self.tensors]
        self.storages = frozenset(map(storage_of, self.tensors))
        self.content = b""  # the content before the latest forward: regions with the same content share the string

    def read(self) -> bytes | None:
        """Returns the content; None if a tensor has lost its memory or has other memory, as after ``resize_``."""
        return b"".join(self._memory) if list(map(_address, self.tensors)) == self._addresses else None

    def versions(self) -> list[int]:
        return list(map(_version, self.tensors))

    def write(self, content: bytes, versions: Sequence[int]) -> None:
        if self.read() is None:
            fill_all(zip(self.tensors, versions, self.pieces(content), self.tensors, strict=True))
            return
        start = 0
        for memory in self._memory:
            memory.raw = content[start : (start := start + len(memory))]
        set_versions(tuple(self.tensors), tuple(versions))

    def pieces(self, content: bytes) -> list[torch.Tensor]:
        pieces, start = [], 0
        for tensor, memory in zip(self.tensors, self._memory, strict=True):
            part = bytearray(content[start : (start := start + len(memory))])
            flat = past_all_modes(tensor, functools.partial(torch.frombuffer, part, dtype=tensor.dtype))
            pieces.append(past_all_modes(tensor, flat.view, tensor.shape))
        return pieces


class _Small:
    def __init__(self, group: Group, content: bytes) -> None:
        self.group = group
        self.content = group.content = group.content if content == group.content else content
        self.before = self.after = group.versions()
        self.is_written = True  # assumed until forward has ended

    def settle(self) -> None:
        self.after = self.group.versions()
        self.is_written = self.after != self.before or self.group.read() != self.content

    def difference(self, before: bytes, versions: Sequence[int]) -> tuple[torch.Tensor, int]:
        """Returns the first tensor whose content or version has changed, and its earlier version."""
        rows = list(zip(self.group.tensors, self.group.pieces(before), versions, strict=True))
        return next(((new, was) for new, old, was in rows if new._version != was or not same_bits(new, old)), rows[0][::2])


# ------------------------------------------------------------------------------------------------------------ single tensors


def _has_changed(tensor: torch.Tensor, copy: torch.Tensor, use: Use) -> bool:
    """Whether a tensor of unchanged version may differ from its copy; on a device a guess by ``use``, to avoid a wait."""
    if not (same_layout(tensor, copy) and has_storage(tensor)):
        return True
    return not same_bits(tensor, copy) if is_on_host(tensor) else use not in (Use.READ, Use.WRITTEN)


def _copy_before(note: TensorNote, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor: the latest copy if it is still equal."""
    latest: torch.Tensor | None = note.latest[1]() if note.latest is not None and note.latest[0] == tensor._version else None
    if latest is not None and not _has_changed(tensor, latest, note.use):
        return latest
    copy = copy_of(tensor)
    # On a device a small copy is held and reused in the next step, if the version is the same: a new copy costs a kernel.
    stays = tensor.nbytes <= SMALL and not is_on_host(tensor)
    note.latest = tensor._version, (lambda: copy) if stays and note.owner >= 0 else weakref.ref(copy)
    return copy


class _Copied:
    def __init__(self, note: TensorNote, tensor: torch.Tensor) -> None:
        self.note, self.tensor, self.use = note, tensor, note.use
        self.copy, self.before = _copy_before(note, tensor), tensor._version
        self.after = self.before

    def settle(self, *, failed: bool, may_wait: bool) -> None:
        """Notes the version at the end of forward, and whether forward wrote."""
        tensor, note, before = self.tensor, self.note, self.use
        self.after = tensor._version
        if self.after != self.before and before is not Use.UNSEEN:
            self.use = Use.WRITTEN
        elif before is Use.UNKNOWN and has_storage(tensor):  # without memory: a framework has freed and will refill the tensor
            if is_on_host(tensor) or may_wait:
                is_same = same_layout(tensor, self.copy) and same_bits(tensor, self.copy)
                self.use = Use.READ if is_same else Use.UNSEEN
            elif tensor.nbytes > SMALL:
                self.use = Use.READ
        if self.use is not before and (self.use in WRITES or not (failed or note.owner < 0)):
            note.use = self.use


class Contents:
    def __init__(self) -> None:
        self._is_settled = self._may_wait = False
        self._small: list[_Small] = []
        self._copied: list[_Copied] = []
        self._uncopied: list[tuple[TensorNote, torch.Tensor, int]] = []  # with the versions before forward
        self._empty: list[torch.Tensor] = []
        self.freed: Sequence[torch.Tensor] = ()  # tensors without memory when the latest rerun began
        self.seen: set[int] = set()  # the ``id`` of each tensor added

    def add_group(self, group: Group) -> None:
        content = group.read()
        if content is None:
            for note, tensor in zip(group.notes, group.tensors, strict=True):
                self.add(note, tensor)
        else:
            self._small.append(_Small(group, content))
            self.seen.update([note.number for note in group.notes])

    def add(self, note: TensorNote, tensor: torch.Tensor | None, *, may_wait: bool = False) -> None:
        """Adds a tensor, or an alias with the same version counter."""
        if tensor is None or note.number in self.seen or note.has_history or tensor.is_meta or version_of(tensor) < 0:
            return
        self.seen.add(note.number)
        self._may_wait = self._may_wait or may_wait
        is_strided = is_dense(tensor)
        if is_strided and not has_storage(tensor):  # the function will fill the tensor
            self._empty.append(tensor)
        elif is_strided and (
            tensor.nbytes <= SMALL or (note.use is not Use.READ and (note.owner >= 0 or tensor.nbytes <= _MOST_OUTSIDE))
        ):
            self._copied.append(_Copied(note, tensor))
        else:
            self._uncopied.append((note, tensor, tensor._version))

    def add_parameters(self, parameters: Iterable[tuple[TensorNote, torch.Tensor]], *, may_wait: bool) -> None:
        """Adds parameters to which forwards write, and, smallest first up to the limit, parameters of unknown use."""
        left = 0 if is_jit_tracing() else _MOST_PARAMETERS  # none while TorchScript traces, since sizes are tensors
        for note, parameter in sorted(parameters, key=lambda pair: pair[1].nbytes):
            left -= 0 if note.use in WRITES else parameter.nbytes
            if note.use in WRITES or (note.use is Use.UNKNOWN and left >= 0 and is_copied(parameter)):
                self.add(note, counted_detach(parameter), may_wait=may_wait)

    def is_written(self) -> bool:
        return any(copied.use in WRITES for copied in self._copied) or any(small.is_written for small in self._small)

    def settle(self, *, failed: bool) -> tuple[torch.Tensor, int] | None:
        """Ends forward; returns the first tensor that this forward wrote to without a copy, and its version before."""
        for small in self._small:
            small.settle()
        for copied in self._copied:
            copied.settle(failed=failed, may_wait=self._may_wait)
        written = {copied.note.owner for copied in self._copied if copied.use is Use.UNSEEN}
        for copied in [*self._copied]:
            note, is_large = copied.note, copied.tensor.nbytes > SMALL
            if copied.use is not Use.READ or not (is_large or note.requires_grad):
                continue
            if note.owner in written and note.owner >= 0 and not note.requires_grad:
                copied.use = note.use = Use.UNSEEN
                continue
            self._copied.remove(copied)
            if not issubclass(note.kind, torch.nn.Parameter):  # the journal notes parameters' versions, without their memory
                self._uncopied.append((note, copied.tensor, copied.before))
        self._is_settled = True
        late = () if failed else self.changed()
        return next((change for change in late if self.note_written(change[0])), None)

    def copied(self) -> set[int]:
        return {copied.note.number for copied in self._copied}.union(
            *([note.number for note in small.group.notes] for small in self._small)
        )

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """Returns tensors without a copy that were written to since forward began, with their versions then."""
        freed = [(tensor, tensor._version) for tensor in self.freed if not has_storage(tensor)]
        return freed + [(tensor, version) for _, tensor, version in self._uncopied if tensor._version != version]

    def note_written(self, tensor: torch.Tensor) -> bool:
        for note, uncopied, _ in self._uncopied:
            if uncopied is tensor and is_dense(tensor) and note.owner >= 0:
                note.use = Use.WRITTEN
                return True
        return False

    def storages(self, *, uncopied: bool = False) -> frozenset[int | None]:
        tensors = [copied.tensor for copied in self._copied]
        if uncopied:
            tensors += [*(tensor for _, tensor, _ in self._uncopied), *self._empty]
        return frozenset(map(storage_of, tensors)).union(*(small.group.storages for small in self._small))

    def rewind(self, undo: Undo) -> None:
        """Puts back the contents from before forward; ``undo`` gets the data for its ``restore``, even in case of an error."""
        # A tensor gets the version from before forward, plus the number of writes since forward ended. If other code wrote to
        # the tensor after forward, and the rerun saves the tensor, it counts as modified, as in plain autograd.
        stale: list[_Before] = []
        for copied in self._copied:
            tensor = copied.tensor
            if tensor._version != copied.before or _has_changed(tensor, copied.copy, copied.use):
                after = copied.after if self._is_settled else tensor._version  # not settled: a backward inside forward
                stale.append((tensor, copied.before + tensor._version - after, copied.copy, None))
            else:
                undo.others.append((tensor, tensor._version, copied.copy, None))
        for _, tensor, version in self._uncopied:
            if is_dense(tensor) and not has_storage(tensor):
                undo.freed.append(tensor)
            # If forward has ended, the rerun watches reads of plain tensors instead (``WatchReads``).
            elif tensor._version != version and not (self._is_settled and is_copied(tensor)):
                raise undo.complain(tensor, version)
            else:
                undo.uncopied.append((tensor, tensor._version))
        undo.freed += [tensor for tensor in self._empty if not has_storage(tensor)]
        undo.exchange(tensor for tensor, *_ in stale)
        # All groups are read before any is written: if two trees share a module, their groups share the module's tensors.
        writes = []
        for small in self._small:
            current, versions = small.group.read(), small.group.versions()
            is_stale = current != small.content or versions != small.before
            if current is None:  # a tensor was freed or resized
                undo.exchange(small.group.tensors)
            else:
                undo.small.append((small, current, versions, is_stale))
            if is_stale:
                ends = small.after if self._is_settled else versions
                writes.append((small, [was + last - end for was, last, end in zip(small.before, versions, ends, strict=True)]))
        for small, versions in writes:
            small.group.write(small.content, versions)
        if stale:
            fill_all(stale)
        self.freed = undo.freed


class Undo:
    """The contents of tensors before a rerun, to restore if the rerun exchanges them or writes to them."""

    def __init__(self, complain: Complain) -> None:
        self.complain = complain
        self._exchanged: list[_Before] = []  # tensors with another content in the rerun
        self.freed: list[torch.Tensor] = []  # tensors without memory: the rerun or the function fills them
        self.others: list[_Before] = []  # tensors with the same content in the rerun
        self.small: list[tuple[_Small, bytes, list[int], bool]] = []
        self.uncopied: list[tuple[torch.Tensor, int]] = []

    def exchange(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes tensors that are about to get another content, or have no memory at present."""
        for tensor in tensors:
            if has_storage(tensor):
                self._exchanged.append((tensor, tensor._version, copy_of(tensor), None))
            else:
                self.freed.append(tensor)

    def storages(self) -> frozenset[int | None]:
        storages = [small.group.storages for small, _, _, is_exchanged in self.small if is_exchanged]
        return frozenset(storage_of(tensor) for tensor, *_ in self._exchanged).union(*storages)

    def restore(self) -> None:
        """Restores contents; raises if the rerun wrote to a tensor to which no forward has written."""
        written: list[tuple[torch.Tensor, int]] = []
        for small, content, versions, is_exchanged in self.small:
            if small.group.read() != content or small.group.versions() != versions:
                if not (is_exchanged or small.is_written):
                    written.append(small.difference(content, versions))
                small.group.write(content, versions)
        moved = [row for row in self.others if row[0]._version != row[1] or _has_changed(row[0], row[2], Use.READ)]
        if moved or self._exchanged:
            fill_all((*self._exchanged, *moved))
        for tensor in self.freed:
            tensor.untyped_storage().resize_(0)
        written += [(tensor, version) for tensor, version in self.uncopied if tensor._version != version]
        if written:
            raise self.complain(*written[0])
