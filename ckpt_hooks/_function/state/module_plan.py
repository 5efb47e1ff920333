"""Where the state of a module is: attributes of the module and of submodules, and objects there that hold tensors.

A plan is made once for a module, and used while the submodules stay the same. Plans are kept in a table by the ``id`` of their
modules, whose classes may define equality as they like. A plan refers to modules weakly, and goes with its own module.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from ckpt_hooks._ambient.streams import recurrent_layers

from .attributes import MACHINERY, AttributeNotes, ModuleNote, note_module
from .buffers import Buffers
from .reached_values import Walk, has_state
from .small_buffers import SmallCopy
from .submodules import Parents, Submodules
from .tensor_note import TensorNote

#: Levels of containers and objects below an attribute in which modules are looked for.
_LEVELS = 3

_NUMBERS = frozenset({int, float, complex, bool})
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


class _Epoch:
    """Counts registrations of submodules, buffers and parameters in all modules, by a hook of torch for each kind."""

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


class ModulePlan:
    """The state to capture of one module.

    Attributes:
        buffers: Tells which tensors have to be copied.
        epoch: The count of registrations in all modules at the latest look at this module.
        functions: Functions and other callables with state: hooks, methods, those among attributes and in objects there.
        is_lazy: Whether a module inside makes its parameters in its first forward.
        lock: Held by a recompute that rewinds the module.
        notes: The attributes of the module and its submodules, as of the latest forward.
        parameters: The modules with parameters of their own; see :mod:`.parameters`.
        recurrent: The recurrent layers inside; see :mod:`ckpt_hooks._ambient.streams`.
        root: Refers to the module weakly.
    """

    __slots__ = (
        "_generators",
        "_latest_hook",
        "_modules",
        "_parents",
        "_scripted",
        "buffers",
        "epoch",
        "functions",
        "is_lazy",
        "lock",
        "notes",
        "parameters",
        "recurrent",
        "root",
    )

    def __init__(self, root: Module, before: ModulePlan | None = None) -> None:
        self.root = weakref.ref(root, functools.partial(_forget, _plans, id(root)))
        everything = _all_modules(root)
        modules = [module for module in everything if isinstance(module._modules, dict)]
        self._modules = [weakref.ref(module) for module in modules]
        self._parents = Parents(modules)
        # What TorchScript made has its tensors elsewhere; they are taken as they are.
        self._scripted = [weakref.ref(module) for module in everything if not isinstance(module._modules, dict)]
        self.epoch = _Epoch.number
        self.parameters = _parameters_of(modules)
        self.recurrent = recurrent_layers(modules)
        self.lock: Any = threading.RLock() if before is None else before.lock
        self.buffers: Buffers = Buffers(self._modules, None if before is None else before.buffers)
        self.notes = AttributeNotes([note for module in modules if (note := note_module(module)) is not None])
        self._look()

    def _look(self) -> None:
        """Finds the functions with state, and the random generators."""
        self._latest_hook = RemovableHandle.next_id
        notes, modules = self.notes.notes, self._alive()
        hooks = [hook for module in modules for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
        forwards = dict.fromkeys(type(module).forward for module in modules)
        functions = [*hooks, *forwards, *(function for note in notes for one in note.functions if (function := one()))]
        self.functions = [weakref.ref(one) for one in functions if has_state(one)]
        self._generators = [one for note in notes for one in note.generators]
        self.is_lazy = any(isinstance(module, LazyModuleMixin) and "_initialize_hook" in vars(module) for module in modules)

    def holds(self) -> bool:
        """Whether the module has the same submodules as before."""
        if self.epoch == _Epoch.number:  # no module was registered anywhere since
            return self.submodules() is not None
        self.epoch = _Epoch.number
        modules = self._alive()
        if len(modules) != len(self._modules) or not self._parents.are_those_of(modules):
            return False
        self.parameters = _parameters_of(modules)
        return self._renew_notes(is_new=True)

    def submodules(self) -> Submodules | None:
        """Returns the present submodules of the module; None if they are others than before."""
        return self._parents.submodules()

    def is_idle(self) -> bool:
        """Whether a forward can change nothing but noted attributes, and tensors there."""
        return (
            self.epoch == _Epoch.number
            and self.note()
            and self.buffers.knows_parameters()
            and not (self.buffers.written_names or self._scripted or self.is_lazy or self._generators or self.functions)
        )

    def note(self) -> bool:
        """Notes the present attributes; returns False if a new plan is needed."""
        if self._latest_hook != RemovableHandle.next_id:
            self._look()
        return self.notes.hold() or self._renew_notes(is_new=False)

    def _renew_notes(self, *, is_new: bool) -> bool:
        """Notes the attributes anew; returns whether the plan is good for them."""
        before = self.notes.notes
        modules = [module for note in before if (module := note.module()) is not None]
        if len(modules) < len(before):
            return False
        now = [_renewed(note, module, is_new=is_new) for note, module in zip(before, modules, strict=True)]
        renewed = [(new, old) for new, old in zip(now, before, strict=True) if new is not old]
        if any(new.modules != old.modules for new, old in renewed):
            return False  # and again when it is asked once more
        self.notes = AttributeNotes(now)
        if any(new.differs_in_flags(old) for new, old in renewed):
            self.buffers.forget()
        if is_new or not all(new.is_simple and old.is_simple for new, old in renewed):
            self._look()
        return True

    def _alive(self) -> list[Module]:
        return [module for reference in self._modules if (module := reference()) is not None]

    def has_run(self, *, failed: bool) -> None:
        """Ends a forward. Nested regions begin several forwards before an end, and these count as one forward.

        Args:
            failed: Whether forward ended by an exception.
        """
        self.buffers.num_forwards += not failed

    def contents(self, generators: list[torch.Generator]) -> Contents:
        """Begins a forward: returns the tensors that forward may write to.

        Args:
            generators: Gets the random generators in objects of the module.
        """
        small, others = self.buffers.begin(self.notes)
        generators += [generator for one in self._generators if (generator := one()) is not None]
        scripted = [module for reference in self._scripted if (module := reference()) is not None]
        return small, others, [buffer for module in scripted for buffer in module.buffers(recurse=False)]


#: The copy of small tensors on the host, the notes of others with a number a module, and tensors elsewhere.
Contents = tuple["SmallCopy | None", Sequence[tuple[TensorNote, int]], Sequence[torch.Tensor]]


def _parameters_of(modules: list[Module]) -> tuple[list[weakref.ref[Module]], tuple[()], list[Any]]:
    return [weakref.ref(module) for module in modules if module._parameters], (), []


def _all_modules(root: Module) -> list[Module]:
    """Returns a module, its submodules, and modules in containers and objects there, such as an untrained teacher."""
    found = dict.fromkeys(Module.modules(root))
    todo, seen = list(found), set[int]()
    has_root = functools.cache(lambda module: root in Module.modules(module))
    while todo:
        attributes = [value for name, value in list(vars(todo.pop()).items()) if name not in MACHINERY]
        for value in attributes:
            if id(value) in seen:
                continue
            seen.add(id(value))
            # Left out are modules around ``root`` (a trainer has the whole model) and lists with ``root`` among others (of all
            # layers). Objects of torch's classes are not looked into: the state of FSDP has all modules of a model.
            inner, within = _modules_directly_in(value), _modules_within(value)
            if type(value) in _CALLABLES or root not in within:
                inner += [one for one in within if one not in found and not has_root(one)]
            new = [module for one in inner for module in Module.modules(one) if module not in found]
            found.update(dict.fromkeys(new))
            todo += new
    return list(found)


def _modules_directly_in(value: Any) -> list[Module]:
    if not isinstance(value, (list, tuple, dict)):
        return []
    return [one for one in (value.values() if isinstance(value, dict) else value) if isinstance(one, Module)]


def _modules_within(value: Any) -> list[Module]:
    kind = type(value)
    if isinstance(value, Module):
        return [value]
    if kind in _NUMBERS or isinstance(value, (str, torch.Tensor)) or kind.__module__.partition(".")[0] == "torch":
        return []
    walk = Walk()
    walk.look(value, _LEVELS)
    return walk.modules


def _renewed(note: ModuleNote, module: Module, *, is_new: bool = False) -> ModuleNote:
    """Returns a present note of a module.

    Args:
        note: A note of the module, which may still hold.
        module: The module.
        is_new: Whether submodules and parameters may have been added.
    """
    own = vars(module)
    if note.holds(own) and not (is_new and not note.has_parts_of(own)):
        return note
    return (None if is_new else note.with_values(own)) or ModuleNote(module)


#: The latest plan of each module, by the ``id`` of the module.
_plans: dict[int, ModulePlan] = {}


def _forget(plans: dict[int, ModulePlan], key: int, root: weakref.ref[Module]) -> None:
    """Drops the plan of a dead module."""
    plan = plans.get(key)
    if plan is not None and plan.root is root:  # not a newer one
        del plans[key]


def plan_of(module: Module) -> ModulePlan:
    """Returns the plan of a module with its attributes noted; a new plan if the module has changed."""
    plan = _plans.get(id(module))
    if plan is not None and plan.holds() and plan.note():
        return plan
    _Epoch.watch()
    with _making:  # of threads that meet at a module, one makes the plan, since a plan has a lock
        if _plans.get(id(module)) is not plan:
            return plan_of(module)
        new = _plans[id(module)] = ModulePlan(module, plan)
        return new


_making = threading.RLock()


def idle_plan(function: Any) -> ModulePlan | None:
    """Returns the plan of a module known well, with its attributes noted; None if the module needs another look."""
    plan = _plans.get(id(function))
    return plan if plan is not None and plan.is_idle() else None


def epoch() -> int:
    """Returns the number of modules, buffers and parameters registered anywhere."""
    return _Epoch.number


def has_new_parts(since: int) -> bool:
    """Whether modules, buffers or parameters were registered anywhere since an epoch."""
    return since != _Epoch.number
