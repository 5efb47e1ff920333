"""The walk from a function to the places and tensors that it reaches besides tensor arguments.

It visits a module or the module of a method, closure cells, defaults, globals that the function names, arguments of a partial,
entries of containers, and attributes and slots of objects; each value once.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
import weakref
from collections.abc import Iterator, Sequence
from contextvars import Context, ContextVar
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ckpt_hooks._torch.checkpoint import COMPOSABLE

from .containers import CONTAINERS, Part
from .notes import Again, Held, Note, Passing, TensorNote, Use, Weak, notes_in
from .places import (
    ABSENT,
    ATOMS,
    CELLS,
    MACHINERY,
    VALUES,
    VARIABLES,
    attributes_of,
    class_attribute,
    globals_part,
    has_plain_defaults,
    is_atom,
    parts_for_tables,
    parts_of,
)

# The README lists the limits beyond which a change goes unseen.

#: Levels of closures, containers and objects to open: enough for a cache, its layers, their list, an entry, its attributes.
LEVELS = 6
#: Levels to search for modules and tensors below an object of a library, whose own content is not put back.
_LEVELS_OF_OTHERS = 3
#: Values to visit from each root: a trainer reaches everything, and a cache of a hundred layers has a few hundred values.
_MOST_LOOKS = 2000
#: Entries up to which a container is noted whole. For a longer list or dict only its length and additions are noted: a copy of
#: a log of 100,000 losses takes as long as a small block.
_MOST_ENTRIES = 1000

_CONTAINERS = tuple(CONTAINERS)
_EMPTY: dict[type, Any] = {dict: {}, list: []}  # empty contents, which notes share


class Walk:
    """A walk and its results; ``owner`` is the number of a module if only attributes of that module are walked."""

    def __init__(self, known: dict[int, TensorNote] | None = None, owner: int = -1, *, passes: bool = False) -> None:
        self._known, self.owner, self._passes, self._in_library = known, owner, passes, False
        self._limit = _MOST_LOOKS
        self._seen: dict[int, Any] = {}
        self._named: dict[int, Note] = {}
        self.modules: list[Module] = []  # modules found, in which the walk does not search
        self.generators: list[torch.Generator] = []
        self.functions: list[Any] = []  # functions, methods and partials
        self.tensors: dict[int, TensorNote] = {}
        self.roots: list[tuple[Any, Note]] = []  # objects that no other note contains, and their notes

    def look(self, value: Any, levels: int = LEVELS) -> None:
        """Visits a value that no note contains."""
        if self._in_library and isinstance(value, _CONTAINERS):
            part = parts_of(type(value))[0]
            if levels > 0 and part.size is not None and part.size(value) <= _MOST_ENTRIES:
                content = part.read(value, 0)
                for inner in list(content.values()) if type(content) is dict else content:
                    self.look(inner, levels - 1)
            return
        if self._in_library and (type(value) in _INTO or parts_of(type(value))):
            levels = LEVELS - 1  # a user's object, which is opened as deep as elsewhere
        self.note_root(value, levels)

    def look_into(self, function: Any) -> None:
        """Visits a callable, and the ``__call__`` of its class."""
        self.look(function)
        if type(function) not in _INTO and not isinstance(function, Module):
            self.look(class_attribute(type(function), "__call__"))

    def note_root(self, value: Any, levels: int = LEVELS) -> Any:
        """Returns a note of a value; a container or object becomes a root, put back even if unbound by then."""
        self._limit = len(self._seen) + _MOST_LOOKS
        note = self.note(value, levels)
        if self.owner < 0 and type(note) in (Note, Again):
            self._add_root(value, note.note if type(note) is Again else note)
        return note

    def _add_root(self, value: Any, note: Note) -> None:
        if not (isinstance(value, tuple) and note.has_history):
            self.roots.append((value, note))
            return
        for part, base, content, keys in note.rows:  # a root is held, and such a tuple would hold graphs (Rule 9)
            current = part.read(value, base)
            for key in [key for key in keys if type(content[key]) is Note]:
                self._add_root(current[key], content[key])

    def note(self, value: Any, levels: int = LEVELS) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        seen = self._seen
        if (known := seen.get(id(value))) is not None:
            return Again(known) if type(known) is Note else known
        if isinstance(value, torch.Tensor):
            note = self._note_tensor(value)
            seen[id(value)] = note
            return note
        parts = parts_of(kind) if levels > 0 and len(seen) <= self._limit else ()
        if self.owner >= 0 and parts and isinstance(value, dict):
            parts = parts_for_tables(value, parts)
        if parts:
            if kind is tuple and is_atom(value):
                return value
            note = seen[id(value)] = Note(value)
            self._add_parts(note, parts, value, levels - 1)
            return note
        note = seen[id(value)] = value if is_atom(value) else self._refer(value)
        if isinstance(value, Module):
            self.modules.append(value)
        elif kind is torch.Generator:
            self.generators.append(value)
        elif levels > 0:
            was, self._in_library = self._in_library, kind not in _INTO
            _INTO.get(kind, Walk._into_object)(self, value, levels - 1)
            self._in_library = was
        return note

    def _refer(self, value: Any) -> Any:
        """Returns a weak reference to an object; if the object, such as an iterator, allows none, its ``id`` or the object."""
        if isinstance(value, (*VALUES, RemovableHandle)):  # holds no other objects
            return value
        try:
            return Weak(value)
        except TypeError:
            return value if self.owner < 0 else Held(value)

    def _note_tensor(self, tensor: torch.Tensor) -> Any:
        if self._passes:
            return Passing(tensor)
        note = None if self._known is None else self._known.get(id(tensor))
        if note is None or not note.holds(tensor):
            use = Use.UNKNOWN if note is None or note.use is Use.READ else note.use
            note = TensorNote(tensor, owner=self.owner)
            note.use = use
        self.tensors[id(tensor)] = note
        return note

    def _add_parts(self, note: Note, parts: Sequence[Part], value: Any, levels: int) -> None:
        for part in parts:
            base = 0
            if part.size is not None:
                size = part.size(value)
                if size > _MOST_ENTRIES:
                    if not part.has_end:
                        continue
                    base = size
            if (content := part.read(value, base)) is not None:
                self.add(note, part, base, content, levels)

    def add(self, note: Note, part: Part, base: int, content: Any, levels: int, opens: Any = None) -> None:
        """Adds a place to a note; ``opens`` tells which types of a function's variables to note, in notes of their own."""
        keys = []
        for key, value in list(content.items()) if type(content) is dict else enumerate(list(content)):
            if type(value) in ATOMS or value is ABSENT or (opens is not None and not opens(type(value))):
                continue
            value_note = self.note(value, levels) if opens is None else self.note_root(value, levels)
            if value_note is not value and (opens is None or type(value_note) is not Weak):
                content[key] = value_note
                keys.append(key)
                note.has_history = note.has_history or (type(value_note) in _WITH_HISTORY and value_note.has_history)
        note.rows.append((part, base, content or _EMPTY[type(content)], tuple(keys)))

    def _into_object(self, value: Any, levels: int) -> None:
        """Looks for modules, tensors and users' objects in an object of a library, whose own content is not put back."""
        for part in attributes_of(type(value)):
            for attribute in part.read(value, 0).values():
                self.look(attribute, min(levels, _LEVELS_OF_OTHERS))

    def _into_method(self, method: types.MethodType, levels: int) -> None:
        self.functions.append(method)
        self.look(method.__self__, levels + 1)
        self.look(method.__func__, levels + 1)

    def _into_property(self, attribute: property, levels: int) -> None:
        self.look(attribute.fget, levels + 1)

    def _into_wrapper(self, method: staticmethod[..., Any] | classmethod[Any, ..., Any], levels: int) -> None:
        self.look(method.__func__, levels + 1)

    def _into_partial(self, function: functools.partial[Any], levels: int) -> None:
        self.functions.append(function)
        self.look(function.func, levels + 1)
        if function.__dict__:
            self.roots.append((function, Note(function)))
            self.add(self.roots[-1][1], VARIABLES, 0, VARIABLES.read(function, 0), levels)
        for value in (*function.args, *function.keywords.values()):
            self.look(value, levels)

    def _into_function(self, function: types.FunctionType, levels: int) -> None:
        if function.__module__ == COMPOSABLE:
            return  # a hook of torch's composable ``checkpoint``: its contexts are around a rerun, not in it
        self.functions.append(function)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.look(value, levels)
        names, is_library = globals_used_by(function)
        note = self._named.get(id(function)) or Note(function)
        if function.__closure__:
            self.add(note, CELLS, 0, CELLS.read(function, 0), levels, lambda kind: True)
        if names:
            # Global names in functions that this function calls are not followed: they lead to nearly everything in a module.
            part = globals_part(names)
            self.add(note, part, 0, part.read(function, 0), levels, _is_followed)
        if is_library:
            return
        for named in (function, *named_functions(function)):
            if id(named) not in self._named:
                # Attributes of functions are noted, as in ``gate.calls``.
                named_note = self._named[id(named)] = note if named is function else Note(named)
                self.add(named_note, VARIABLES, 0, VARIABLES.read(named, 0), LEVELS - 1)
                self.roots.append((named, named_note))


