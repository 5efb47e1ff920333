"""Contents of objects of users' classes, such as a cache, noted without holding a tensor; and the changes between two notes."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module

__all__ = ["Change", "Note", "Root", "Tag", "Walk", "changes_between", "tag_of", "tensors_in"]

#: How many levels of objects and containers are opened: a cache, its parts, their list, one of that, its attributes.
_DEPTH = 5
#: How many values are noted of one object.
_MOST = 600

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_SIMPLE = frozenset(_ATOMS)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_HEAP_TYPE = 1 << 9  # of ``type.__flags__``: made by a ``class`` statement
_LIBRARIES = frozenset({"torch", "numpy", "threading", "logging", "functools", "weakref", "contextlib", "enum", "typing"})


class Tag(enum.IntEnum):
    """The kind of a noted value."""

    ATOM, TENSOR, SEQUENCE, DICT, SET, OBJECT, OTHER = range(7)


_ATOM, _TENSOR, _SEQUENCE, _DICT, _SET, _OBJECT, _OTHER = Tag
_BRANCHES = (_SEQUENCE, _DICT, _SET, _OBJECT)

#: What was noted of a value: a simple value itself, or its tag, its id, what tells it from others, its parts.
Note = Any

_tags: dict[type, Tag] = {}


def tag_of(kind: type) -> Tag:
    """Returns the tag of instances of a class. Objects are instances of users' classes, in which a function may keep things."""
    tag = _tags.get(kind)
    if tag is None:
        if len(_tags) > 10_000:  # classes that are made anew all the time
            _tags.clear()
        tag = _tags[kind] = _look_at(kind)
    return tag


def _look_at(kind: type) -> Tag:
    if kind in _ATOMS:
        return _ATOM
    if issubclass(kind, torch.Tensor):
        return _TENSOR
    if kind in _SEQUENCES:
        return _SEQUENCE
    if kind in _SETS:
        return _SET
    if issubclass(kind, dict):
        return _DICT
    is_object = kind is types.SimpleNamespace or (
        bool(kind.__flags__ & _HEAP_TYPE)
        and kind.__dictoffset__ != 0
        and not issubclass(kind, (Module, type, list, tuple, set, BaseException))
        and kind.__module__.partition(".")[0] not in _LIBRARIES
    )
    return _OBJECT if is_object else _OTHER


class Walk:
    """One look at some objects.

    Attributes:
        left: The number of values left to note of the present object; 0 after too many values.
        tensors: The tensors met.
    """

    __slots__ = ("_seen", "left", "tensors")

    def __init__(self) -> None:
        self.left = 0
        self.tensors: list[torch.Tensor] = []
        self._seen: set[int] = set()

    def note(self, value: Any) -> Note:
        """Returns the content of an object."""
        self.left = _MOST
        return self._note(value, _DEPTH)

    def _note(self, value: Any, depth: int) -> Note:
        kind = type(value)
        tag = _tags.get(kind)
        if tag is None:
            tag = tag_of(kind)
        if tag is _ATOM:
            return value
        key = id(value)
        if tag is _TENSOR:
            self.tensors.append(value)
            return _TENSOR, key, _kind_of(value), None
        if tag is _OTHER or depth == 0 or key in self._seen:
            return _OTHER, key, kind, None
        self._seen.add(key)
        if tag is _OBJECT:
            return _OBJECT, key, kind, self._parts(vars(value).items(), depth)
        if tag is _SEQUENCE:
            return _SEQUENCE, key, (kind, len(value)), self._parts(enumerate(value), depth, len(value))
        if tag is _SET:
            return _SET, key, (kind, len(value)), {}
        return _DICT, key, (kind, len(value)), self._parts(_items(value), depth)

    def _parts(self, items: Any, depth: int, size: int = -1) -> dict[Any, Note]:
        self.left -= len(items) if size < 0 else size
        if self.left <= 0:
            self.left = 0
            return {}
        depth -= 1
        try:
            return {key: value if _tags.get(type(value)) is _ATOM else self._note(value, depth) for key, value in items}
        except RuntimeError:  # another thread writes to it
            return {}


