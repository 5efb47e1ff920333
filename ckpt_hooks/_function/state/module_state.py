"""State that forward changes besides its outputs: running statistics, power iterations, histories of maxima.

A rerun must find such state as forward found it, or it computes something else, and must not change it again. What forward
changes is known only afterwards, so before forward a copy is taken of each tensor that may change. Copies are shared: a tensor
that nobody wrote to since it was copied for another region is not copied again.

For a rerun, tensors that were written to get their content back, in place, so that every view and alias of them sees it. That
is undone when the rerun ends, versions included. What the rerun itself writes is undone as well. (What names are bound to is
the business of :mod:`.attributes`.)

Tensors that were copied are not held, since any of them may become part of a graph later on (``self.aux += loss``), which holds
this. An attribute that is gone by the time of a rerun has an alias.

Nothing is done here about tensors that require grad. Those of other classes than torch's own, sparse ones and quantised ones
are only known by their versions. Closed-over tensors are copied up to a size; larger ones are only known by their versions.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._tensors.copies import copy_of, data_of, fill_all, is_dense, is_plain, same_bits, same_layout
from ckpt_hooks._torch import storage_of

from .module_plan import ModulePlan, Slot
from .noted_values import Complain, GoneError, PutBack, TensorNote
from .packed import Pack, PackedCopy
from .shared_copies import has_storage, is_same, known_copy, take_copy

__all__ = ["State", "StateUndo", "capture_state"]

#: Up to this size tensors that are not a module's are copied.
_MOST_BYTES = 1 << 20
#: Parameters without gradients are copied up to this size, all of a region together, in the first few forwards of a module.
_MOST_FROZEN_BYTES = 1 << 24

_NO_PARAMETERS: frozenset[int] = frozenset()


def _is_copied(tensor: torch.Tensor) -> bool:
    """Whether a tensor's content can be taken, compared and put back."""
    return is_dense(tensor) and not (tensor.requires_grad or tensor.is_meta or tensor.is_inference()) and has_storage(tensor)


def _is_versioned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of another class or kind, and tells whether it was written to."""
    return not (is_dense(tensor) or tensor.requires_grad or tensor.is_meta or tensor.is_inference())


class _Entry:
    """The content of one tensor: its version before forward and after it, and its copy.

    Attributes:
        tensor: Returns the tensor, an alias where it is gone, or None where there is none either.
    """

    __slots__ = ("after", "before", "copy", "tensor")

    def __init__(self, tensor: torch.Tensor, refer: Callable[[], torch.Tensor | None], copy: torch.Tensor | None) -> None:
        self.tensor = refer
        self.before = self.after = tensor._version
        self.copy = copy

    def settle(self) -> None:
        """Ends forward."""
        tensor = self.tensor()
        if tensor is not None:
            self.after = tensor._version

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Whether the content is not what it was before forward."""
        if tensor._version != self.before:
            return True
        return self.copy is not None and has_storage(tensor) and not is_same(tensor, self.copy)


class _Parameter(_Entry):
    """A parameter without gradients, and its name: forward may write to it, or bind the name to another one."""

    __slots__ = ("_note", "_noted", "_storage", "slot")

    def __init__(self, tensor: torch.Tensor, slot: Slot, copy: torch.Tensor | None, note: Callable[[], None] | None) -> None:
        self._noted = TensorNote(tensor)
        super().__init__(tensor, self._noted.tensor, copy)
        self._storage = storage_of(tensor)
        self.slot = slot
        self._note = note

    def is_in_place(self) -> bool:
        """Whether it is where it was; otherwise it is in the hands of a framework, which frees parameters and gathers them."""
        tensor, copy = self.tensor(), self.copy
        return tensor is not None and copy is not None and storage_of(tensor) == self._storage and same_layout(tensor, copy)

    def was_written(self) -> bool:
        """Whether forward has written to it, or bound its name to another one; tells of it if so."""
        tensor, copy = self._noted.reference(), self.copy
        written = tensor is None or self.slot[0].get(self.slot[1]) is not tensor
        if tensor is not None and copy is not None and not written and self.is_in_place():
            written = tensor._version != self.before or (tensor.device.type == "cpu" and not same_bits(tensor, copy))
        if written and self._note is not None:
            self._note()
        return written

    def bind(self, complain: Complain) -> None:
        """Binds the name to the parameter, or to what stands for it."""
        with contextlib.suppress(GoneError):
            self.slot[0][self.slot[1]] = self._noted.present(PutBack(complain))

    def identity(self) -> int:
        """Returns the ``id`` of the parameter."""
        return id(self._noted.reference())


def _frozen_of(plans: Sequence[ModulePlan]) -> list[_Parameter]:
    """Returns parameters without gradients to watch, the smallest first and as many as may be copied."""
    found = [(slot[0][slot[1]], slot, note) for plan in plans for note, slot in plan.frozen()]
    if not found:
        return []
    plain = sorted((entry for entry in found if _is_copied(entry[0])), key=lambda entry: entry[0].nbytes)
    total = itertools.accumulate(entry[0].nbytes for entry in plain)
    return [
        _Parameter(tensor, slot, copy_of(tensor), note)
        for (tensor, slot, note), bytes_so_far in zip(plain, total, strict=True)
        if bytes_so_far <= _MOST_FROZEN_BYTES
    ]