def _is_followed(kind: type) -> bool:
    return issubclass(kind, (Module, torch.Tensor, torch.Generator)) or bool(parts_of(kind))


_WITH_HISTORY = frozenset({TensorNote, Note})
_INTO: dict[type, Any] = {
    types.FunctionType: Walk._into_function,
    types.MethodType: Walk._into_method,
    functools.partial: Walk._into_partial,
    property: Walk._into_property,
    staticmethod: Walk._into_wrapper,
    classmethod: Walk._into_wrapper,
}


def walk_from(function: Any, objects: Sequence[Any] = ()) -> Walk:
    """Walks from a callable, and from arguments that are neither tensors nor containers."""
    walk = Walk()
    walk.look_into(function)
    for value in objects:
        walk.look(value)
    return walk


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def modules_of(root: Module) -> list[Module]:
    """Returns a module, its submodules, and modules in containers and objects there, such as an untrained teacher."""
    modules = dict.fromkeys(Module.modules(root))
    todo, seen, inside = list(modules), set[int](), frozenset(modules)
    has_root = functools.cache(lambda module: root in Module.modules(module))
    while todo:
        variables = vars(todo.pop())
        attributes = {id(attribute): attribute for name, attribute in list(variables.items()) if name not in MACHINERY}
        listed = [hook for name in _HOOKS for hook in list(variables.get(name, {}).values())]
        hooks = {id(hook): hook for hook in listed if not (id(hook) in attributes or _is_of_framework(hook))}
        for value in [candidate for number, candidate in (attributes | hooks).items() if number not in seen]:
            seen.add(id(value))
            # Modules around ``root`` are left out, as in a trainer, which has the whole model, and lists of ``root`` and its
            # siblings. Objects of torch's classes are not opened: the state of FSDP has all modules of a model.
            entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            inner, within = [module for module in entries if isinstance(module, Module)], _modules_within(value)
            if id(value) in hooks:  # a tool that hooks all layers leads to layers outside of ``root``
                kinds = {type(module) for module in within if module in inside}
                is_tool = any(has_root(module) or (type(module) in kinds and module not in inside) for module in within)
                inner = [] if is_tool else within
            elif type(value) in _INTO or root not in within:
                inner += [module for module in within if module not in modules and not has_root(module)]
            new = [module for container in inner for module in Module.modules(container) if module not in modules]
            modules.update(dict.fromkeys(new))
            todo += new
    return list(modules)


