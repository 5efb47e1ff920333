"""Parts of containers and objects: how the content of each kind is read, and put back in place.

An object has one part for its entries (a list, dict, set, deque or tuple, subclasses included), one for its ``__dict__``, and
one for its slots. Methods of the builtin base classes read and write, so no code of a subclass runs.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import is_
from typing import Any

import torch
from torch.nn import Module

#: The content of a part: values by name, key or slot, or in order.
Content = dict[Any, Any] | list[Any]


class Part:
    """One part of an object. The base implementation is of immutable entries."""

    #: Whether these are entries, and whether a long container is noted by its length: of its end alone, that is.
    is_entries, has_end = True, False
    size: Any = staticmethod(tuple.__len__)

    def read(self, value: Any, base: int) -> Content | None:
        """Returns the content of an object beyond its first ``base`` entries; None if the object has fewer."""
        return list(tuple.__iter__(value))

    def put(self, value: Any, base: int, now: Any, content: Any) -> None:
        """Replaces the content ``now`` beyond the first ``base`` entries in place."""


class _Frozen(Part):
    size = staticmethod(frozenset.__len__)

    def read(self, value: Any, base: int) -> Content | None:
        return list(frozenset.__iter__(value))


def _at_once(*steps: partial[Any]) -> None:
    """Calls functions with no Python code in between, where another thread would see what is half done."""
    deque(map(partial.__call__, steps), 0)


class _List(Part):
    has_end, size = True, staticmethod(list.__len__)

    def read(self, value: Any, base: int) -> Content | None:
        return list.__getitem__(value, slice(base, None)) if not base or list.__len__(value) >= base else None

    def put(self, value: Any, base: int, now: Any, content: Any) -> None:
        list.__setitem__(value, slice(base, None), content)


class _Deque(Part):
    size = staticmethod(deque.__len__)

    def read(self, value: Any, base: int) -> Content | None:
        return list(deque.__iter__(value))

    def put(self, value: Any, base: int, now: Any, content: Any) -> None:
        _at_once(partial(deque.clear, value), partial(deque.extend, value, content))


class _Set(Part):
    size = staticmethod(set.__len__)

    def read(self, value: Any, base: int) -> Content | None:
        return list(set.__iter__(set.copy(value)))

    def put(self, value: Any, base: int, now: Any, content: Any) -> None:
        set.difference_update(value, now)
        set.update(value, content)


class _Keyed(Part):
    """An object with values under keys, names or slots: read by ``get``, changed in two steps."""

    def set(self, value: Any, key: Any, one: Any) -> None:
        """Binds a key."""
        dict.__setitem__(value, key, one)

    def put(self, value: Any, base: int, now: Any, content: Any) -> None:
        if list(now) != list(content):
            self.refill(value, base, content)
            return
        for key, one in content.items():
            if now[key] is not one:
                self.set(value, key, one)

    def refill(self, value: Any, base: int, content: Any) -> None:
        """Replaces the content at once, each key at the former position, so that an iteration around goes on."""
        everything = {**dict(islice(dict.items(value), base)), **content}
        _at_once(partial(dict.clear, value), partial(dict.update, value, everything))


class _Dict(_Keyed):
    has_end, size = True, staticmethod(dict.__len__)

    def read(self, value: Any, base: int) -> Content | None:
        if not base:
            return dict.copy(value)
        size = dict.__len__(value) - base
        return None if size < 0 else dict([*islice(reversed(dict.items(value)), size)][::-1])


class _Ordered(_Dict):
    def read(self, value: Any, base: int) -> Content | None:
        return dict(OrderedDict.items(value)) if not base else super().read(value, base)

    def refill(self, value: Any, base: int, content: Any) -> None:
        everything = {**dict(islice(OrderedDict.items(value), base)), **content}
        _at_once(partial(OrderedDict.clear, value), partial(OrderedDict.update, value, everything))

    def set(self, value: Any, key: Any, one: Any) -> None:
        OrderedDict.__setitem__(value, key, one)


class _Variables(_Keyed):
    is_entries = False

    def read(self, value: Any, base: int) -> Content | None:
        own = object.__getattribute__(value, "__dict__")
        return {} if own is value or type(own) is not dict else dict.copy(own)  # a dict may be its own ``__dict__``

    def refill(self, value: Any, base: int, content: Any) -> None:
        own = object.__getattribute__(value, "__dict__")
        if own is not value and type(own) is dict:
            _at_once(partial(own.clear), partial(own.update, content))

    def set(self, value: Any, key: Any, one: Any) -> None:
        object.__getattribute__(value, "__dict__")[key] = one


class _Slots(_Keyed):
    is_entries = False

    def __init__(self, slots: list[Any]) -> None:
        self._slots = slots

    def read(self, value: Any, base: int) -> Content | None:
        found = {}
        for slot in self._slots:
            try:
                found[slot] = slot.__get__(value)
            except AttributeError:  # an empty slot
                continue
        return found

    def refill(self, value: Any, base: int, content: Any) -> None:
        for slot in self._slots:
            if slot in content:
                self.set(value, slot, content[slot])
            else:
                with suppress(AttributeError):  # an empty slot
                    slot.__delete__(value)

    def set(self, value: Any, key: Any, one: Any) -> None:
        key.__set__(value, one)


def same(one: Content, other: Content) -> bool:
    """Whether two contents have the same objects under the same keys."""
    if len(one) != len(other):
        return False
    if type(one) is dict:
        return all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))  # type: ignore[union-attr]
    return all(map(is_, one, other))


def differs_in_notes_alone(part: Part, noted: Any, now: Any, inner: list[tuple[int, Any]]) -> bool:
    """Whether two contents of one length have the same keys, and the same values where these are their own notes."""
    if type(noted) is dict:
        # Names may be compared by what they are, which takes half as long; keys may have any ``__eq__``.
        if not (all(map(is_, noted, now)) if part.is_entries else tuple(noted) == tuple(now)):
            return False
        noted, now = noted.values(), now.values()
    return sum(map(is_, noted, now)) == len(noted) - len(inner)


_VARIABLES = _Variables()
_ENTRIES: dict[type, Part] = {
    OrderedDict: _Ordered(),
    dict: _Dict(),
    list: _List(),
    tuple: Part(),
    set: _Set(),
    frozenset: _Frozen(),
    deque: _Deque(),
}

#: Types of values without a content to change.
ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice, type, types.ModuleType}
    | {types.BuiltinFunctionType, types.MethodDescriptorType, types.CodeType}
    | {torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format}
    | {type(torch.ops.aten.sin), type(torch.ops.aten.sin.default)}
)

#: Numbers and strings, of which instances of subclasses are values too.
VALUES = (int, float, complex, str, bytes)

#: Parts of a kind, and whether instances can change.
Parts = tuple[tuple[Part, ...], bool]
_NONE: Parts = ((), False)
_known: dict[type, Parts] = {}

_HEAP_TYPE = 1 << 9  # of ``type.__flags__``: made by a ``class`` statement
#: Libraries whose objects go on in a rerun, and objects of classes that derive from theirs: modes, locks, loggers, observers.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "ckpt_hooks"}
#: Modules of Python's library with classes of which objects hold values, and nothing else.
_LIBRARIES -= {"abc", "argparse", "builtins", "collections", "types", "typing"}


def contents_kind_of(kind: type) -> Parts:
    """Returns the parts of instances of a class; none for objects whose content is their own business."""
    known = _known.get(kind)
    if known is None:
        if len(_known) > 10_000:  # classes that are made anew all the time
            _known.clear()
        known = _known[kind] = _look_at(kind)
    return known


_attributes: dict[type, tuple[Part, ...]] = {}


def slots_and_dict_of(kind: type) -> tuple[Part, ...]:
    """Returns the parts of instances of a class with their attributes, whatever the class."""
    found = _attributes.get(kind)
    if found is None:
        slots = list(_slots_of(kind))
        found = (
            *([_VARIABLES] if kind.__dictoffset__ and not issubclass(kind, type) else []),
            *([_Slots(slots)] if slots else []),
        )
        if len(_attributes) > 10_000:
            _attributes.clear()
        _attributes[kind] = found
    return found


def _look_at(kind: type) -> Parts:
    if issubclass(kind, (torch.Tensor, Module, type, BaseException, *VALUES)):
        return _NONE
    entries = next((part for base, part in _ENTRIES.items() if issubclass(kind, base)), None)
    is_of_user = kind.__flags__ & _HEAP_TYPE and not any(map(_is_of_library, kind.__mro__))
    if entries is None and not (is_of_user or kind is types.SimpleNamespace):
        return _NONE
    parts = (*([] if entries is None else [entries]), *slots_and_dict_of(kind))
    return parts, not issubclass(kind, (tuple, frozenset)) and bool(parts)


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def _slots_of(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        if "__slots__" in vars(base) or base is defaultdict:
            yield from (slot for slot in vars(base).values() if isinstance(slot, types.MemberDescriptorType))


def is_atom(value: Any) -> bool:
    """Whether a value is its own note: an immutable value with nothing mutable inside."""
    kind = type(value)
    if kind in ATOMS or isinstance(value, enum.Enum):
        return True
    if kind is types.FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return not (value.__closure__ or value.__dict__) and all(map(is_atom, defaults))
    return kind in (tuple, frozenset) and all(map(is_atom, value))


def new(kind: type, maxlen: int | None = None) -> Any:
    """Returns an empty instance, made by the builtin base class of a subclass; of a deque, with its largest length."""
    make: Any = next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinMethodType)).__new__
    made = make(kind)
    if maxlen is not None:
        deque.__init__(made, (), maxlen)
    return made
