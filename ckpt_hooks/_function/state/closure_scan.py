"""The closure scan: modules, tensors, random generators and functions which a function reaches besides its arguments.

A rerun has to find the state of these as forward found it. Nothing tells in advance which objects a function will touch, so the
scan looks at the places where user code keeps such objects: the module which is the function or has the method, closure cells,
defaults, globals named by the function, arguments of a partial, and containers and attributes of plain objects there, a few
levels deep. The scan runs once a region, so it looks at no value twice, and stops at types which hold nothing of interest.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module

__all__ = ["NOTHING", "Reached", "Search", "facts_of", "has_variables", "scan_closure"]

#: How many levels of closures, containers and objects are opened.
_DEPTH = 4
#: How many values one search looks at.
_MOST_LOOKS = 2000
#: Containers with more entries than this are data, not structure.
_MOST = 1000

# Types whose values hold nothing of interest.
_DULL = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type, type(Ellipsis), types.ModuleType}
    | {types.BuiltinFunctionType, types.MethodDescriptorType, types.CodeType, torch.dtype, torch.device, torch.Size}
    | {torch.layout, torch.memory_format, type(torch.ops.aten.sin), type(torch.ops.aten.sin.default)}
)
_BUILTINS = frozenset(vars(builtins))
_SEQUENCES = frozenset({list, tuple, set, frozenset, deque})
_DICTS = frozenset({dict, OrderedDict, defaultdict})


class Reached:
    """The finds of a closure scan.

    Attributes:
        modules: Root modules, whose insides were not searched.
        tensors: Tensors outside of modules.
        generators: Random generators outside of modules.
        functions: Functions outside of modules, the scanned function included.
    """

    __slots__ = ("functions", "generators", "modules", "tensors")

    def __init__(
        self,
        modules: Sequence[Module],
        tensors: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator],
        functions: Sequence[types.FunctionType] = (),
    ) -> None:
        self.modules = modules
        self.tensors = tensors
        self.generators = generators
        self.functions = functions


class Search:
    """A search with its finds, and the values seen."""

    __slots__ = ("_seen", "functions", "generators", "modules", "tensors")

    def __init__(self) -> None:
        self.modules: list[Module] = []
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self.functions: list[types.FunctionType] = []
        self._seen: set[int] = set()

    def look(self, value: Any, depth: int) -> None:
        """Looks at a value, and ``depth`` levels into the value."""
        kind = type(value)
        if kind in _DULL or id(value) in self._seen or len(self._seen) > _MOST_LOOKS:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, Module):
            self.modules.append(value)
        elif kind is torch.Generator:
            self.generators.append(value)
        elif depth > 0:
            if kind is types.FunctionType:
                self._look_into_function(value, depth - 1)
            elif kind is types.MethodType:
                self.look(value.__self__, depth)
                self.look(value.__func__, depth)
            elif kind is functools.partial:
                self.look(value.func, depth)
                self._look_at_all((*value.args, *value.keywords.values()), depth - 1)
            elif kind in _SEQUENCES:
                self._look_at_all(value, depth - 1)
            elif kind in _DICTS:
                self._look_at_all(value.values(), depth - 1)
            else:
                self._look_into_object(value, depth - 1)

    def _look_at_all(self, values: Any, depth: int) -> None:
        if len(values) <= _MOST:
            for value in tuple(values):
                self.look(value, depth)

    def _look_into_object(self, value: Any, depth: int) -> None:
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            attributes = None
        if type(attributes) is dict and not isinstance(value, type):
            self._look_at_all(attributes.values(), depth)
        for kind in type(value).__mro__:
            for member in vars(kind).values():
                if type(member) is types.MemberDescriptorType:  # a slot
                    try:
                        self.look(member.__get__(value), depth)
                    except AttributeError:
                        continue

    def _look_into_function(self, function: types.FunctionType, depth: int) -> None:
        self.functions.append(function)
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
            self.look(value, depth)
        if function.__defaults__:
            self._look_at_all(function.__defaults__, depth)
        if function.__kwdefaults__:
            self._look_at_all(function.__kwdefaults__.values(), depth)
        # Functions that this one calls are not followed: their names are nearly all that a module of code defines.
        variables = function.__globals__
        for name in facts_of(function)[0]:
            value = variables.get(name)
            if issubclass(type(value), (Module, torch.Tensor, torch.Generator)):
                self.look(value, 1)


#: What most functions reach.
NOTHING = Reached((), (), ())

_BINDING = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})
_NAMING = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})

#: Names of global variables; whether the code binds these, or variables that it closes over; whether it is code of torch or
#: of this package. Code of functions that the function defines counts.
_Facts = tuple[tuple[str, ...], bool, bool]
_known: dict[int, tuple[weakref.ref[types.CodeType], _Facts]] = {}


def facts_of(function: types.FunctionType) -> _Facts:
    """Returns facts about the code of a function.

    Names of attributes are left out, though code objects list these along with names of variables. Names of Python's built-in
    functions are left out unless the file has a variable of that name.
    """
    code = function.__code__
    key = id(code)
    known = _known.get(key)
    if known is None:
        variables, outer = function.__globals__, code.co_freevars
        package = str(variables.get("__name__")).partition(".")[0]
        steps = [(step.opname, str(step.argval)) for step in _steps_in(code)]
        names = dict.fromkeys(name for kind, name in steps if kind in _NAMING and (name in variables or name not in _BUILTINS))
        binds = any(kind in _BINDING and (name in outer or "GLOBAL" in kind) for kind, name in steps)
        facts = tuple(names), binds, package in ("torch", "ckpt_hooks")
        known = _known[key] = weakref.ref(code, lambda _: _known.pop(key, None)), facts
    return known[1]


def has_variables(function: types.FunctionType) -> bool:
    """Whether a user's function has closed-over or global variables; False for functions of torch and of this package."""
    names, _, is_library = facts_of(function)
    return not is_library and bool(names or function.__closure__)


def _steps_in(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _steps_in(constant)


def _is_dull(function: types.FunctionType) -> bool:
    """Whether a function has nothing of interest at hand: a cheap check."""
    for cell in function.__closure__ or ():
        try:
            if type(cell.cell_contents) not in _DULL:
                return False
        except ValueError:
            continue
    if function.__defaults__ or function.__kwdefaults__:
        return False
    variables = function.__globals__
    for name in facts_of(function)[0]:
        value = variables.get(name)
        if type(value) not in _DULL and issubclass(type(value), (Module, torch.Tensor, torch.Generator)):
            return False
    return True


def scan_closure(function: Any, objects: Sequence[Any] = ()) -> Reached:
    """Scans a function for state; returns :data:`NOTHING` itself if there is none.

    Args:
        function: The function, or module, method, partial, or other callable.
        objects: Arguments of the call that are neither tensors nor containers.
    """
    if not objects:
        if type(function) is types.FunctionType:
            if _is_dull(function):
                return NOTHING
        elif isinstance(function, Module):
            return Reached((function,), (), ())
        elif type(function) in _DULL:
            return NOTHING
    search = Search()
    search.look(function, _DEPTH)
    for value in objects:
        search.look(value, _DEPTH)
    return Reached(search.modules, search.tensors, search.generators, search.functions)
