"""State changed by forward besides its outputs: running statistics, power iterations, histories of maxima.

A rerun must find such state as forward found it, or computes something else, and must not change the state again. The changes
of forward are known only afterwards, so before forward each tensor that may change is copied; :mod:`.buffers` has the rule.

For a rerun, written tensors get their content back in place, so that every view and alias sees the content. The end of the
rerun undoes this, versions included. Writes of the rerun are undone as well. (Bindings of names are the business of
:mod:`.attributes`, except for parameters without gradients.)

Copied tensors are not held: any of them may later become part of a graph (``self.aux += loss``) which holds this state. An
attribute which is gone by the time of a rerun has an alias.

Tensors that require grad are left alone. Tensors of classes other than torch's own, sparse tensors and quantised tensors are
known by their versions only.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter

import torch

from ckpt_hooks._tensors.copies import copy_of, data_of, fill_all, has_storage, is_dense, same_layout
from ckpt_hooks._torch.tensors import storage_of

from .buffers import (
    WRITES,
    Buffers,
    Slot,
    Use,
    Uses,
    copy_before,
    has_changed,
    is_copied,
    outside,
    use_after,
)
from .contents_undo import Before, ContentsUndo
from .limits import MOST_FROZEN, SMALL
from .module_plan import ModulePlan
from .notes import Lent
from .small_buffers import SmallCopy
from .tensor_note import GoneError, TensorNote

_NO_PARAMETERS = frozenset[int]()

#: Returns a tensor, an alias where it is gone, or None.
_Refer = Callable[[], "torch.Tensor | None"]


class _Entry:
    """The content of one tensor: versions before and after forward, and a copy, None once no rerun needs the copy."""

    __slots__ = ("_may_wait", "after", "before", "copy", "layout", "module", "tensor", "use", "uses")

    def __init__(
        self, tensor: torch.Tensor, refer: _Refer, copy: torch.Tensor, use: Use, uses: Uses, module: int, *, may_wait: bool
    ) -> None:
        self.tensor, self.use, self.uses, self._may_wait = refer, use, uses, may_wait
        self.module = id(uses), module
        self.copy: torch.Tensor | None = copy
        self.before = self.after = tensor._version
        self.layout = data_of(tensor)  # forward may give it other memory, even that of another buffer

    def settle(self, *, failed: bool) -> None:
        """Notes the version at the end of forward and what forward did."""
        tensor, uses = self.tensor(), self.uses
        if tensor is None or self.copy is None:
            return
        self.after = tensor._version
        before, was_written = self.use, self.after != self.before
        self.use = use_after(tensor, self.copy, before, was_written=was_written, may_wait=self._may_wait)
        if self.use is not before and (self.use in WRITES or not (failed or uses is outside)):
            uses[tensor] = self.use

    def is_read(self) -> bool:
        """Whether the tensor is large and forward only read it."""
        tensor = self.tensor()
        return self.use is Use.READ and tensor is not None and tensor.nbytes > SMALL

    def expect_writes(self) -> None:
        """Has all forwards copy the tensor, since forward wrote to another of its module and no version told."""
        tensor, self.use = self.tensor(), Use.UNSEEN
        if tensor is not None:
            self.uses[tensor] = self.use

    def is_stale(self, tensor: torch.Tensor, copy: torch.Tensor) -> bool:
        """Whether the content differs from the content before forward."""
        return tensor._version != self.before or has_changed(tensor, copy, self.use)


#: A tensor without a copy, its version before forward, and the table which tells that forwards only read it.
_Uncopied = tuple[_Refer, int, Uses]


class _Name:
    """The name of a parameter without gradients: forward may write to the parameter, or bind the name to another."""

    __slots__ = ("_buffers", "_key", "_noted", "_storage", "entry", "slot")

    def __init__(self, buffers: Buffers, key: tuple[int, str], slot: Slot) -> None:
        tensor = slot[0][slot[1]]
        self._buffers, self._key, self.slot, self._noted = buffers, key, slot, TensorNote(tensor)
        self._storage = storage_of(tensor)
        # No table gets it, whose weak reference would forbid ``torch.utils.swap_tensors`` after the step.
        copy = copy_of(tensor) if is_copied(tensor) else None
        self.entry = None if copy is None else _Entry(tensor, self._noted.tensor, copy, Use.UNKNOWN, Uses(), 0, may_wait=True)

    def is_known(self) -> bool:
        """Whether earlier forwards wrote to the parameter or bound its name."""
        return self._key in self._buffers.written_names

    def is_in_place(self) -> bool:
        """Whether the parameter is still at its place in memory; if not, a framework frees and gathers parameters."""
        tensor, copy = self._noted.tensor(), None if self.entry is None else self.entry.copy
        return tensor is not None and copy is not None and storage_of(tensor) == self._storage and same_layout(tensor, copy)

    def settle(self) -> bool:
        """Ends forward; returns whether a rerun has to find the parameter as it was."""
        tensor = self._noted.reference()
        has_changed = tensor is None or self.slot[0].get(self.slot[1]) is not tensor
        if self.entry is not None and (self.is_known() or (not has_changed and self.is_in_place())):
            self.entry.settle(failed=False)
            has_changed = has_changed or self.entry.use in WRITES
        if has_changed:
            self._buffers.written_names.add(self._key)
        return self.is_known()

    def bind(self) -> None:
        """Binds the name to the parameter, or to its stand-in."""
        with contextlib.suppress(GoneError):
            self.slot[0][self.slot[1]] = self._noted.present(Lent({}))

    def identity(self) -> int:
        """Returns the ``id`` of the parameter."""
        return id(self._noted.reference())


def _names_of(plans: Sequence[ModulePlan]) -> list[_Name]:
    """Returns the names of parameters that forward may write to: of unknown ones the smallest, as many as may be copied."""
    found = [one for plan in plans for one in plan.buffers.parameters()]
    names, left = [], MOST_FROZEN
    for size, is_known, name in sorted(found, key=itemgetter(0)):
        left -= 0 if is_known else size
        if is_known or left >= 0:
            names.append(_Name(*name))
    return names


class Contents:
    """Contents of the tensors that a forward may write to, to be put back for a rerun.

    Attributes:
        freed: Tensors without memory when the latest rerun began.
        parameters: The ``id`` of each parameter among the tensors.
        uncopied: Tensors which must stay as they are, or a rerun ends when it reads one.
    """

    __slots__ = ("_copied", "_empty", "_names", "_settled", "_small", "freed", "parameters", "uncopied")

    def __init__(
        self, plans: Sequence[ModulePlan], tensors: Sequence[tuple[torch.Tensor, _Refer]], generators: list[torch.Generator]
    ) -> None:
        self._settled, self.parameters = False, _NO_PARAMETERS
        self._small: list[SmallCopy] = []
        self._copied: list[_Entry] = []
        self.uncopied: list[_Uncopied] = []
        self.freed: Sequence[torch.Tensor] = ()
        self._empty: list[_Refer] = []
        self._names: list[_Name] = []
        seen: set[int] = set()
        for plan in plans:
            small, notes, own = plan.contents(generators)
            if small is not None:
                self._small.append(small)
            uses, may_wait = plan.buffers.uses, plan.buffers.num_forwards == 0
            for note, module in notes:
                self._add(note.reference(), note.tensor, uses, module, seen, may_wait=may_wait)
            for tensor in own:
                self._add(tensor, weakref.ref(tensor), uses, -1, seen, may_wait=may_wait)
        for tensor, refer in tensors:
            self._add(tensor, refer, outside, -1, seen, may_wait=False)
        if not all(plan.buffers.knows_parameters() and not plan.buffers.written_names for plan in plans):
            self._names = _names_of(plans)

    def _add(
        self, tensor: torch.Tensor | None, refer: _Refer, uses: Uses, module: int, seen: set[int], *, may_wait: bool
    ) -> None:
        if tensor is None or id(tensor) in seen:
            return
        seen.add(id(tensor))
        use, copy = uses.get(tensor, Use.UNKNOWN), None
        if use is not Use.READ or tensor.nbytes <= SMALL:
            is_strided = is_dense(tensor)
            if tensor.requires_grad or tensor.is_meta or tensor.is_inference():
                return
            if is_strided and not has_storage(tensor):  # the function fills it
                self._empty.append(refer)
                return
            copy = copy_before(tensor, use, is_owned=uses is not outside) if is_strided else None
        if copy is None:
            self.uncopied.append((refer, tensor._version, uses))
        else:
            self._copied.append(_Entry(tensor, refer, copy, use, uses, module, may_wait=may_wait))

    def is_empty(self) -> bool:
        """Whether there is nothing for forward to change."""
        return not (self._copied or self.uncopied or self._small or self._names or self._empty)

    def settle(self, *, failed: bool) -> None:
        """Ends forward: notes all versions, and drops the copies of large tensors which forward only read.

        Args:
            failed: Whether forward ended by an exception, perhaps before its writes.
        """
        for one in self._small:
            one.settle(failed=failed)
        for entry in self._copied:
            entry.settle(failed=failed)
        read = [entry for entry in self._copied if entry.is_read()]
        if read:
            written = {entry.module for entry in self._copied if entry.use is Use.UNSEEN}
            for entry in read:
                if entry.module in written and entry.uses is not outside:
                    entry.expect_writes()
                else:
                    self._copied.remove(entry)
                    self.uncopied.append((entry.tensor, entry.before, entry.uses))
        if self._names:
            self._names = [name for name in self._names if name.settle()]
            self.parameters = frozenset(name.identity() for name in self._names)
        self._settled = True

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """Returns tensors without a copy which were written to since forward began, with their versions then."""
        pairs = [(refer(), version) for refer, version, _ in self.uncopied]
        freed = [(tensor, tensor._version) for tensor in self.freed if not has_storage(tensor)]
        return freed + [(tensor, version) for tensor, version in pairs if tensor is not None and tensor._version != version]

    def note_written(self, tensor: torch.Tensor) -> bool:
        """Has later forwards copy a tensor without a copy; returns False if they cannot."""
        for refer, _, uses in self.uncopied:
            if refer() is tensor and is_dense(tensor) and uses is not outside:
                uses[tensor] = Use.WRITTEN
                return True
        return False

    def storages(self) -> frozenset[int | None]:
        """Returns the storages of tensors which may be rewound."""
        tensors = (entry.tensor() for entry in self._entries())
        small = (storage for one in self._small for storage in one.group.storages)
        return frozenset((*small, *(storage_of(tensor) for tensor in tensors if tensor is not None)))

    def _entries(self) -> list[_Entry]:
        """Returns the entries with copies; while forward runs, also parameters that may have been written to."""
        if not self._names:
            return self._copied
        names = [name for name in self._names if name.is_known() or (not self._settled and name.is_in_place())]
        return self._copied + [name.entry for name in names if name.entry is not None]

    def rewind(self, undo: ContentsUndo, *, may_write: bool) -> None:
        """Puts back the contents from before forward.

        Args:
            undo: Gets the data for its ``restore``, whatever happens.
            may_write: Whether the rerun may write to tensors that forward only read, since hooks or flags have changed.

        Raises:
            MutationError: If a tensor without a copy has changed, and a read of it would not be noticed.
        """
        for name in self._names:
            owner, key = name.slot
            if key in owner and name.is_known():
                undo.slots.append((name.slot, owner[key]))
                name.bind()
        stale: list[Before] = []
        for entry in self._entries():
            tensor, copy = entry.tensor(), entry.copy
            if tensor is None or copy is None:
                continue
            if entry.is_stale(tensor, copy):
                # Versions count on from where they were before forward as far as they have moved since its end: what a rerun
                # saves of a tensor that somebody else modified is found to be modified, as in plain autograd.
                after = entry.after if self._settled else tensor._version  # the latter for a backward inside of forward
                stale.append((tensor, entry.before + tensor._version - after, copy, entry.layout))
            else:
                undo.others.append((tensor, tensor._version, copy, None))
        for refer, version, _ in self.uncopied:
            tensor = refer()
            if tensor is None:
                continue
            if is_dense(tensor) and not has_storage(tensor):
                undo.freed.append(tensor)
                continue
            # Reads of plain tensors are watched in the rerun of an ended forward (:meth:`changed`).
            if tensor._version != version and not (self._settled and is_copied(tensor)):
                raise undo.complain(tensor, version)
            if may_write and is_copied(tensor):
                undo.others.append((tensor, tensor._version, copy_of(tensor), None))
            else:
                undo.uncopied.append((tensor, tensor._version))
        empty = (refer() for refer in self._empty)
        undo.freed += [tensor for tensor in empty if tensor is not None and not has_storage(tensor)]
        if stale:
            undo.exchange(tensor for tensor, *_ in stale)
        # All is read before the first is written: two groups have a tensor in common where a module is part of two.
        writes = [self._look_at_small(one, undo, may_write=may_write) for one in self._small]
        for one, versions in zip(self._small, writes, strict=True):
            if versions is not None:
                one.group.write(one.content, versions)
        if stale:
            fill_all(stale)
        self.freed = undo.freed

    def _look_at_small(self, one: SmallCopy, undo: ContentsUndo, *, may_write: bool) -> list[int] | None:
        """Notes small tensors for ``undo``; returns the versions to write with their content, None if they hold it."""
        group, content = one.group, one.group.read()
        is_exchanged = content != one.content or one.before != one.after
        versions = group.read_versions() if is_exchanged or may_write or group.moves is not False else None
        if versions is not None and not self._settled:
            is_exchanged = is_exchanged or versions != one.before
        if content is None:
            undo.exchange(group.tensors())
        else:
            undo.small.append((group, content, versions, is_exchanged))
        if versions is None or not is_exchanged:
            return None
        ends = one.after if self._settled else versions
        return [was + now - end for was, now, end in zip(one.before, versions, ends, strict=True)]
