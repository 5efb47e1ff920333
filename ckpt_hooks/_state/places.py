"""Kinds of places in objects: variables, slots, cells, globals, dictionaries of modules, positions of iterators.

Calls only methods of builtin classes, so no code of a subclass runs.
"""

from __future__ import annotations

import enum
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from operator import is_
from typing import Any

import torch
from torch.nn import Module

from .containers import CONTAINERS, Content, Part, entries_of, put_keyed, put_nothing, read_dict, slots_of

#: The content of an unassigned variable.
ABSENT: Any = object()

#: Types whose instances hold nothing that can change.
ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice, type, types.ModuleType}
    | {types.BuiltinFunctionType, types.MethodDescriptorType, types.CodeType}
    | {torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format}
    | {type(torch.ops.aten.sin), type(torch.ops.aten.sin.default)}
)

#: Numbers and strings: instances of their subclasses are immutable values too.
VALUES = (int, float, complex, str, bytes)


def is_atom(value: Any) -> bool:
    """Whether a value is immutable with nothing mutable inside, and so needs no note."""
    kind = type(value)
    if kind in ATOMS or isinstance(value, enum.Enum):
        return True
    if kind is types.FunctionType:
        return not value.__closure__ and has_plain_defaults(value)
    return kind in (tuple, frozenset) and all(map(is_atom, value))


def has_plain_defaults(function: types.FunctionType) -> bool:
    """Whether a function has no attributes and only immutable defaults."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return not function.__dict__ and all(map(is_atom, defaults))


def class_attribute(kind: type, name: str) -> Any:
    """Returns an attribute as a class stores it, without calling a descriptor, such as ``partialmethod``."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def num_same(first: Content, other: Content) -> int:
    """Returns how many values of two contents are the same objects; -1 if the keys are not."""
    if len(first) != len(other):
        return -1
    if type(first) is not dict:
        return sum(map(is_, first, other))
    return sum(map(is_, first.values(), other.values())) if all(map(is_, first, other)) else -1  # ``==`` may run user code


def same(first: Content, other: Content) -> bool:
    return num_same(first, other) == len(first)


def _read_slots(slots: Sequence[Any], owner: Any, _: int) -> Content:
    content = {}
    for slot in slots:
        with suppress(AttributeError):  # an empty slot
            content[slot] = slot.__get__(owner)
    return content


def _put_slots(owner: Any, _: int, current: Content, content: Content) -> None:
    for slot in current.keys() - content.keys():
        slot.__delete__(owner)
    for slot, value in content.items():
        slot.__set__(owner, value)


def _vars(owner: Any) -> dict[str, Any]:
    variables = object.__getattribute__(owner, "__dict__")
    return variables if type(variables) is dict and variables is not owner else {}  # a dict may be its own ``__dict__``


VARIABLES = Part(lambda owner, _: dict.copy(_vars(owner)), lambda owner, _, now, values: put_keyed(_vars(owner), now, values))

# Notes of a module outlive regions, so they must not hold dictionary keys through which they would hold the module.


def _holds_nothing(key: Any) -> bool:
    """Whether a key is a value or a leaf tensor, and refers to no module."""
    if isinstance(key, torch.Tensor):  # held, since ``torch.utils.swap_tensors`` refuses tensors with weak references
        has_more = key.__dict__ or key._backward_hooks or key._post_accumulate_grad_hooks
        return type(key) in (torch.Tensor, torch.nn.Parameter) and key.is_leaf and not has_more
    if is_atom(key):
        return True
    is_value = isinstance(key, VALUES) or (isinstance(key, tuple) and all(map(_holds_nothing, tuple.__iter__(key))))
    return is_value and not (type(key).__dictoffset__ and _vars(key))


def _can_be_noted(key: Any) -> bool:
    return _holds_nothing(key) or (bool(type(key).__weakrefoffset__) and not isinstance(key, torch.Tensor))


def _read_weakly(owner: Any, base: int) -> Content:
    # ``weakref.ref`` returns the same reference each time, so that references can be compared by identity, as keys are.
    content = read_dict(owner, base)
    if content is None:
        return None
    return {
        weakref.ref(key) if type(key).__weakrefoffset__ and not _holds_nothing(key) else key: content[key] for key in content
    }


def _put_weakly(owner: Any, base: int, current: Content, content: Content) -> None:
    pairs = [(key() if type(key) is weakref.ref else key, key, value) for key, value in content.items()]
    put_keyed(owner, read_dict(owner, base), {live: value for live, key, value in pairs if live is not None or key is None})


_WEAKLY_KEYED = Part(_read_weakly, _put_weakly, dict.__len__, has_end=True)


