"""Where the state of a module is: buffers, attributes that are tensors, containers and objects that hold some.

That is found once for a module and its submodules, and used as long as it has the same ones. It is kept in the module's
``__dict__``, so that it dies with the module; it refers to modules weakly, and it copies and pickles as None.
"""

from __future__ import annotations

import functools
import operator
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ._reach import Search

__all__ = ["PLAN", "ModulePlan", "Slot", "idle_plan", "plan_of"]

#: The attribute of a module that has its plan.
PLAN = "_ckpt_hooks_plan"
#: In how many forwards, and one more, a module is looked at in any case: they may build caches, and add attributes.
_LOOKS = 3
#: Levels of containers and objects that are opened below an attribute.
_DEPTH = 2

_MACHINERY = frozenset(vars(Module())) | {PLAN}
_NUMBERS = frozenset({int, float, complex, bool})
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
_MUTABLE = (dict, OrderedDict, defaultdict, list, set, deque)

#: A name in a module, as the dict that holds it and the key.
Slot = tuple[dict[str, Any], str]


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


class _Simple:
    """Attributes of one module that are numbers, and may become tensors."""

    __slots__ = ("_get", "_number")

    def __init__(self, number: int, own: dict[str, Any]) -> None:
        names = [name for name, value in list(own.items()) if type(value) in _NUMBERS]
        self._number = number
        self._get = operator.itemgetter("training", *names, "training")  # of one name alone it would answer no tuple

    def have_turned(self, modules: list[Module]) -> bool:
        """Whether one of them is a tensor by now, or gone."""
        try:
            values = self._get(modules[self._number].__dict__)
        except KeyError:
            return True
        return not _NUMBERS.issuperset(map(type, values)) and any(isinstance(value, torch.Tensor) for value in values)


