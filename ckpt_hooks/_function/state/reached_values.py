"""The walk from a function to the values reached besides tensor arguments: variables, modules, objects.

A rerun has to find the state of this as forward found it. Nothing tells in advance which objects a function will touch, so the
walk looks at the places where user code keeps such objects: the module which is the function or has the method, closure cells,
defaults, globals named by the function, arguments of a partial, entries of containers, and attributes and slots of objects. The
walk runs once a region, looks at no value twice, and stops at types which hold nothing of interest.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Module

from .container_contents import ATOMS, VALUES, contents_kind_of, is_atom, slots_and_dict_of
from .limits import LEVELS, LEVELS_OF_OTHERS, MOST_ENTRIES, MOST_ENTRIES_READ, MOST_LOOKS
from .notes import ABSENT, Again, ContentNote
from .tensor_note import TensorNote, Weak, has_history

_BUILTINS = frozenset(vars(builtins))
_MET = (Module, torch.Tensor, torch.Generator)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_FUNCTION = types.FunctionType
#: Types of most values of global names.
_CODE = frozenset({_FUNCTION, types.ModuleType, types.BuiltinFunctionType, type})


class Walk:
    """One walk, with its finds.

    Attributes:
        entries: The variables of the functions.
        functions: Functions outside of modules.
        generators: Random generators outside of modules.
        modules: Root modules, whose insides were not searched.
        roots: Containers and objects to which no other noted value leads, and their notes.
        tensors: Tensors outside of modules.
    """

    __slots__ = (
        "_entries_left",
        "_in_library",
        "_limit",
        "_of_module",
        "_seen",
        "entries",
        "functions",
        "generators",
        "modules",
        "roots",
        "tensors",
    )

    def __init__(self, *, of_module: bool = False) -> None:
        # In attributes of a module, small tensors with a history are copied: forward may add to them in place.
        self.modules: list[Module] = []
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self.functions: list[types.FunctionType] = []
        self.entries: list[Entry] = []
        self.roots: list[tuple[Any, ContentNote]] = []
        self._of_module, self._in_library = of_module, False
        self._limit, self._entries_left = MOST_LOOKS, MOST_ENTRIES_READ
        self._seen: dict[int, Any] = {}

    def look(self, value: Any, levels: int = LEVELS) -> None:
        """Looks at a value to which no noted value leads."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)  # without a note, which takes an alias
        elif self._in_library and isinstance(value, _CONTAINERS):
            part = contents_kind_of(type(value))[0][0]
            content = part.read(value, 0) if levels > 0 and part.size(value) <= MOST_ENTRIES else None
            for one in list(content.values() if type(content) is dict else content or ()):
                self.look(one, levels - 1)
        else:
            if self._in_library and (type(value) in _INTO or contents_kind_of(type(value))[0]):
                levels = LEVELS - 1  # out of the library, that is
            self._limit = len(self._seen) + MOST_LOOKS
            noted = self.note(value, levels)
            self._note_root(value, noted)

    def note(self, value: Any, levels: int = LEVELS) -> Any:
        """Returns a note of a value, and looks ``levels`` levels into the value."""
        kind = type(value)
        if kind in ATOMS:
            return value
        seen = self._seen
        found = seen.get(id(value))
        if found is not None:
            return Again(found) if type(found) is ContentNote else found
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            noted: Any = TensorNote(value, copied=self._of_module)
        elif kind is _FUNCTION or levels <= 0 or len(seen) > self._limit or not self._is_opened(value):
            noted = value if is_atom(value) else _weak(value)
        elif kind is tuple and is_atom(value):
            return value
        else:
            return self._note_content(value, levels - 1)
        seen[id(value)] = noted
        if isinstance(value, Module):
            self.modules.append(value)
        elif kind is torch.Generator:
            self.generators.append(value)
        elif levels > 0 and not isinstance(value, torch.Tensor):
            was, self._in_library = self._in_library, kind not in _INTO
            _INTO.get(kind, Walk._look_into_object)(self, value, levels - 1)
            self._in_library = was
        return noted

    def _is_opened(self, value: Any) -> bool:
        """Whether a walk looks into a value. Notes of a module outlive its regions, and must not hold keys which hold it."""
        if not contents_kind_of(type(value))[0]:
            return False
        return not (self._of_module and isinstance(value, dict)) or all(map(is_atom, list(dict.keys(value))))

    def _note_content(self, value: Any, levels: int) -> ContentNote:
        noted = self._seen[id(value)] = ContentNote(value)
        for part in contents_kind_of(noted.kind)[0]:
            base = 0
            if part.is_entries:
                size = part.size(value)
                if size > MOST_ENTRIES or size > self._entries_left:
                    if not part.has_end:
                        continue
                    base = size
                else:
                    self._entries_left -= size
            content = part.read(value, base)
            if content is None:
                continue
            values: Any = list(content.values()) if type(content) is dict else content
            opened = [at for at, one in enumerate(values) if type(one) not in ATOMS]
            inner = [(at, found) for at in opened if (found := self.note(values[at], levels)) is not values[at]]
            if inner:
                keys = list(content) if type(content) is dict else range(len(values))
                for at, found in inner:
                    content[keys[at]] = found
            noted.parts.append((part, base, content, inner))
            noted.has_history = noted.has_history or any(one.has_history for _, one in inner if type(one) in _WITH_HISTORY)
        return noted

    def _look_into_object(self, value: Any, levels: int) -> None:
        """Looks for modules, tensors and objects of users in an object of a library, which is not put back itself."""
        levels = min(levels, LEVELS_OF_OTHERS)
        for part in slots_and_dict_of(type(value)):
            content: Any = part.read(value, 0)
            for one in content.values():
                self.look(one, levels)

    def _look_into_method(self, method: types.MethodType, levels: int) -> None:
        self.look(method.__self__, levels + 1)
        self.look(method.__func__, levels + 1)

    def _look_into_partial(self, partial: functools.partial[Any], levels: int) -> None:
        self.look(partial.func, levels + 1)
        for value in (*partial.args, *partial.keywords.values()):
            self.look(value, levels)

    def _look_into_function(self, function: types.FunctionType, levels: int) -> None:
        self.functions.append(function)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.look(value, levels)
        if function.__dict__:
            self.look(function.__dict__, levels)
        names, binds, is_library = facts_of_code(function)
        cells = function.__closure__ or _NO_CELLS
        if cells or names:
            namespace = function.__globals__
            values = read(cells, namespace, names)
            contents = [value if type(value) in ATOMS else self._note_variable(value, levels) for value in values[: len(cells)]]
            # Functions that this one calls are not followed: their names are nearly all that a module of code defines.
            contents += [
                self._note_variable(value, levels) if type(value) not in ATOMS and _is_followed(type(value)) else value
                for value in values[len(cells) :]
            ]
            if not is_library:
                self.entries.append((cells, namespace, names, tuple(contents), binds))

    def _note_variable(self, value: Any, levels: int) -> Any:
        """Returns a note of a variable's content: the content itself, but for tensors with a history."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return TensorNote(value) if has_history(value) else value
        self._limit = len(self._seen) + MOST_LOOKS
        noted = self.note(value, levels)
        if type(noted) is ContentNote and noted.has_history and isinstance(value, tuple):
            return noted
        self._note_root(value, noted)
        return value

    def _note_root(self, value: Any, noted: Any) -> None:
        if type(noted) is Again:  # by another way: a rerun finds this one though that way is closed by then
            noted = noted.note
        if type(noted) is ContentNote:
            self.roots.append((value, noted))

    def note_attribute(self, value: Any) -> Any:
        """Returns a note of an attribute of a module; each has as many looks as a walk."""
        self._limit = len(self._seen) + MOST_LOOKS
        return self.note(value)

    def refer_to(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        """Returns a weak reference to a tensor, which leads to an alias once a noted tensor is gone."""
        noted = self._seen.get(id(tensor))
        return noted.tensor if type(noted) is TensorNote else weakref.ref(tensor)


def _is_followed(kind: type) -> bool:
    """Whether a walk looks at a global variable with a value of a kind."""
    return issubclass(kind, _MET) or bool(contents_kind_of(kind)[0])


_INTO: dict[type, Any] = {
    types.FunctionType: Walk._look_into_function,
    types.MethodType: Walk._look_into_method,
    functools.partial: Walk._look_into_partial,
}

#: The variables of one function: cells; a namespace and names in it; notes of the contents; whether the function binds any.
Entry = tuple[tuple[types.CellType, ...], dict[str, Any], tuple[str, ...], tuple[Any, ...], bool]
_NO_CELLS: tuple[types.CellType, ...] = ()
_ALWAYS_ABSENT = repeat(ABSENT)
_content_of: Callable[[types.CellType], Any] = attrgetter("cell_contents")


def read(cells: tuple[types.CellType, ...], namespace: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns the contents of cells, then of names; :data:`ABSENT` for an unassigned variable."""
    if not cells:
        return tuple(map(namespace.get, names, _ALWAYS_ABSENT))
    try:
        return (*map(_content_of, cells), *map(namespace.get, names, _ALWAYS_ABSENT))
    except ValueError:
        return (*map(_content_or_absent, cells), *map(namespace.get, names, _ALWAYS_ABSENT))