class StateUndo:
    """What a rerun found, to be put back.

    Attributes:
        slots: Names of parameters without gradients, and the parameters.
        exchanged: Tensors, versions and contents of those that get another content for the rerun, and how they are laid out.
        others: Tensors, versions and contents of those that do not.
        packed: Packs, versions and contents, and whether they get another content.
        trained: Parameters, versions and contents, where the rerun may initialise some again, which nothing can bring back.
        complain: Returns an error for one of those.
    """

    __slots__ = ("complain", "exchanged", "others", "packed", "slots", "trained")

    complain: Complain

    def __init__(self) -> None:
        self.slots: list[tuple[Slot, Any]] = []
        self.exchanged: list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]] = []
        self.others: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self.packed: list[tuple[Pack, list[int], torch.Tensor, bool]] = []
        self.trained: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def watch_trained(self, plans: Sequence[ModulePlan], complain: Complain) -> None:
        """Takes copies of the parameters that a rerun may initialise once more."""
        modules = {id(module): module for plan in plans for reference in plan.parameters[0] if (module := reference())}
        found = {id(p): p for module in modules.values() for p in module._parameters.values() if p is not None}
        trained = [
            parameter
            for parameter in found.values()
            if parameter.requires_grad and is_plain(parameter) and _is_copied(parameter.detach())
        ]
        self.trained = [(parameter, parameter._version, copy_of(parameter)) for parameter in trained]
        self.complain = complain

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes copies of tensors to which forward has not written, but the rerun may."""
        self.others += [(tensor, tensor._version, copy_of(tensor)) for tensor in tensors if _is_copied(tensor)]

    def storages(self) -> frozenset[int | None]:
        """Returns which storages get another content for the rerun."""
        packed = [pack.storages for pack, _, _, is_exchanged in self.packed if is_exchanged]
        if len(packed) == 1 and not self.exchanged:
            return packed[0]
        return frozenset(storage_of(tensor) for tensor, *_ in self.exchanged).union(*packed)

    def restore(self) -> None:
        """Puts back what the rerun found, and what it changed beyond what forward did.

        Raises:
            MutationError: If the rerun initialised parameters once more. They are as they were before it.
        """
        for (owner, name), value in reversed(self.slots):
            owner[name] = value
        for pack, versions, content, is_exchanged in self.packed:
            if is_exchanged or pack.versions() != versions or any(pack.differences(content)):
                pack.write(content, versions)
        if self.exchanged:
            fill_all(self.exchanged)
        if self.others:
            fill_all(
                (tensor, version, content, None)
                for tensor, version, content in self.others
                if tensor._version != version or (has_storage(tensor) and not is_same(tensor, content))
            )
        for parameter, version, content in self.trained:
            if same_layout(parameter, content) and not torch.allclose(parameter, content, rtol=0, atol=0, equal_nan=True):
                fill_all([(parameter, version, content, None)])
                raise self.complain(parameter, version)


class State:
    """Contents of tensors as forward found them, for a rerun to find them again.

    Attributes:
        entries: Tensors.
        packed: Small tensors of modules.
        parameters: Those among the tensors that are parameters, by their ``id``.
    """

    __slots__ = ("_frozen", "_names", "_settled", "entries", "packed", "parameters")

    def __init__(
        self, plans: Sequence[ModulePlan], packs: Sequence[Pack], tensors: Sequence[tuple[torch.Tensor, _Refer, bool]]
    ) -> None:
        """Takes copies.

        Args:
            plans: Those of modules.
            packs: Their small tensors.
            tensors: Tensors, what refers to each, and whether a module owns it.
        """
        self._settled = False
        self.parameters = _NO_PARAMETERS
        self._frozen = _frozen_of(plans)
        self._names = [_Parameter(slot[0][slot[1]], slot, None, None) for plan in plans for slot in plan.written()]
        self.packed = list(map(PackedCopy, packs))
        seen: set[int] = set()
        self.entries: list[_Entry] = []
        for name in self._names:
            tensor = name.slot[0][name.slot[1]]
            if id(tensor) not in seen and _is_copied(tensor):
                seen.add(id(tensor))
                copy = known_copy(tensor)
                name.copy = take_copy(tensor) if copy is None else copy
                self.entries.append(name)
        for tensor, refer, is_owned in tensors:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                entry = _entry_of(tensor, refer, is_owned=is_owned)
                if entry is not None:
                    self.entries.append(entry)

    def is_empty(self) -> bool:
        """Whether there is nothing that forward might change."""
        return not (self.entries or self.packed or self._names or self._frozen)

    def settle(self) -> bool:
        """Looks how far versions have moved when forward has ended; returns whether there is anything to rewind."""
        written = [frozen for frozen in self._frozen if frozen.was_written()]
        self.entries += written
        self._names += written
        self.parameters = frozenset(name.identity() for name in self._names)
        for entry in self.entries:
            entry.settle()
        for one in self.packed:
            one.settle()
        self._frozen, self._settled = [], True
        return bool(self.entries or self.packed)

    def written(self) -> list[torch.Tensor]:
        """Returns the tensors that forward has written to, when it has ended."""
        found = [tensor for entry in self.entries if (tensor := entry.tensor()) is not None and entry.is_stale(tensor)]
        return [*found, *(tensor for copy in self.packed for tensor in copy.written())]

    def storages(self) -> frozenset[int | None]:
        """Returns which storages hold what may be rewound."""
        tensors = (entry.tensor() for entry in self.entries)
        packed = (storage for copy in self.packed for storage in copy.pack.storages)
        return frozenset((*packed, *(storage_of(tensor) for tensor in tensors if tensor is not None)))

    def rewind(self, undo: StateUndo, complain: Complain) -> None:
        """Puts back what forward found.

        Args:
            undo: Gets what its ``restore`` needs, whatever happens.
            complain: Returns an error for a tensor that has changed and the version that it had, where no copy was taken.
        """
        stale, entries = [], self.entries
        if not self._settled:  # a backward in the middle of forward
            entries = entries + [frozen for frozen in self._frozen if frozen.is_in_place()]
        for name in self._names:  # of parameters
            owner, key = name.slot
            if key in owner:
                undo.slots.append((name.slot, owner[key]))
                name.bind(complain)
        packed: list[PackedCopy] = []
        for one in self.packed:
            if one.pack.is_intact():
                packed.append(one)
            else:
                entries = entries + _entries_of(one)
        for entry in entries:
            tensor, copy = entry.tensor(), entry.copy
            if tensor is None:
                continue
            if entry.is_stale(tensor):
                if copy is None:
                    raise complain(tensor, entry.before)
                # Versions count on from where they were before forward as far as they have moved since its end: what a rerun
                # saves of a tensor that somebody else modified is found to be modified, as in plain autograd.
                after = entry.after if self._settled else tensor._version  # the latter for a backward inside of forward
                stale.append((tensor, entry.before + tensor._version - after, copy))
            elif copy is not None:
                undo.others.append((tensor, tensor._version, copy))
        for one in packed:
            versions, content = one.pack.versions(), one.pack.read()
            undo.packed.append((one.pack, versions, content, one.is_stale(versions, content)))
        for tensor, _, _ in stale:
            undo.exchanged.append((tensor, tensor._version, copy_of(tensor), data_of(tensor)))
        for one, (pack, versions, _, is_exchanged) in zip(packed, undo.packed, strict=True):
            if is_exchanged:
                ends = one.after if self._settled else versions
                counted_on = [was + now - end for was, now, end in zip(one.before, versions, ends, strict=True)]
                pack.write(one.copy, counted_on)
        fill_all((tensor, version, copy, None) for tensor, version, copy in stale)


def _entries_of(packed: PackedCopy) -> list[_Entry]:
    """Returns an entry for each tensor of a pack, of which one has other memory by now, or another shape."""
    entries = []
    for (noted, copy), before, after in zip(packed.pack.pieces(packed.copy), packed.before, packed.after, strict=True):
        tensor = noted.tensor()
        if tensor is not None:
            entry = _Entry(tensor, noted.tensor, copy)
            entry.before, entry.after = before, after
            entries.append(entry)
    return entries


#: Returns a tensor, an alias where it is gone, or None.
_Refer = Callable[[], "torch.Tensor | None"]


def _entry_of(tensor: torch.Tensor, refer: _Refer, *, is_owned: bool) -> _Entry | None:
    """Returns an entry for a tensor, None if nothing can be done about it."""
    copy = known_copy(tensor)
    if copy is None:
        if not _is_copied(tensor):  # all that there may be to say of it is that it was modified
            return _Entry(tensor, refer, None) if _is_versioned(tensor) else None
        if is_owned or tensor.nbytes <= _MOST_BYTES:
            copy = take_copy(tensor)
    return _Entry(tensor, refer, copy)


def capture_state(plans: Sequence[ModulePlan], tensors: Sequence[torch.Tensor]) -> tuple[State | None, list[torch.Generator]]:
    """Takes copies of what a forward may change; None where there is nothing of the kind.

    Args:
        plans: Those of modules, of which it is buffers, attributes that are tensors, and tensors in containers and objects.
        tensors: Others, of which those that require no grad are looked at.

    Returns:
        The state, and random generators that the modules hold.
    """
    if torch.is_inference_mode_enabled():  # no backward will come; torch 2.11 refuses to pack
        return None, []
    found: list[tuple[torch.Tensor, _Refer, bool]] = []
    packs: list[Pack] = []
    generators: list[torch.Generator] = []
    for plan in plans:
        pack, notes, own, more = plan.contents()
        packs += () if pack is None else (pack,)
        found += [(tensor, note.tensor, True) for note in notes if (tensor := note.reference()) is not None]
        found += [(tensor, weakref.ref(tensor), True) for tensor in own]
        generators += more
    found += [(tensor, weakref.ref(tensor), False) for tensor in tensors]
    state = State(plans, packs, found)
    return (None if state.is_empty() else state), generators
