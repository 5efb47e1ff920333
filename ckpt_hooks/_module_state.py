"""State that forward changes besides its outputs: running statistics, power iterations, histories of maxima.

A rerun must find such state as forward found it, or it computes something else, and must not change it again. What forward
changes is known only afterwards, so before forward a copy is taken of each tensor that may change. Copies are shared: a tensor
that nobody wrote to since it was copied for another region is not copied again.

For a rerun, names that were bound to other objects since (``self.history = ...``) get the objects back that they had, and
tensors that were written to get their content back, in place, so that every view and alias of them sees it. Both are undone
when the rerun ends, versions included. What the rerun itself writes is undone as well.

Tensors that were copied are not held, since any of them may become part of a graph later on (``self.aux += loss``), which holds
this. Where nobody else holds one by the time of a rerun, that finds an alias, if forward itself has bound the name to something
else; or else a copy.

Nothing is done about tensors that carry a graph, whose content and history cannot be exchanged. Those of other classes than
torch's own, sparse ones and quantised ones are only known by their versions. Closed-over tensors are copied up to a size;
larger ones are only known by their versions.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._bytes import same_bytes
from ._module_plan import ModulePlan, Slot
from ._rebinding import ABSENT, ATOMS, HAD_GRAPH, WAS_NONE, carries_graph, is_guard, rebound
from ._refit import as_kind, copy_of, fill_all, is_plain, same_layout
from ._state_copies import has_storage, is_same, known_copy, take_copy
from ._torch import set_versions, storage_of

__all__ = ["State", "StateUndo", "capture_state"]

#: Up to this size tensors that are not a module's are copied.
_MOST_BYTES = 1 << 20
#: Parameters without gradients are copied up to this size, all of a region together, in the first few forwards of a module.
_MOST_FROZEN_BYTES = 1 << 24

_NO_PARAMETERS: frozenset[int] = frozenset()


def _is_copied(tensor: torch.Tensor) -> bool:
    """Whether a tensor's content can be taken, compared and put back."""
    return is_plain(tensor) and not (tensor.requires_grad or tensor.is_meta or tensor.is_inference()) and has_storage(tensor)


