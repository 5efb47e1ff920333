"""Objects of users' classes reached by a region, such as caches: noted when forward begins, for errors to name changed objects.

Such objects are not put back: a rerun finds them as forward left them. For a counter or a log this is right. From a cache the
rerun reads more than forward did. Where this shows, by tensors of other shapes, another number of tensors, another sequence of
operators, or an exception, the error names the object. So a forward notes the content of objects among its arguments, in the
closure of its function, of the object to which a method is bound, and in attributes of modules. Objects found unchanged by
several reruns are not looked at again.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module

from .objects import Change, Note, Root, Tag, Walk, changes_between, tag_of, tensors_in

__all__ = ["ObjectNotes", "notes_of"]

#: The largest number of entries of a noted container in a closure.
_MOST_ENTRIES = 64
#: An object found unchanged by this many reruns is not looked at any more.
_LOOKS = 3
#: The number of forwards which search a module for objects: the first forward may make objects.
_SEARCHES = 3

#: The number of levels of closed-over functions to look at.
_DEPTH = 3

_CALLABLES = frozenset({types.FunctionType, types.MethodType, functools.partial})
_OBJECT = Tag.OBJECT
_CONTAINERS = (Tag.SEQUENCE, Tag.DICT, Tag.SET)
_NOTED = (_OBJECT, *_CONTAINERS)


class ObjectNotes:
    """Objects reached by a region, and their content when forward began."""

    __slots__ = ("before", "roots")

    def __init__(self, roots: Sequence[Root]) -> None:
        self.roots: list[Root] = []
        self.before: list[Note] = []
        walk = Walk()
        for root in roots:
            noted = walk.note(root[2])
            if walk.left > 0:
                self.roots.append(root)
                self.before.append(noted)
            else:  # a trainer or the like
                _quiet.silence(root[2])

    def now(self) -> tuple[list[Note], list[torch.Tensor]]:
        """Returns the present content of the objects, and the tensors inside."""
        walk = Walk()
        return [walk.note(value) for _, _, value in self.roots], walk.tensors

    def changes(self) -> list[Change]:
        """Returns the changes since forward began."""
        return list(changes_between(self.roots, self.before, self.now()[0]))

    def since(self) -> tuple[list[Note], list[torch.Tensor]]:
        """Returns the content of the objects when a rerun begins, and the tensors added since forward began."""
        now, tensors = self.now()
        for (_, _, value), one, other in zip(self.roots, self.before, now, strict=True):
            _quiet.note(value, changed=one != other)
        if now == self.before:
            return now, []
        known = set(tensors_in(self.before))
        return now, [tensor for tensor in tensors if id(tensor) not in known]


class _Quiet:
    """Objects found unchanged by reruns, by id; an entry goes with its object."""

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

#: Each searched module, by id: the module, the places of objects inside, and the number of searches.
_searched: dict[int, tuple[weakref.ref[Module], list[tuple[weakref.ref[Module], str]], int]] = {}


def _held_by(module: Module) -> list[Root]:
    """Returns the objects in attributes of a module and its submodules."""
    key = id(module)
    found = _searched.get(key)
    if found is None or found[0]() is not module:
        found = weakref.ref(module, lambda _: _searched.pop(key, None)), [], 0
    if found[2] < _SEARCHES:
        holders = [
            (weakref.ref(inner), name)
            for inner in Module.modules(module)
            if type(inner) not in weakref.ProxyTypes and isinstance(inner._modules, dict)
            for name, value in list(vars(inner).items())
            if tag_of(type(value)) is _OBJECT
        ]
        found = _searched[key] = found[0], holders, found[2] + 1
    if not found[1]:
        return []
    roots, loud = [], []
    for holder in found[1]:
        inner = holder[0]()
        value = None if inner is None else vars(inner).get(holder[1])
        if not _quiet.has(value):
            loud.append(holder)
            if inner is not None and tag_of(type(value)) is _OBJECT:
                roots.append((f"the attribute {{!r}} of {type(inner).__qualname__}", holder[1], value))
    if found[2] == _SEARCHES and len(loud) < len(found[1]):
        found[1][:] = loud
    return roots


def notes_of(function: Any, objects: Sequence[Any]) -> ObjectNotes | None:
    """Notes the content of objects reached by a region; None if there are no objects.

    Args:
        function: The region's function.
        objects: Arguments that are neither tensors nor containers.
    """
    if not objects:  # in the usual case there is nothing to look at
        if type(function) is types.FunctionType:
            if not function.__closure__:
                return None
        elif (known := _searched.get(id(function))) is not None and not known[1] and known[2] == _SEARCHES:
            return None
    roots: list[Root] = []
    for value in objects:
        if isinstance(value, Module):
            roots += _held_by(value)
        elif tag_of(type(value)) in _NOTED and not _quiet.has(value):
            roots.append(("", "", value))
    _look_into_callable(function, roots)
    return ObjectNotes(roots) if roots else None


def _look_into_callable(function: Any, roots: list[Root], depth: int = _DEPTH) -> None:
    kind = type(function)
    if kind is types.MethodType:
        owner, function = function.__self__, function.__func__
        if isinstance(owner, Module):
            roots += _held_by(owner)
        elif tag_of(type(owner)) is _OBJECT and not _quiet.has(owner):
            roots.append(("{}", "self", owner))
        kind = type(function)
    if kind is types.FunctionType:
        if function.__closure__:
            _look_into_closure(function, roots, depth - 1)
    elif isinstance(function, Module):
        roots += _held_by(function)
    elif tag_of(kind) is _OBJECT and not _quiet.has(function):
        roots.append(("the object {}", kind.__qualname__, function))
    elif kind is functools.partial:
        _look_into_callable(function.func, roots, depth)
        for value in (*function.args, *function.keywords.values()):
            if tag_of(type(value)) is _OBJECT:
                roots.append(("a partial's {}", type(value).__qualname__, value))
    else:
        for step in getattr(function, "steps", ()):  # of a segment, which is many functions
            _look_into_callable(step, roots, depth)


def _look_into_closure(function: types.FunctionType, roots: list[Root], depth: int) -> None:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # an unassigned variable
            continue
        tag = tag_of(type(value))
        if tag is _OBJECT:
            if not _quiet.has(value):
                roots.append(("the variable {!r}", name, value))
        elif tag in _CONTAINERS:
            if type(value) is not tuple and len(value) <= _MOST_ENTRIES:  # a tuple cannot change, and may hold a graph
                roots.append(("the variable {!r}", name, value))
        elif tag is Tag.OTHER:
            if isinstance(value, Module):
                roots += _held_by(value)
            elif depth > 0 and type(value) in _CALLABLES:
                _look_into_callable(value, roots, depth)