def _is_of_framework(hook: Any) -> bool:
    owner = hook.__self__ if isinstance(hook, types.MethodType) else hook
    if isinstance(owner, types.FunctionType):
        return is_internal(owner)
    return type(owner).__module__.partition(".")[0] in ("torch", "ckpt_hooks")


def _modules_within(value: Any) -> list[Module]:
    if isinstance(value, Module):
        return [value]
    if is_atom(value) or isinstance(value, torch.Tensor) or type(value).__module__.partition(".")[0] == "torch":
        return []
    walk = Walk()
    walk.look(value, _LEVELS_OF_OTHERS)
    return walk.modules


def variables_in(context: Context) -> tuple[list[tuple[ContextVar[Any], Any, Any]], list[Any]]:
    """Returns rows of a context variable, its value or a note, and objects the note needs; and the values to walk from."""
    # Containers and objects are noted, not held: Transformers collects the hidden states of all layers in a list in a context
    # variable, and a frame that held the list would be in a cycle (Rule 9). Long lists are held, as notes lack their beginning.
    variables: list[tuple[ContextVar[Any], Any, Any]] = []
    others = []
    for variable, value in context.items():
        note = Walk(passes=True).note(value) if parts_of(type(value)) else value
        if type(note) is not Note:
            variables.append((variable, value, None))
            continue
        inside = list(notes_in([note]))
        if any(base for inner in inside if type(inner) is Note for _, base, *_ in inner.rows):
            variables.append((variable, value, None))
            others.append(value)
        else:
            variables.append((variable, note, [weak() for weak in inside if type(weak) is Weak]))  # held: no note rebuilds them
    return variables, others