def _content_or_absent(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def entry_of(function: Any) -> Entry | None:
    """Returns the variables of a function which reaches nothing, numbers and code apart; None if it has no variables."""
    if type(function) is not _FUNCTION:
        return None
    names, binds, is_library = facts_of_code(function)
    cells, namespace = function.__closure__ or _NO_CELLS, function.__globals__
    if is_library or not (cells or names):  # variables of torch (of a compiler, say) and of this package are their own affair
        return None
    return cells, namespace, names, read(cells, namespace, names), binds


_WITH_HISTORY = frozenset({TensorNote, ContentNote})


def _weak(value: Any) -> Any:
    """Returns a weak reference to an object; the object where there are none, as to an iterator."""
    try:
        return value if isinstance(value, VALUES) else Weak(value)
    except TypeError:
        return value


#: What most functions reach.
NOTHING = Walk()

_BINDING = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})
_NAMING = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})

#: Names of global variables; whether the code binds these, or variables that it closes over; whether it is code of torch or
#: of this package. Code of functions that the function defines counts.
_Facts = tuple[tuple[str, ...], bool, bool]
_known: dict[int, tuple[weakref.ref[types.CodeType], _Facts]] = {}


def facts_of_code(function: types.FunctionType) -> _Facts:
    """Returns facts about the code of a function."""
    code = function.__code__
    key = id(code)
    known = _known.get(key)
    if known is None:
        variables, outer = function.__globals__, code.co_freevars
        package = str(variables.get("__name__")).partition(".")[0]
        steps = [(step.opname, str(step.argval)) for step in _steps_in(code)]
        # By its instructions: ``co_names`` lists the names of attributes too. A built-in's name counts where the file binds it.
        names = dict.fromkeys(name for kind, name in steps if kind in _NAMING and (name in variables or name not in _BUILTINS))
        binds = any(kind in _BINDING and (name in outer or "GLOBAL" in kind) for kind, name in steps)
        facts = tuple(names), binds, package in ("torch", "ckpt_hooks")
        known = _known[key] = weakref.ref(code, lambda _: _known.pop(key, None)), facts
    return known[1]


