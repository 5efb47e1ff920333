"""Objects of users' classes that a region reaches, such as caches: noted when forward begins, for errors to name what changed.

Such objects are not put back for a rerun, which finds them as forward left them. That is as it should be for a counter or a
log. Of a cache the rerun reads more than forward did. Where that shows, by tensors of other shapes, another number of them,
another sequence of operators, an exception, the error says which object it was. So a forward notes, without holding a tensor,
what is in the objects among its arguments, in the closure of its function, in the object that its method is bound to, and in
attributes of modules. Those outside of the arguments that reruns have found unchanged several times are not looked at again.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module

__all__ = ["Change", "ObjectNotes", "changes_between", "notes_of"]

#: How many levels of objects and containers are opened: a cache, its parts, their list, one of that, its attributes.
_DEPTH = 5
#: How many values are noted of one object. What has more outside of the arguments is taken for a trainer or the like.
_MOST = 300
#: How many entries a container has that a function closes over, for it to be looked at.
_MOST_ENTRIES = 64
#: How many reruns have to find an object outside of the arguments unchanged for it not to be looked at any more.
_LOOKS = 3
#: In how many forwards a module is searched for objects: it may get them in its first one.
_SEARCHES = 3

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SEQUENCES = frozenset({list, tuple, deque})
_SETS = frozenset({set, frozenset})
_HEAP_TYPE = 1 << 9  # of ``type.__flags__``: made by a ``class`` statement
_LIBRARIES = frozenset({"torch", "numpy", "threading", "logging", "functools", "weakref", "contextlib", "enum", "typing"})

#: What was noted of a value: a simple value itself, or what kind of thing it is, its id, what tells it from others, its parts.
_Note = Any
_TENSOR, _CONTAINER, _OBJECT, _OTHER = "tensor", "container", "object", "other"

_kinds: dict[type, bool] = {}


def _is_users(kind: type) -> bool:
    """Whether instances of a class are objects that a function may keep things in."""
    known = _kinds.get(kind)
    if known is None:
        if len(_kinds) > 10_000:  # classes that are made anew all the time
            _kinds.clear()
        known = _kinds[kind] = kind is types.SimpleNamespace or (
            bool(kind.__flags__ & _HEAP_TYPE)
            and kind.__dictoffset__ != 0
            and not issubclass(kind, (Module, torch.Tensor, type, list, tuple, dict, set, BaseException))
            and kind.__module__.partition(".")[0] not in _LIBRARIES
        )
    return known


class _Walk:
    """One look at some objects; has what of it was seen."""

    __slots__ = ("left", "seen", "tensors")

    def __init__(self) -> None:
        self.left = 0
        self.seen: set[int] = set()
        self.tensors: list[torch.Tensor] = []

    def root(self, value: Any) -> _Note:
        self.left = _MOST
        return self.note(value, _DEPTH)

    def note(self, value: Any, depth: int) -> _Note:
        kind = type(value)
        if kind in _ATOMS:
            return value
        key = id(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return _TENSOR, key, _kind_of(value), None
        if depth <= 0 or self.left <= 0 or key in self.seen:
            return _OTHER, key, kind.__qualname__, None
        self.seen.add(key)
        if kind in _SEQUENCES:
            return _CONTAINER, key, (kind.__qualname__, len(value)), self._parts(enumerate(value), depth)
        if issubclass(kind, dict):
            return _CONTAINER, key, (kind.__qualname__, len(value)), self._parts(dict.items(value), depth)
        if kind in _SETS:
            return _CONTAINER, key, (kind.__qualname__, len(value)), {}
        if _is_users(kind):
            return _OBJECT, key, kind.__qualname__, self._parts(vars(value).items(), depth)
        return _OTHER, key, kind.__qualname__, None

    def _parts(self, items: Any, depth: int) -> dict[Any, _Note]:
        note, depth, parts = self.note, depth - 1, {}
        try:
            for key, value in items:
                self.left -= 1
                if self.left <= 0:
                    break
                parts[key] = note(value, depth)
        except RuntimeError:  # another thread writes to it
            pass
        return parts


def _kind_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.shape, tensor.dtype
    except RuntimeError:  # a nested tensor has no shape
        return None


#: Where an object is, by a text with a place for its name, and the name, or neither for one among the arguments; the object.
_Root = tuple[str, str, Any]


class Change:
    """One difference between two notes.

    Attributes:
        path: Where, after the name of the object.
        before: What was noted.
        now: What is there now.
        in_object: Whether it is in an object of a user's class, and not in a mere container.
        root: The object.
    """

    __slots__ = ("before", "in_object", "now", "path", "root")

    root: _Root

    def __init__(self, path: str, before: _Note, now: _Note, *, in_object: bool) -> None:
        self.path, self.before, self.now, self.in_object = path, before, now, in_object

    def place(self, argument: Callable[[Any], str | None]) -> str:
        """Returns where it is, in words.

        Args:
            argument: Returns where an object is among the arguments.
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
        """Returns the ids of the tensors that were there."""
        return set(_tensors_in((self.before,)))

    def matters(self) -> bool:
        """Whether an exception of a rerun is put down to it: in an object, and not a counter."""
        return self.in_object and any(type(note) is tuple for note in (self.before, self.now))