def parts_for_tables(value: dict[Any, Any], parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Returns the places of a dict for a module's note, which refers to keys weakly; none if a key refuses."""
    keys = list(dict.keys(value))
    if all(map(is_atom, keys)):
        return parts
    return tuple(_WEAKLY_KEYED if part is CONTAINERS[dict] else part for part in parts) if all(map(_can_be_noted, keys)) else ()


def keys_of(content: Content) -> list[Any]:
    """Returns the keys to which a content refers weakly."""
    return [key() for key in content if type(key) is weakref.ref] if type(content) is dict else []


# ----------------------------------------------------------------------------------------------------- functions and modules


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _put_cells(function: Any, _: int, current: Content, content: Content) -> None:
    for cell, old, new in zip(function.__closure__, current, content, strict=True):
        if new is ABSENT and old is not ABSENT:
            del cell.cell_contents
        elif new is not old:
            cell.cell_contents = new


CELLS = Part(lambda function, _: list(map(_content_of, function.__closure__)), _put_cells)


@lru_cache(10_000)
def globals_part(names: tuple[str, ...]) -> Part:
    def read(function: Any, _: int) -> Content:
        return [function.__globals__.get(name, ABSENT) for name in names]

    def put(function: Any, _: int, current: Content, content: Content) -> None:
        for name, old, new in zip(names, current, content, strict=True):
            if new is ABSENT and old is not ABSENT:
                function.__globals__.pop(name, None)
            elif new is not old:
                function.__globals__[name] = new

    return Part(read, put)


#: Names in ``vars(module)`` that are left alone, since only saving and loading use them.
_LEFT_ALONE = frozenset(name for name in vars(Module()) if "state_dict" in name or name == "_non_persistent_buffers_set")
#: Dictionaries of a module. They are refilled, not replaced, since handles of hooks refer to them weakly.
DICTS = tuple(name for name, value in vars(Module()).items() if isinstance(value, dict) and name not in _LEFT_ALONE)
#: Names in ``vars(module)`` that are not a user's attributes.
MACHINERY = frozenset((*DICTS, *_LEFT_ALONE))


def _read_class(module: Module, _: int) -> Content:
    kind = type(module)
    variables = vars(kind) if kind.__module__ == "torch.nn.utils.parametrize" else {}  # a class made only for this module
    return {"": kind, **{name: attribute for name, attribute in variables.items() if type(attribute) is property}}


def _put_class(module: Module, _: int, current: Content, content: Content) -> None:
    object.__setattr__(module, "__class__", content[""])
    for name in content.keys() - {""}:
        setattr(content[""], name, content[name])


CLASS = Part(_read_class, _put_class)
ATTRIBUTES = Part(
    lambda module, _: {name: value for name, value in module.__dict__.items() if name not in MACHINERY},
    lambda module, _, now, content: put_keyed(module.__dict__, now, content),
)


def _part_of_module(name: str) -> Part:
    return Part(
        lambda module, _: read_dict(module.__dict__[name], 0),
        lambda module, _, now, content: put_keyed(module.__dict__[name], now, content),
    )


#: The dictionaries of a module, as places of the module.
MODULE_DICTS = {name: _part_of_module(name) for name in DICTS}

# ------------------------------------------------------------------------------------------------------------------- objects

_KIND = Part(lambda owner, _: [type(owner)], lambda owner, _, now, content: object.__setattr__(owner, "__class__", content[0]))
_HEAP_TYPE = 1 << 9  # the flag in ``type.__flags__`` of a class made by a ``class`` statement
#: Libraries whose objects are not put back, nor objects of derived classes: modes, locks, loggers, observers.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "ckpt_hooks"}
# Objects of these modules are put back, since they only hold values.
_LIBRARIES -= {"abc", "argparse", "builtins", "collections", "types", "typing"}


def is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def _read_position(iterator: Any, _: int) -> Content:
    state = iterator.__reduce__()
    return [state[2] if len(state) > 2 else ABSENT]  # an exhausted iterator has dropped its items and has no position


def _put_position(iterator: Any, _: int, current: Content, content: Content) -> None:
    if content[0] is not ABSENT:
        iterator.__setstate__(content[0])


#: Iterators that can be set back. Other iterators only go on, such as the iterator of a range since Python 3.12.
_ITERATORS: Any = (*map(type, map(iter, ([], (), "", b""))), type(reversed([])), reversed)
_POSITION = Part(_read_position, _put_position)
#: Iterators that take their items from other iterators, and have no position.
_AROUND_ITERATORS = (zip, map, filter)
_INNER = Part(lambda iterator, _: list(iterator.__reduce__()[1]), put_nothing)


def _attributes_of(kind: Any) -> tuple[Part, ...]:
    """Returns the places of attributes in instances of a class, which may be a library's class."""
    slots = slots_of(kind)
    parts = [VARIABLES] if kind.__dictoffset__ and not issubclass(kind, type) else []
    return (*parts, *([Part(partial(_read_slots, slots), _put_slots)] if slots else []))


def _parts_of(kind: Any) -> tuple[Part, ...]:
    """Returns the places in instances of a class; none if their content is not put back."""
    if issubclass(kind, (torch.Tensor, Module, type, BaseException, *VALUES)):
        return ()
    if kind in _ITERATORS:
        return (_POSITION,)
    if kind in _AROUND_ITERATORS:
        return (_INNER,)
    entries = entries_of(kind)
    is_of_user = kind.__flags__ & _HEAP_TYPE and not any(map(is_of_library, kind.__mro__))
    if entries is None and not (is_of_user or kind is types.SimpleNamespace):
        return ()
    return (*([] if entries is None else [entries]), *([_KIND] if is_of_user else []), *attributes_of(kind))


# Bounded, since some programs make new classes all the time. Annotated names, since for mypy a class is not hashable.
attributes_of: Callable[[Any], tuple[Part, ...]] = lru_cache(10_000)(_attributes_of)
parts_of: Callable[[Any], tuple[Part, ...]] = lru_cache(10_000)(_parts_of)