def has_state(function: Any) -> bool:
    """Whether a user's function, or another callable, closes over something, or names a global variable that is not code."""
    if type(function) is not _FUNCTION:
        return True
    names, binds, is_library = facts_of_code(function)
    if is_library:
        return False
    variables = function.__globals__
    is_bound_to_code = all(type(variables.get(name)) in _CODE for name in names)
    return binds or not (is_bound_to_code and all(map(_is_class, function.__closure__ or ())) and _is_dull(function))


def _is_class(cell: types.CellType) -> bool:
    """Whether a cell is that of ``super()``."""
    try:
        return isinstance(cell.cell_contents, type)
    except ValueError:
        return False


def _steps_in(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _steps_in(constant)


def _is_dull(function: types.FunctionType) -> bool:
    """Whether a function has nothing of interest at hand: a cheap check."""
    for cell in function.__closure__ or ():
        try:
            if type(cell.cell_contents) not in ATOMS:
                return False
        except ValueError:
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *function.__dict__.values())
    if not all(map(is_atom, defaults)):
        return False
    variables = function.__globals__
    for name in facts_of_code(function)[0]:
        kind = type(variables.get(name))
        if kind not in ATOMS and _is_followed(kind):
            return False
    return True


def walk_from(function: Any, objects: Sequence[Any] = ()) -> Walk:
    """Walks from a function; returns :data:`NOTHING` itself if it reaches nothing.

    Args:
        function: The function, or module, method, partial, or other callable.
        objects: Arguments of the call that are neither tensors nor containers.
    """
    if not objects:
        if type(function) is types.FunctionType:
            if _is_dull(function):
                return NOTHING
        elif type(function) in ATOMS:
            return NOTHING
    walk = Walk()
    walk.look(function)
    if type(call := getattr(type(function), "__call__", None)) is _FUNCTION and not isinstance(function, Module):  # noqa: B004
        walk.look(call)
    for value in objects:
        walk.look(value)
    return walk