def _is_versioned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of another class or kind, and tells whether it was written to."""
    return not (is_plain(tensor) or tensor.requires_grad or tensor.is_meta or tensor.is_inference())


class _Entry:
    """One tensor: its version before forward and after it, and its copy.

    Attributes:
        held: The tensor itself until forward has ended; then what stands for it, if there is a need.
    """

    __slots__ = ("after", "before", "copy", "held", "kind", "reference")

    def __init__(self, tensor: torch.Tensor, copy: torch.Tensor | None) -> None:
        self.reference, self.kind = weakref.ref(tensor), type(tensor)
        self.held: torch.Tensor | None = tensor
        self.before = self.after = tensor._version
        self.copy = copy

    def present(self) -> torch.Tensor | None:
        """Returns the tensor, what stands for it, or None if there is neither."""
        tensor = self.reference()
        return self.held if tensor is None else tensor

    def settle(self, *, is_replaced: bool) -> None:
        """Lets go of the tensor, and takes an alias if forward has replaced it."""
        tensor, self.held = self.held, None
        assert tensor is not None
        self.after = tensor._version
        if is_replaced:
            self.held = as_kind(tensor.detach(), self.kind)

    def substitute(self) -> None:
        """Has a copy stand for a tensor that is gone."""
        if self.copy is not None and self.present() is None:
            copy = copy_of(self.copy)
            set_versions((copy,), (self.before,))
            self.after = self.before
            self.held = as_kind(copy, self.kind)

    def is_stale(self) -> bool:
        """Whether the tensor is not as it was before forward; if it is gone, nobody can tell."""
        tensor = self.present()
        if tensor is None:
            return False
        if tensor._version != self.before:
            return True
        return self.copy is not None and has_storage(tensor) and not is_same(tensor, self.copy)


class _Frozen(_Entry):
    """A parameter without gradients, which forward may turn out to write to."""

    __slots__ = ("_note", "_storage", "slot")

    def __init__(self, tensor: torch.Tensor, slot: Slot, note: Callable[[], None]) -> None:
        super().__init__(tensor, copy_of(tensor))
        self._note, self._storage = note, storage_of(tensor)
        self.slot = slot

    def is_in_place(self) -> bool:
        """Whether it is where it was; otherwise it is in the hands of a framework, which frees parameters and gathers them."""
        assert self.held is not None  # until forward has ended
        assert self.copy is not None
        return storage_of(self.held) == self._storage and same_layout(self.held, self.copy)

    def was_written(self) -> bool:
        """Whether forward has written to it, or bound its name to another one; notes it if so."""
        tensor, copy = self.held, self.copy
        assert tensor is not None
        assert copy is not None
        has_name = self.slot[0].get(self.slot[1]) is tensor
        written = not has_name or (
            self.is_in_place()
            and (tensor._version != self.before or (tensor.device.type == "cpu" and not same_bytes(tensor, copy)))
        )
        if written:
            self._note()
        return written


def _frozen_of(plans: list[ModulePlan]) -> list[_Frozen]:
    """Returns parameters without gradients to watch, the smallest first and as many as may be copied."""
    found = [(slot[0][slot[1]], slot, note) for plan in plans for note, slot in plan.frozen()]
    if not found:
        return []
    plain = sorted((entry for entry in found if _is_copied(entry[0])), key=lambda entry: entry[0].nbytes)
    total = itertools.accumulate(entry[0].nbytes for entry in plain)
    return [_Frozen(*entry) for entry, bytes_so_far in zip(plain, total, strict=True) if bytes_so_far <= _MOST_FROZEN_BYTES]


class StateUndo:
    """What a rerun found, to be put back.

    Attributes:
        slots: Names in modules with their objects.
        exchanged: Tensors, versions and contents of those that get another content for the rerun, and how they are laid out.
        others: Tensors, versions and contents of those that do not.
        trained: Parameters, versions and contents, where the rerun may initialise some again, which nothing can bring back.
        complain: Returns an error for one of those.
    """

    __slots__ = ("complain", "exchanged", "others", "slots", "trained")

    complain: Callable[[torch.Tensor, int], BaseException]

    def __init__(self) -> None:
        self.slots: list[tuple[Slot, Any]] = []
        self.exchanged: list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]] = []
        self.others: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self.trained: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def storages(self) -> frozenset[int | None]:
        """Returns which storages have their content exchanged for a rerun."""
        return frozenset(storage_of(tensor) for tensor, *_ in self.exchanged)


class State:
    """What forward found, for a rerun to find it again.

    Attributes:
        slots: Names in modules with the objects that they had, or with the entries of tensors.
        entries: Tensors.
        plans: Of the modules.
        parameters: Those among the tensors that are parameters, by their ``id``.
    """

    __slots__ = ("_frozen", "_namespaces", "_settled", "entries", "parameters", "plans", "slots")

    def __init__(
        self, plans: list[ModulePlan], slots: list[Slot], own: list[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> None:
        self._settled = False
        self.plans = plans
        bound = ((slot, slot[0].get(slot[1], ABSENT)) for slot in slots)
        self.slots = [(slot, value) for slot, value in bound if value is None or type(value) not in ATOMS]
        self._namespaces = [entry for plan in plans for entry in plan.namespaces()]
        self.entries: list[_Entry] = []
        self._frozen = _frozen_of(plans)
        self.parameters = _NO_PARAMETERS
        seen: dict[int, _Entry | None] = {}
        owned = [value for _, value in self.slots if isinstance(value, torch.Tensor)] + own
        for number, tensor in enumerate((*owned, *others)):
            if id(tensor) not in seen:
                entry = seen[id(tensor)] = _entry_of(tensor, is_owned=number < len(owned))
                if entry is not None:
                    self.entries.append(entry)
        for number, (slot, value) in enumerate(self.slots):
            entry = seen.get(id(value))
            if entry is not None and entry.copy is not None:
                self.slots[number] = slot, entry

    def settle(self, *, failed: bool = False) -> bool:
        """Looks how far versions have moved when forward has ended; returns whether there is anything to rewind.

        Args:
            failed: Whether it has ended by an exception, and may not have come to what it changes.
        """
        for plan in () if failed else self.plans:
            plan.has_run()
        for frozen in self._frozen:
            if frozen.was_written():
                self.entries.append(frozen)
                self.slots.append((frozen.slot, frozen))
        has_new_parts = self._has_new_parts()
        self.slots += [] if has_new_parts else rebound(self._namespaces, self._changed_owners)
        # What carries a graph is of a forward before, as a loss that is only logged: to keep it would keep that forward, and
        # so on.
        self.slots = [(slot, HAD_GRAPH if carries_graph(_tensor_of(value)) else value) for slot, value in self.slots]
        if has_new_parts:
            self.slots = [(slot, value) for slot, value in self.slots if value is not None]
        if any(plan.has_written() for plan in self.plans):
            found = (entry.reference() for entry in self.entries)
            self.parameters = frozenset(id(tensor) for tensor in found if isinstance(tensor, torch.nn.Parameter))
        named = ((slot, value) for slot, value in self.slots if isinstance(value, _Entry))
        replaced = {id(entry) for (owner, name), entry in named if owner.get(name) is not entry.held}
        for entry in self.entries:
            entry.settle(is_replaced=id(entry) in replaced)
        self._namespaces, self._frozen, self._settled = [], [], True
        return bool(self.slots or self.entries)

    def _has_new_parts(self) -> bool:
        """Whether forward has made modules or parameters, which stay, and with them whatever tells that they are there."""
        return any(plan.has_new_parts() for plan in self.plans)

    def _changed_owners(self) -> set[int]:
        """Returns which dictionaries of modules have names of tensors that forward has changed, or bound to others."""
        stale = {id(entry) for entry in self.entries if entry.is_stale()}
        return {
            id(owner)
            for (owner, name), value in self.slots
            if id(value) in stale or (isinstance(owner.get(name), torch.Tensor) and owner[name] is not _tensor_of(value))
        }

    def storages(self) -> frozenset[int | None]:
        """Returns which storages hold what may be rewound."""
        tensors = (entry.present() for entry in self.entries)
        return frozenset(storage_of(tensor) for tensor in tensors if tensor is not None)

    def rewind(self, undo: StateUndo, complain: Callable[[torch.Tensor, int], BaseException]) -> None:
        """Puts back what forward found.

        Args:
            undo: Gets what :meth:`restore` needs, whatever happens.
            complain: Returns an error for a tensor that has changed and the version that it had, where no copy was taken.
        """
        stale, entries, slots, initialises = [], self.entries, self.slots, False
        if not self._settled:  # a backward in the middle of forward
            entries = entries + [frozen for frozen in self._frozen if frozen.is_in_place()]
            slots = slots + ([] if self._has_new_parts() else rebound(self._namespaces, self._changed_owners))
        for _, value in slots:
            if isinstance(value, _Entry):
                value.substitute()
        for entry in entries:
            tensor, copy = entry.present(), entry.copy
            if tensor is None:
                continue
            if entry.is_stale():
                if copy is None:
                    raise complain(tensor, entry.before)
                # Versions count on from where they were before forward as far as they have moved since its end: what a rerun
                # saves of a tensor that somebody else modified is found to be modified, as in plain autograd.
                after = entry.after if self._settled else tensor._version  # the latter for a backward inside of forward
                stale.append((tensor, entry.before + tensor._version - after, copy))
            elif copy is not None:
                undo.others.append((tensor, tensor._version, copy))
        for slot, value in slots:
            now = slot[0].get(slot[1], ABSENT)
            # What was None and is something else now is a part that forward made, a module or the like, and is there to stay.
            if value is not None or now is None or isinstance(now, torch.Tensor):
                undo.slots.append((slot, now))
                if value is not now and is_guard(value, now):
                    initialises = True
                if value is not HAD_GRAPH:
                    _bind(slot, None if value is WAS_NONE else _tensor_of(value))
        for tensor, _, _ in stale:
            undo.exchanged.append((tensor, tensor._version, copy_of(tensor), tensor.data))
        fill_all((tensor, version, copy, None) for tensor, version, copy in stale)
        if initialises:
            modules = {id(module): module for plan in self.plans for reference in plan.parameters[0] if (module := reference())}
            found = {id(p): p for module in modules.values() for p in module._parameters.values() if p is not None}
            trained = [parameter for parameter in found.values() if parameter.requires_grad and _is_copied(parameter.detach())]
            undo.trained = [(parameter, parameter._version, copy_of(parameter)) for parameter in trained]
            undo.complain = complain

    @staticmethod
    def restore(undo: StateUndo) -> None:
        """Puts back what :meth:`rewind` found, and what the rerun changed beyond what forward did.

        Raises:
            MutationError: If the rerun initialised parameters once more. They are as they were before it.
        """
        for slot, value in reversed(undo.slots):
            _bind(slot, value)
        fill_all(undo.exchanged)
        fill_all(
            (tensor, version, content, None)
            for tensor, version, content in undo.others
            if tensor._version != version or (has_storage(tensor) and not is_same(tensor, content))
        )
        for parameter, version, content in undo.trained:
            if same_layout(parameter, content) and not torch.allclose(parameter, content, rtol=0, atol=0, equal_nan=True):
                fill_all([(parameter, version, content, None)])
                raise undo.complain(parameter, version)


def _entry_of(tensor: torch.Tensor, *, is_owned: bool) -> _Entry | None:
    """Returns an entry for a tensor, None if nothing can be done about it."""
    copy = known_copy(tensor)
    if copy is None:
        if not _is_copied(tensor):  # all that there may be to say of it is that it was modified
            return _Entry(tensor, None) if _is_versioned(tensor) else None
        if is_owned or tensor.nbytes <= _MOST_BYTES:
            copy = take_copy(tensor, lasts=is_owned)
    return _Entry(tensor, copy)


def _tensor_of(value: Any) -> Any:
    """Returns the object of a slot."""
    return value.present() if isinstance(value, _Entry) else value


def _bind(slot: Slot, value: Any) -> None:
    owner, name = slot
    if value is ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = value


def capture_state(plans: list[ModulePlan], tensors: Sequence[torch.Tensor]) -> tuple[State | None, list[torch.Generator]]:
    """Takes copies of what a forward may change; None where there is nothing of the kind.

    Args:
        plans: Those of modules, of which it is buffers, attributes that are tensors, and tensors in containers and objects.
        tensors: Others, of which those that require no grad are looked at.

    Returns:
        The state, and random generators that the modules hold.
    """
    if torch.is_inference_mode_enabled():  # no backward will come
        return None, []
    slots, own, generators = [], [], []
    for plan in plans:
        more = plan.contents()
        slots += more[0]
        own += more[1]
        generators += more[2]
    state = State(plans, slots, own, tensors)
    if state.slots or state.entries or state._namespaces or state._frozen:
        return state, generators
    for plan in plans:
        plan.has_run()
    return None, generators