_ABSENT = (_OTHER, 0, "nothing", None)


def _changes(before: _Note, now: _Note, path: str, *, in_object: bool) -> Iterator[Change]:
    if before == now:
        return
    if type(before) is tuple and type(now) is tuple and before[:2] == now[:2] and before[0] in (_CONTAINER, _OBJECT):
        in_object = in_object or before[0] == _OBJECT
        if before[0] == _CONTAINER and before[2] != now[2]:
            yield Change(path, before, now, in_object=in_object)
            return
        for key in {**before[3], **now[3]}:
            part = f".{key}" if before[0] == _OBJECT else f"[{key!r}]"
            yield from _changes(before[3].get(key, _ABSENT), now[3].get(key, _ABSENT), path + part, in_object=in_object)
    else:
        yield Change(path, before, now, in_object=in_object)


def _tensors_in(notes: Sequence[_Note]) -> Iterator[int]:
    """Goes through the ids of the tensors in notes."""
    for note in notes:
        if type(note) is tuple:
            if note[0] == _TENSOR:
                yield note[1]
            elif note[3]:
                yield from _tensors_in(list(note[3].values()))


def _in_words(note: _Note) -> str:
    if type(note) is not tuple:
        words = repr(note)
        return words if len(words) <= 40 else f"{words[:40]}..."
    tag, _, what, _ = note
    if tag == _TENSOR:
        return "a tensor" if what is None else f"a {str(what[1]).removeprefix('torch.')}{list(what[0])} tensor"
    if tag == _CONTAINER:
        return f"a {what[0]} of {what[1]} entr{'y' if what[1] == 1 else 'ies'}"
    return what if note is _ABSENT or note == _ABSENT else f"a {what}"


class ObjectNotes:
    """Objects that a region reaches, and what was in them when its forward began."""

    __slots__ = ("before", "roots")

    def __init__(self, roots: Sequence[_Root]) -> None:
        self.roots: list[_Root] = []
        self.before: list[_Note] = []
        walk = _Walk()
        for root in roots:
            noted = walk.root(root[2])
            if walk.left > 0 or not root[0]:
                self.roots.append(root)
                self.before.append(noted)
            else:
                _quiet.silence(root[2])

    def now(self) -> tuple[list[_Note], list[torch.Tensor]]:
        """Returns what is in them now, and the tensors among that."""
        walk = _Walk()
        return [walk.root(value) for _, _, value in self.roots], walk.tensors

    def changes(self) -> list[Change]:
        """Returns what has changed since forward began."""
        return list(changes_between(self, self.before, self.now()[0]))

    def since(self) -> tuple[list[_Note], list[torch.Tensor]]:
        """Returns what is in the objects when a rerun begins, and the tensors that were not there when forward began."""
        now, tensors = self.now()
        for (text, _, value), one, other in zip(self.roots, self.before, now, strict=True):
            if text:
                _quiet.note(value, changed=one != other)
        if now == self.before:
            return now, []
        known = set(_tensors_in(self.before))
        return now, [tensor for tensor in tensors if id(tensor) not in known]


def changes_between(notes: ObjectNotes, before: list[_Note], now: list[_Note]) -> Iterator[Change]:
    """Goes through what has changed between two looks at the same objects."""
    for root, one, other in zip(notes.roots, before, now, strict=True):
        for change in _changes(one, other, "", in_object=False):
            change.root = root
            yield change