# ------------------------------------------------------------------------------------------------------------ names in code

_BUILTINS = frozenset(vars(builtins))
#: Types of global values that are code, without state.
_CODE = frozenset({types.FunctionType, types.ModuleType, types.BuiltinFunctionType, type})
_NAMING = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_facts: dict[int, tuple[weakref.ref[types.CodeType], tuple[tuple[str, ...], bool]]] = {}


def globals_used_by(function: types.FunctionType) -> tuple[tuple[str, ...], bool]:
    """Returns the global names that a function uses, and whether the function is torch's or this package's."""
    code = function.__code__
    key = id(code)
    known = _facts.get(key)
    if known is None:
        variables = function.__globals__
        # Names are read from instructions, since ``co_names`` has attributes too. A built-in's name counts if a global has it.
        named = dict.fromkeys(str(step.argval) for step in _steps_in(code) if step.opname in _NAMING)
        names = tuple(name for name in named if name in variables or name not in _BUILTINS)
        facts = names, is_internal(function)
        known = _facts[key] = weakref.ref(code, lambda _: _facts.pop(key, None)), facts
    return known[1]


def is_internal(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] in ("torch", "ckpt_hooks")


def _steps_in(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _steps_in(constant)


def named_functions(function: types.FunctionType) -> list[types.FunctionType]:
    variables = function.__globals__
    values = [variables.get(name) for name in globals_used_by(function)[0]]
    return [value for value in values if type(value) is types.FunctionType and not is_internal(value)]


#: Attributes that ``functools.update_wrapper`` sets.
_OF_WRAPPERS = frozenset({*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"})


def has_state(function: Any) -> bool:
    """Whether a user's callable leads to more than modules and code: by closures, defaults, global names."""
    if isinstance(function, types.MethodType):
        return not isinstance(function.__self__, (Module, type)) or has_state(function.__func__)
    if type(function) is functools.partial:
        bound = (*function.args, *function.keywords.values())
        is_plain = all(isinstance(arg, Module) or is_atom(arg) for arg in bound) and function.__dict__.keys() <= _OF_WRAPPERS
        return not is_plain or has_state(function.func)
    if type(function) is not types.FunctionType:
        return not isinstance(function, Module) and type(function) not in ATOMS
    names, is_library = globals_used_by(function)
    if is_library:
        return False
    variables = function.__globals__
    if function.__closure__ and not all(isinstance(value, type) for value in CELLS.read(function, 0)):
        return True
    return not has_plain_defaults(function) or any(type(variables.get(name)) not in _CODE for name in names)