def _items(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Returns the items of a dict; names stand for keys which are objects, since notes must not hold objects."""
    items = list(dict.items(value))
    if _SIMPLE.issuperset(map(type, value)):
        return items
    return [(f"<key {index}, a {type(key).__qualname__}>", one) for index, (key, one) in enumerate(items)]


def _kind_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.shape, tensor.dtype
    except RuntimeError:  # a nested tensor has no shape
        return None


#: Where an object is, by a text with a place for its name, and the name, or neither for one among the arguments; the object.
Root = tuple[str, str, Any]


class Change:
    """One difference between two notes.

    Attributes:
        path: The place inside the object.
        before: The earlier note.
        now: The present note.
        in_object: Whether the place is in an object of a user's class, and not in a mere container.
        root: The object.
    """

    __slots__ = ("before", "in_object", "now", "path", "root")

    root: Root

    def __init__(self, path: str, before: Note, now: Note, *, in_object: bool) -> None:
        self.path, self.before, self.now, self.in_object = path, before, now, in_object

    def place(self, argument: Callable[[Any], str | None]) -> str:
        """Returns the place of the change in words.

        Args:
            argument: Returns the place of an object among the arguments.
        """
        text, name, value = self.root
        if text:
            return f"{self.path.lstrip('.')} of {text.format(name)}" if self.path else text.format(name)
        return (argument(value) or "an argument") + self.path

    def describe(self, argument: Callable[[Any], str | None]) -> str:
        """Returns the change in words; see :meth:`place`."""
        before, now = _in_words(self.before), _in_words(self.now)
        if before == now:
            now = f"another {now.removeprefix('a ')}"
        return f"{self.place(argument)}: {before} when forward began, {now} now"

    def tensors_before(self) -> set[int]:
        """Returns the ids of the tensors at the place before."""
        return set(tensors_in((self.before,)))

    def matters(self) -> bool:
        """Whether an exception of a rerun is put down to this change: in an object, and no counter."""
        return self.in_object and any(type(note) is tuple and note[0] != _OTHER for note in (self.before, self.now))


_ABSENT = (_OTHER, 0, None, None)


def _changes(before: Note, now: Note, path: str, *, in_object: bool) -> Iterator[Change]:
    if before == now:
        return
    if type(before) is tuple and type(now) is tuple and before[:2] == now[:2] and before[0] in _BRANCHES:
        in_object = in_object or before[0] == _OBJECT
        if before[0] != _OBJECT and before[2] != now[2]:
            yield Change(path, before, now, in_object=in_object)
            return
        for key in {**before[3], **now[3]}:
            part = f".{key}" if before[0] == _OBJECT else f"[{key!r}]"
            yield from _changes(before[3].get(key, _ABSENT), now[3].get(key, _ABSENT), path + part, in_object=in_object)
    else:
        yield Change(path, before, now, in_object=in_object)


def tensors_in(notes: Sequence[Note]) -> Iterator[int]:
    """Yields the ids of the tensors in notes."""
    for note in notes:
        if type(note) is tuple:
            if note[0] == _TENSOR:
                yield note[1]
            elif note[3]:
                yield from tensors_in(list(note[3].values()))


def _in_words(note: Note) -> str:
    if type(note) is not tuple:
        words = repr(note)
        return words if len(words) <= 40 else f"{words[:40]}..."
    tag, _, what, _ = note
    if tag == _TENSOR:
        return "a tensor" if what is None else f"a {str(what[1]).removeprefix('torch.')}{list(what[0])} tensor"
    if tag in (_OBJECT, _OTHER):
        return "nothing" if what is None else f"a {what.__qualname__}"
    return f"a {what[0].__qualname__} of {what[1]} entr{'y' if what[1] == 1 else 'ies'}"


def changes_between(roots: Sequence[Root], before: list[Note], now: list[Note]) -> Iterator[Change]:
    """Yields the changes between two looks at the same objects."""
    for root, one, other in zip(roots, before, now, strict=True):
        for change in _changes(one, other, "", in_object=False):
            change.root = root
            yield change