class _Quiet:
    """Objects that reruns have found unchanged, by id; an entry goes with its object."""

    def __init__(self) -> None:
        self._looks: dict[int, tuple[weakref.ref[Any], int]] = {}

    def has(self, value: Any) -> bool:
        found = self._looks.get(id(value))
        return found is not None and found[1] >= _LOOKS and found[0]() is value

    def note(self, value: Any, *, changed: bool) -> None:
        found = self._looks.get(id(value))
        self._set(value, 0 if changed else 1 if found is None or found[0]() is not value else found[1] + 1)

    def silence(self, value: Any) -> None:
        self._set(value, _LOOKS)

    def _set(self, value: Any, looks: int) -> None:
        key, table = id(value), self._looks
        found = table.get(key)
        if found is not None and found[0]() is value:
            table[key] = found[0], looks
            return
        try:
            table[key] = weakref.ref(value, lambda _: table.pop(key, None)), looks
        except TypeError:  # a list, say
            return


_quiet = _Quiet()

#: Of each module that was searched, by id: the module, where there are objects in it, and how often it was searched.
_searched: dict[int, tuple[weakref.ref[Module], list[tuple[weakref.ref[Module], str]], int]] = {}


def _held_by(module: Module) -> list[_Root]:
    """Returns the objects in attributes of a module and its submodules."""
    key = id(module)
    found = _searched.get(key)
    if found is None or found[0]() is not module:
        found = weakref.ref(module, lambda _: _searched.pop(key, None)), [], 0
    if found[2] < _SEARCHES:
        holders = [
            (weakref.ref(inner), name)
            for inner in module.modules()
            if isinstance(getattr(inner, "_modules", None), dict)
            for name, value in list(vars(inner).items())
            if _is_users(type(value))
        ]
        found = _searched[key] = found[0], holders, found[2] + 1
    if not found[1]:
        return []
    roots, quiet = [], []
    for holder in found[1]:
        inner = holder[0]()
        value = None if inner is None else vars(inner).get(holder[1])
        if inner is not None and _is_users(type(value)):
            if _quiet.has(value):
                quiet.append(holder)
            else:
                roots.append((f"the attribute {{!r}} of {type(inner).__qualname__}", holder[1], value))
    if quiet and found[2] == _SEARCHES:
        found[1][:] = [holder for holder in found[1] if holder not in quiet]
    return roots


def notes_of(function: Any, objects: Sequence[Any]) -> ObjectNotes | None:
    """Notes what is in the objects that a region reaches; None if it reaches none.

    Args:
        function: The region's function.
        objects: Arguments that are neither tensors nor containers.
    """
    roots: list[_Root] = []
    for value in objects:
        if isinstance(value, Module):
            roots += _held_by(value)
        elif _is_users(type(value)) or type(value) in _SETS or type(value) is deque:
            roots.append(("", "", value))
    _look_into_callable(function, roots)
    return ObjectNotes(roots) if roots else None


def _look_into_callable(function: Any, roots: list[_Root]) -> None:
    kind = type(function)
    if kind is types.MethodType:
        owner, function = function.__self__, function.__func__
        if isinstance(owner, Module):
            roots += _held_by(owner)
        elif _is_users(type(owner)) and not _quiet.has(owner):
            roots.append(("{}", "self", owner))
        kind = type(function)
    if kind is types.FunctionType:
        if function.__closure__:
            _look_into_closure(function, roots)
    elif isinstance(function, Module):
        roots += _held_by(function)
    elif _is_users(kind) and not _quiet.has(function):
        roots.append(("the object {}", kind.__qualname__, function))
    elif kind is functools.partial:
        _look_into_callable(function.func, roots)
        for value in (*function.args, *function.keywords.values()):
            if _is_users(type(value)):
                roots.append(("a partial's {}", type(value).__qualname__, value))
    else:
        for step in getattr(function, "steps", ()):  # of a segment, which is many functions
            _look_into_callable(step, roots)


def _look_into_closure(function: types.FunctionType, roots: list[_Root]) -> None:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            continue
        kind = type(value)
        if kind in _ATOMS or isinstance(value, torch.Tensor) or kind is types.FunctionType:
            continue
        if isinstance(value, Module):
            roots += _held_by(value)
        elif _is_users(kind):
            if not _quiet.has(value):
                roots.append(("the variable {!r}", name, value))
        elif (kind in _SEQUENCES or kind in _SETS or issubclass(kind, dict)) and len(value) <= _MOST_ENTRIES:
            roots.append(("the variable {!r}", name, value))