class ModulePlan:
    """What there is to capture of one module.

    Attributes:
        is_lazy: Whether there are modules in it that make their parameters in their first forward.
        parameters: The module and its submodules as far as they have parameters of their own; see :mod:`ckpt_hooks._weights`.
        lock: Held by a recompute that rewinds the module.
    """

    __slots__ = (
        "_children",
        "_epoch",
        "_holders",
        "_is_looked_at",
        "_looks_at_frozen",
        "_modules",
        "_names",
        "_own_size",
        "_parameter_count",
        "_root",
        "_scripted",
        "_simple",
        "_size",
        "_stateless",
        "_used",
        "_written",
        "is_lazy",
        "lock",
        "parameters",
    )

    def __init__(self, root: Module, before: ModulePlan | None = None) -> None:
        self._root = weakref.ref(root)
        everything = _all_modules(root)
        modules = [module for module in everything if type(module._modules) is dict]
        self._modules = [weakref.ref(module) for module in modules]
        self._children = list(map(_reference_to, _children_of(modules)))
        # What TorchScript made has its tensors elsewhere; they are taken as they are.
        self._scripted = [weakref.ref(module) for module in everything if type(module._modules) is not dict]
        owners = [list(vars(module).items()) for module in modules]  # other threads may add a plan of theirs meanwhile
        names = [(number, name, value) for number, own in enumerate(owners) for name, value in own]
        names = [entry for entry in names if entry[1] not in _MACHINERY]
        #: Attributes that are tensors, or None and may become one: number of the module, and name.
        self._names = [(n, name) for n, name, value in names if value is None or isinstance(value, torch.Tensor)]
        #: Attributes that hold tensors or generators, or may come to hold some.
        self._holders = [(n, name) for n, name, value in names if type(value) in _MUTABLE or _holds_something(value)]
        #: Attributes that are numbers, and may become tensors.
        simple = {n for n, _, value in names if type(value) in _NUMBERS}
        self._simple = [_Simple(n, vars(modules[n])) for n in sorted(simple)]
        self._size = sum(map(len, map(vars, modules))) + (PLAN not in vars(root))
        self._own_size = len(vars(root)) + (PLAN not in vars(root))
        self.is_lazy = any(isinstance(module, LazyModuleMixin) and "_initialize_hook" in vars(module) for module in modules)
        self._epoch, self._used, self._is_looked_at = _Epoch.number, 0, True
        self._stateless = False
        #: Parameters without gradients that forward was seen to write to: number of the module, and name.
        self._written: set[tuple[int, str]] = set()
        #: In how many forwards parameters without gradients were looked at, a copy of each: not anew for each new attribute.
        self._looks_at_frozen: int = 0 if before is None or before._written else before._looks_at_frozen
        self.parameters = _parameters_of(modules)
        self._parameter_count = _count_parameters(modules)
        self.lock = threading.RLock()

    def is_idle(self, root: Module) -> bool:
        """Whether there is nothing in a module that forward might change, as far as can be said without looking."""
        return (
            self._stateless
            and self._epoch == _Epoch.number
            and self._used > _LOOKS
            and self._own_size == len(root.__dict__)
            and self._root() is root
        )

    def holds(self, root: Module) -> bool:
        """Whether this is the plan of a module that has the submodules and attributes that it had.

        To look at all of them costs a microsecond for every ten submodules. So it is done in the first few forwards, then
        whenever a module, buffer or parameter was registered anywhere, and always for a module that has state.
        """
        if self._root() is not root:
            return False
        if self.is_idle(root):
            return True
        is_new = self._epoch != _Epoch.number or self._used < _LOOKS
        self._epoch, self._is_looked_at = _Epoch.number, True
        modules = self._alive()
        children = _children_of(modules)
        if (
            len(modules) != len(self._modules)
            or sum(map(len, map(vars, modules))) != self._size
            or len(children) != len(self._children)
            or any(reference() is not child for reference, child in zip(self._children, children, strict=True))
            or any(simple.have_turned(modules) for simple in self._simple)
        ):
            return False
        if is_new:
            self.parameters = _parameters_of(modules)
            self._parameter_count = _count_parameters(modules)
        self._stateless = not (
            self._names
            or self._written
            or self._scripted
            or self.is_lazy
            or any(module._buffers for module in modules)
            or next(self._held(modules), None) is not None
        )
        return True

    def _alive(self) -> list[Module]:
        return [module for reference in self._modules if (module := reference()) is not None]

    def has_run(self) -> None:
        """Tells that a forward has ended. Regions in regions begin several before that, which count as one."""
        if self._is_looked_at:
            self._is_looked_at = False
            self._used += 1
            self._looks_at_frozen += 1

    def note_written(self, number: int, name: str) -> None:
        """Tells of a parameter without gradients that forward has written to: number of the module, and name."""
        self._written.add((number, name))
        self._stateless = False

    def _held(self, modules: list[Module]) -> Iterator[Any]:
        """Goes through tensors and generators in containers and objects."""
        for number, name in self._holders:
            search = Search()
            search.look(vars(modules[number]).get(name), _DEPTH + 1)
            yield from search.tensors
            yield from search.generators

    def contents(self) -> tuple[list[Slot], list[torch.Tensor], list[torch.Generator]]:
        """Returns names that may be bound to something else, tensors elsewhere, and generators."""
        modules = self._alive()
        if self._stateless or len(modules) != len(self._modules):
            return [], [], []
        slots: list[Slot] = [(module._buffers, name) for module in modules for name in module._buffers]
        slots += [(vars(modules[number]), name) for number, name in self._names]
        slots += [(modules[number]._parameters, name) for number, name in self._written]
        held = list(self._held(modules))
        tensors = [value for value in held if isinstance(value, torch.Tensor)]
        for reference in self._scripted:
            scripted = reference()
            tensors += [] if scripted is None else scripted.buffers(recurse=False)
        return slots, tensors, [value for value in held if isinstance(value, torch.Generator)]

    def has_new_parts(self) -> bool:
        """Whether modules or parameters have been added since the module was last looked at."""
        if self._epoch == _Epoch.number:
            return False
        modules = self._alive()
        return len(_children_of(modules)) != len(self._children) or _count_parameters(modules) != self._parameter_count

    def has_written(self) -> bool:
        """Whether parameters are among what forward changes."""
        return bool(self._written)

    def frozen(self) -> list[tuple[Callable[[], None], Slot]]:
        """Returns parameters without gradients, as long as the module is new, and what to call if forward writes to one.

        Most never change, and some modules keep their state in such: the codes of a quantiser, the averages of a teacher.
        """
        if self._looks_at_frozen > _LOOKS:
            return []
        modules = self._alive()
        return [
            (functools.partial(self.note_written, number, name), (module._parameters, name))
            for number, module in enumerate(modules)
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad and (number, name) not in self._written
        ]

    def namespaces(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns where names of a module and its submodules are bound to objects, and a copy of each as it is now.

        None of a module that has no state, once it is known well enough.
        """
        if self._used > _LOOKS and self._stateless:
            return []
        modules = self._alive()
        return [(owner, owner.copy()) for module in modules for owner in (vars(module), module._buffers)]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _reference_to(module: Module) -> Callable[[], Module | None]:
    """Returns a weak reference to a module; to a proxy of one, which is registered like a module, a strong one."""
    return (lambda: module) if type(module) in weakref.ProxyTypes else weakref.ref(module)


def _children_of(modules: list[Module]) -> list[Module]:
    return [child for module in modules for child in module._modules.values() if child is not None]


def _count_parameters(modules: list[Module]) -> int:
    return sum(parameter is not None for module in modules for parameter in module._parameters.values())


def _parameters_of(modules: list[Module]) -> tuple[list[weakref.ref[Module]], tuple[()]]:
    return [weakref.ref(module) for module in modules if module._parameters], ()


def _all_modules(root: Module) -> list[Module]:
    """Returns a module, those in it, and those in containers and objects among its attributes, such as an untrained teacher.

    Objects of torch's own classes are not looked into: the state of FSDP has all modules of a model. Neither is a module taken
    that has this one in it, as a trainer has the whole model, nor one from among which this one is, as of all layers.
    """
    found = dict.fromkeys(Module.modules(root))
    todo, seen = list(found), set[int]()
    has_root = functools.cache(lambda module: root in Module.modules(module))
    while todo:
        attributes = [value for name, value in list(vars(todo.pop()).items()) if name not in _MACHINERY]
        for value in attributes:
            if id(value) in seen:
                continue
            seen.add(id(value))
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
    search = Search()
    search.look(value, _DEPTH + 1)
    return search.modules


def _holds_something(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, Module)):
        return False
    if type(value) is tuple and not value:  # may be bound to a filled one
        return True
    search = Search()
    search.look(value, _DEPTH + 1)
    return bool(search.tensors or search.generators)


def plan_of(module: Module) -> ModulePlan:
    """Returns the plan of a module, a new one where it has changed."""
    plan: ModulePlan | None = module.__dict__.get(PLAN)
    if plan is None or not plan.holds(module):
        _Epoch.watch()
        plan = module.__dict__[PLAN] = ModulePlan(module, plan)
    return plan


def idle_plan(function: Any) -> ModulePlan | None:
    """Returns the plan of a function that is a module, which was looked at before and has no state to capture."""
    if not isinstance(function, Module):
        return None
    plan: ModulePlan | None = function.__dict__.get(PLAN)
    return plan if plan is not None and plan.is_idle(function) else None
