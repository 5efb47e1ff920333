"""State that forward changes besides its outputs: running statistics, power iterations, histories of maxima.

A rerun must find such state as forward found it, or it computes something else, and must not change it again. What forward
changed is known only afterwards, by object and by version; so before forward a copy is taken of each tensor that may change,
and after it those that did not are let go. Copies are real ones for small tensors, and lazy ones for large tensors, which cost
nothing unless the original is written to (``Tensor._lazy_clone``). Of tensors that carry a graph no copy is taken; that they
changed is told by their versions, and an error.

For a rerun, entries that forward bound to other objects (``self.history = ...``) get the objects back that they had, and
tensors that forward wrote to get their old content, in place, so that every view and alias of them sees it; both are undone
when the rerun ends, versions included.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ._bytes import same_bytes
from ._torch import is_cow_tensor, lazy_clone, set_versions, storage_of

__all__ = ["State", "StateUndo", "capture_state", "is_idle", "storages_of"]

#: Tensors up to this size are copied outright. A lazy copy moves the original to other memory when that is written to, which
#: whoever holds its address would not notice.
_SMALL_BYTES = 1 << 16

_ABSENT = object()
#: The attribute of a module that has its plan.
_PLAN = "_ckpt_hooks_plan"
_NOT_STATE = frozenset({"_is_full_backward_hook", _PLAN})

#: In how many forwards a plan is looked at in any case.
_LOOKS = 3

#: A name in a module, as the dict that holds it and the key.
_Slot = tuple[dict[str, Any], str]
_NO_SLOTS: list[_Slot] = []
#: The names in a dict before forward.
_Names = tuple[dict[str, Any], frozenset[str]]


class StateUndo:
    """What a rerun found, to be put back.

    Attributes:
        slots: Names in modules with their objects.
        exchanged: Tensors, versions and contents of those that get another content for the rerun.
        others: The same of those that do not, and are looked at when it has ended.
    """

    __slots__ = ("exchanged", "others", "slots")

    def __init__(self, slots: list[tuple[_Slot, Any]]) -> None:
        self.slots = slots
        self.exchanged: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self.others: list[tuple[torch.Tensor, int, torch.Tensor]] = []


class _Epoch:
    """Counts what is registered in modules, of any kind, by a hook of torch for each kind."""

    number = 0
    watching = False

    @classmethod
    def watch(cls) -> None:
        if not cls.watching:
            cls.watching = True
            register_module_module_registration_hook(cls._next)
            register_module_buffer_registration_hook(cls._next)
            register_module_parameter_registration_hook(cls._next)

    @staticmethod
    def _next(*_: Any) -> None:
        _Epoch.number += 1


class _Plan:
    """Where the state of a module and its submodules is, found once and used as long as the module has the same submodules.

    It is kept in the module's ``__dict__``, so that it dies with the module. It refers to nothing that refers to the module,
    so that it makes no cycle, and it copies and pickles as None.
    """

    __slots__ = (
        "_attributes",
        "_buffers",
        "_children",
        "_containers",
        "_epoch",
        "_names",
        "_root",
        "_size",
        "_slots",
        "_stateless",
        "_used",
    )

    def __init__(self, root: Module) -> None:
        self._root = weakref.ref(root)
        modules = [module for module in root.modules() if module is not root and type(module._modules) is dict]
        self._containers = [root._modules, *(module._modules for module in modules)]
        self._children = list(chain.from_iterable(map(dict.values, self._containers)))
        self._buffers = [root._buffers, *(module._buffers for module in modules)]
        self._attributes = [module.__dict__ for module in modules]
        self._size = sum(map(len, self._attributes)) + len(root.__dict__.keys() | {_PLAN})
        # Plain attributes that are tensors, or None and may become one: of the root by name, since its dict holds this plan.
        self._names = _names_of_state(root.__dict__)
        self._slots: list[_Slot] = [(own, name) for own in self._attributes for name in _names_of_state(own)]
        self._epoch, self._used = -1, 0
        self._stateless = not (self._names or self._slots or any(self._buffers))

    def is_idle(self, root: Module) -> bool:
        """Whether there is nothing in a module that forward might change, as far as can be said without looking."""
        return self._stateless and self._epoch == _Epoch.number and self._used > _LOOKS and self._root() is root

    def holds(self, root: Module) -> bool:
        """Whether this is the plan of a module, and that has the submodules and attributes that it had.

        To look at all of them costs a microsecond for every ten submodules, so it is done in the first few forwards, which may
        add attributes, and then whenever a module, buffer or parameter was registered anywhere.
        """
        if self._root() is not root:
            return False
        if self._epoch == _Epoch.number and self._used > _LOOKS:
            return True
        self._epoch, self._used = _Epoch.number, self._used + 1
        self._stateless = not (self._names or self._slots or any(self._buffers))
        return (
            list(chain.from_iterable(map(dict.values, self._containers))) == self._children
            and sum(map(len, self._attributes)) + len(root.__dict__) == self._size
        )

    def names(self, root: Module) -> list[_Names]:
        """Returns the names that a module and its submodules have now, as long as they may still get others."""
        if self._used > _LOOKS:
            return []
        return [(owner, frozenset(owner)) for owner in (root.__dict__, *self._attributes, *self._buffers)]

    def slots(self, root: Module) -> list[_Slot]:
        """Returns where a tensor is that forward might change."""
        if self._stateless:
            return _NO_SLOTS
        slots = [(buffers, name) for buffers in self._buffers for name in buffers]
        return slots + [(root.__dict__, name) for name in self._names] + self._slots

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _names_of_state(attributes: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in attributes.items()
        if (value is None or isinstance(value, torch.Tensor)) and name not in _NOT_STATE
    ]


def _plan_of(module: Module) -> _Plan:
    plan: _Plan | None = module.__dict__.get(_PLAN)
    if plan is None or not plan.holds(module):
        _Epoch.watch()
        plan = module.__dict__[_PLAN] = _Plan(module)
    return plan


def is_idle(function: Any) -> bool:
    """Whether a function is a module that was looked at before and has no state to capture."""
    plan = getattr(function, _PLAN, None)
    return plan is not None and plan.is_idle(function)


def capture_state(modules: Sequence[Module], tensors: Sequence[torch.Tensor]) -> State | None:
    """Takes copies of what a forward may change; None where there is nothing of the kind.

    Args:
        modules: Whose buffers, and attributes that are tensors.
        tensors: Others, of which those that require no grad are looked at.
    """
    slots: list[_Slot] = []
    names: list[_Names] = []
    for module in modules:
        if type(module._modules) is dict:
            plan = _plan_of(module)
            slots += plan.slots(module)
            names += plan.names(module)
    if not (slots or names or tensors):
        return None
    state = State(slots, tensors, names)
    return state if state.slots or state.copies or names else None


class _Copy:
    """What is known of one tensor: its version before forward and after it, and a copy of it where one was taken."""

    __slots__ = ("after", "changed", "copy", "lazy", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, *, shared: bool) -> None:
        self.tensor = tensor
        self.version = self.after = tensor._version
        self.copy: torch.Tensor | None = None
        self.lazy = False
        #: Whether forward changed it without its version telling.
        self.changed = False
        if shared:
            return
        if tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
            self.copy = tensor.clone()
        elif type(tensor) is torch.Tensor:
            self.copy, self.lazy = lazy_clone(tensor), True

    def look(self) -> None:
        """Finds out how far forward has changed the tensor until now."""
        self.after = self.tensor._version
        if self.copy is None or self.after != self.version:
            return
        if self.lazy:
            self.changed = not is_cow_tensor(self.tensor)
        elif self.tensor.device.type == "cpu":
            self.changed = _differs(self.tensor, self.copy)
        else:
            self.changed = self.tensor.is_floating_point()


class State:
    """What forward found, for a rerun to find it again.

    Attributes:
        slots: Names in modules with the objects that they had.
        copies: Tensors, with copies of those that may change.
    """

    __slots__ = ("_names", "_settled", "copies", "slots")

    def __init__(self, slots: list[_Slot], tensors: Sequence[torch.Tensor], names: list[_Names]) -> None:
        self._names = names
        self.slots = [(slot, slot[0].get(slot[1], _ABSENT)) for slot in slots]
        self.copies: list[_Copy] = []
        self._settled = False
        seen = set()
        for tensor in (*(value for _, value in self.slots), *tensors):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                if _may_change(tensor):
                    self.copies.append(_Copy(tensor, shared=tensor.requires_grad or tensor.layout is not torch.strided))

    def settle(self) -> bool:
        """Looks what forward changed, when it has ended; returns whether there is anything to rewind.

        Small copies are kept whatever it did, since the original may change before backward. A write that no version tells of,
        by a kernel from outside of torch, is seen by its making a lazy copy a real one, or by comparing; other devices than
        the CPU are not asked to compare, so there floats count as changed.
        """
        for copy in self.copies:
            copy.look()
            if copy.lazy and not copy.changed and copy.after == copy.version:
                copy.copy = None
        self._settled = True
        for owner, names in self._names:  # a cache that the first forward builds, say
            added = [name for name, value in owner.items() if name not in names and isinstance(value, torch.Tensor)]
            self.slots += [((owner, name), _ABSENT) for name in added]
        self._names = []
        return bool(self.slots or self.copies)

    def rewind(self, complain: Callable[[torch.Tensor, int], BaseException]) -> StateUndo:
        """Puts back what forward found; returns what to give to :meth:`restore`.

        Args:
            complain: Returns an error for a tensor that has changed and the version that it had, where no copy was taken.
        """
        if not self._settled:  # a backward inside of forward
            for copy in self.copies:
                copy.look()
        undo = StateUndo([(slot, slot[0].get(slot[1], _ABSENT)) for slot, _ in self.slots])
        stale = []
        for copy in self.copies:
            if copy.changed or copy.tensor._version != copy.version:
                if copy.copy is None:
                    raise complain(copy.tensor, copy.version)
                stale.append(copy)
                undo.exchanged.append((copy.tensor, copy.tensor._version, copy.tensor.clone()))
            elif not copy.tensor.requires_grad:
                content = lazy_clone(copy.tensor) if copy.copy is None else copy.copy
                if content is not None:
                    undo.others.append((copy.tensor, copy.version, content))
        _bind(self.slots)
        for copy in stale:
            # Versions count on from where they were before forward as far as they have moved since its end: what a rerun saves
            # of a tensor that somebody else modified is found to be modified, as in plain autograd.
            _fill(copy.tensor, copy.version + copy.tensor._version - copy.after, copy.copy)
        return undo

    @staticmethod
    def restore(undo: StateUndo) -> None:
        """Puts back what :meth:`rewind` found, and what the rerun changed beyond what forward did."""
        _bind(undo.slots)
        for tensor, version, content in undo.exchanged:
            _fill(tensor, version, content)
        for tensor, version, content in undo.others:
            if tensor._version != version or is_cow_tensor(content) is not is_cow_tensor(tensor) or _differs(tensor, content):
                _fill(tensor, version, content)


def _may_change(tensor: torch.Tensor) -> bool:
    if tensor.is_inference() or tensor.is_meta:
        return False
    try:
        # What autograd saves of a leaf that requires grad is kept by itself, and checked.
        return not (tensor.is_leaf and tensor.requires_grad)
    except RuntimeError:  # a view that lost its graph when its base was modified
        return False


def storages_of(undo: StateUndo) -> frozenset[int | None]:
    """Returns which storages have their content exchanged for a rerun."""
    return frozenset(storage_of(tensor) for tensor, *_ in undo.exchanged)


def _bind(slots: list[tuple[_Slot, Any]]) -> None:
    for (owner, name), value in slots:
        if value is _ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value


def _fill(tensor: torch.Tensor, version: int, content: torch.Tensor | None) -> None:
    if content is not None:
        with torch.no_grad():
            tensor.copy_(content)
        set_versions((tensor,), (version,))


def _differs(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a small tensor on the CPU is no longer equal to its copy."""
    return not is_cow_tensor(copy) and tensor.device.type == "cpu" and not same_bytes(tensor, copy)
