"""Reads and refills containers, and takes arguments apart, with a stand-in for each tensor.

Calls only methods of builtin classes, so no code of a subclass runs.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from operator import is_
from typing import Any, NamedTuple

import torch

#: Types of arguments that are neither objects nor hold any. Fewer than ``places.ATOMS``: a slice may hold a tensor.
PLAIN_VALUES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})

#: The values in a place: a dict by name, key or slot, or a list.
Content = Any


class Part(NamedTuple):
    """A kind of place in an object: functions that read and replace its content."""

    read: Callable[[Any, int], Content]  # returns the content after the first ``base`` entries; None if there are fewer
    put: Callable[[Any, int, Content, Content], object]  # replaces the current content after ``base`` entries
    size: Callable[[Any], int] | None = None  # returns the number of entries of a container
    has_end: bool = False  # whether a long container is noted by its length and the entries added later
    is_rebuilt: bool = False  # whether a rerun gets a new container in place of such an argument


def _at_once(*steps: partial[Any]) -> None:
    """Calls functions with no bytecode in between, so that no other thread sees a half-filled container."""
    deque(map(partial.__call__, steps), 0)


def put_keyed(owner: Any, current: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Replaces entries of a dictionary: all at once and in order if the keys differ."""
    kind: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
    if len(current) == len(content) and all(map(is_, current, content)):
        for key, value in content.items():
            if current[key] is not value:
                kind.__setitem__(owner, key, value)
        return
    everything = {**{key: value for key, value in kind.items(owner) if key not in current}, **content}
    _at_once(partial(kind.clear, owner), partial(kind.update, owner, everything))


def read_dict(owner: Any, base: int) -> Content:
    kind: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
    if not base:
        return dict(kind.items(owner))
    size = dict.__len__(owner) - base
    return None if size < 0 else dict([*islice(reversed(dict.items(owner)), size)][::-1])


def _refill(clear: Any, fill: Any) -> Callable[[Any, int, Content, Content], None]:
    def put(owner: Any, _: int, current: Content, content: Content) -> None:
        _at_once(partial(clear, owner), partial(fill, owner, content))

    return put


def put_nothing(owner: Any, _: int, current: Content, content: Content) -> None:
    """Does nothing: the content of such a place cannot change."""


#: How to read and replace entries, by the builtin base class of a container: for a new kind, add a row.
CONTAINERS: dict[type, Part] = {
    dict: Part(
        read_dict,
        lambda owner, _, now, content: put_keyed(owner, now, content),
        dict.__len__,
        has_end=True,
        is_rebuilt=True,
    ),
    list: Part(
        lambda owner, base: list.__getitem__(owner, slice(base, None)) if list.__len__(owner) >= base else None,
        lambda owner, base, now, content: list.__setitem__(owner, slice(base, None), content),
        list.__len__,
        has_end=True,
        is_rebuilt=True,
    ),
    tuple: Part(lambda owner, _: list(tuple.__iter__(owner)), put_nothing, tuple.__len__, is_rebuilt=True),
    set: Part(lambda owner, _: list(set.__iter__(set.copy(owner))), _refill(set.clear, set.update), set.__len__),
    frozenset: Part(lambda owner, _: list(frozenset.__iter__(owner)), put_nothing, frozenset.__len__),
    deque: Part(lambda owner, _: list(deque.__iter__(owner)), _refill(deque.clear, deque.extend), deque.__len__),
}


def _entries_of(kind: type[Any]) -> Part | None:
    """Returns how to read and replace entries of a class's instances; None if they are no containers."""
    return next((part for base, part in CONTAINERS.items() if issubclass(kind, base)), None)


# Bounded, since some programs make new classes all the time. Annotated names, since for mypy a class is not hashable.
entries_of: Callable[[Any], Part | None] = lru_cache(10_000)(_entries_of)


def slots_of(kind: type[Any]) -> list[Any]:
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base) or base is defaultdict]
    return [slot for base in bases for slot in vars(base).values() if isinstance(slot, types.MemberDescriptorType)]


def new_frozen(kind: Any, content: list[Any]) -> Any:
    """Returns a tuple or frozenset of class ``kind``, without calling a subclass's constructor."""
    if hasattr(kind, "n_sequence_fields"):  # a named result of torch, as of ``torch.max``: made from a sequence
        return kind(content)
    return frozenset.__new__(kind, content) if issubclass(kind, frozenset) else tuple.__new__(kind, content)


def builtin_of(kind: type[Any]) -> type[Any]:
    """Returns the builtin class from which a class derives, ``object`` if no other."""
    return next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinMethodType))


def new(kind: Any, maxlen: int | None = None) -> Any:
    """Returns an empty instance of class ``kind``, made by its builtin base class; ``maxlen`` is for a deque."""
    make: Any = builtin_of(kind).__new__
    made = make(kind)
    if maxlen is not None:
        deque.__init__(made, (), maxlen)
    return made


# Arguments taken apart


class TensorAt:
    """Stands for a tensor, by its position among the saved tensors."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class Container:
    """Stands for a container or dataclass, with its content in forward: reruns see no later change."""

    __slots__ = ("entries", "identity", "is_namespace", "kind", "original", "slots", "variables")

    def __init__(self, original: Any) -> None:
        self.original = original  # dropped when the walk is over
        self.kind, self.identity = type(original), id(original)
        self.entries: Content = None  # the stand-ins of the entries; None for a dataclass
        # Stand-ins of attributes: in slots by the slot's descriptor, in ``__dict__`` by name.
        self.slots: list[tuple[Any, Any]] = []
        self.variables: list[tuple[str, Any]] = []
        self.is_namespace = False  # whether it is a dict that is its own ``__dict__``

    def build(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> Any:
        if self.identity in built:
            return built[self.identity]
        kind, entries = self.kind, self.entries
        made: Any
        if issubclass(kind, tuple):
            made = built[self.identity] = new_frozen(kind, [build(entry, tensors, built) for entry in entries])
        else:
            # A subclass's ``__new__`` is not called, since it may require arguments. The attributes that it sets are captured.
            made = built[self.identity] = new(kind)
            if type(entries) is dict:
                entries = {key: build(entry, tensors, built) for key, entry in entries.items()}
            elif entries is not None:
                entries = [build(entry, tensors, built) for entry in entries]
            if issubclass(kind, dict):
                set_item = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
                for key, entry in entries.items():
                    set_item(made, key, entry)
            elif (part := entries_of(kind)) is not None:
                part.put(made, 0, part.read(made, 0), entries)
        for slot, captured in self.slots:
            slot.__set__(made, build(captured, tensors, built))
        if self.is_namespace:
            object.__setattr__(made, "__dict__", made)
        elif self.variables:
            vars(made).update((name, build(captured, tensors, built)) for name, captured in self.variables)
        return made


def build(captured: Any, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> Any:
    kind = type(captured)
    if kind is TensorAt:
        return tensors[captured.position]
    if kind is Container:
        return captured.build(tensors, built)
    return captured


class Capture:
    """A walk over the arguments of a call."""

    __slots__ = ("_containers", "_seen", "objects", "paths", "tensors")

    def __init__(self, tensors: list[torch.Tensor] | None = None) -> None:
        self.tensors: list[torch.Tensor] = [] if tensors is None else tensors
        self.paths: list[str] = []  # the place of each tensor
        self.objects: list[Any] = []  # objects not taken apart
        self._seen: dict[int, Any] = {}
        self._containers: list[Container] = []

    def finish(self) -> list[int]:
        """Drops the originals, whose ids were unique as long as they lived; returns the ids."""
        for container in self._containers:
            container.original = None
        return [container.identity for container in self._containers]

    def value(self, value: Any, path: str) -> Any:
        """Returns the stand-in for a value; errors name its place by ``path``, as in ``args[0]['x']``."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.paths.append(path)
            return TensorAt(len(self.tensors) - 1)
        if type(value) in PLAIN_VALUES:
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        kind = type(value)
        if issubclass(kind, enum.Enum):  # members are singletons, so a rerun gets the same object
            return value
        part = entries_of(kind)
        if part is not None and part.is_rebuilt:
            container = self._container(value)
            content = part.read(value, 0)
            if type(content) is dict:
                container.entries = {key: self.value(entry, f"{path}[{key!r}]") for key, entry in content.items()}
            else:
                container.entries = [self.value(entry, f"{path}[{index}]") for index, entry in enumerate(content)]
            self._with_attributes(container, path)
            return self._container_or_original(container) if part.put is put_nothing else container
        # A dataclass that is also a number, a set or an exception is not taken apart: it has state besides its attributes.
        if dataclasses.is_dataclass(kind) and not issubclass(kind, torch.nn.Module) and builtin_of(kind) is object:
            return self._container_or_original(self._with_attributes(self._container(value), path))
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and kind is not weakref.ProxyType:
            raise TypeError(
                f"{path} is an iterator ({type(value).__name__}), which a checkpointed function cannot take: it can be read "
                "once, and recomputing the function in backward would read it again. Pass a list or a tuple of its items."
            )
        self.objects.append(value)
        return value

    def _container(self, value: Any) -> Container:
        container = self._seen[id(value)] = Container(value)
        self._containers.append(container)
        return container

    def _with_attributes(self, container: Container, path: str) -> Container:
        value = container.original
        try:
            variables = object.__getattribute__(value, "__dict__")
        except AttributeError:
            variables = None
        if variables is value:
            container.is_namespace = True
        elif variables:
            container.variables = [(name, self.value(variable, f"{path}.{name}")) for name, variable in variables.items()]
        for slot in slots_of(container.kind):
            try:
                content = slot.__get__(value)
            except AttributeError:  # an empty slot
                continue
            container.slots.append((slot, self.value(content, f"{path}.{slot.__name__}")))
        return container

    def _container_or_original(self, container: Container) -> Any:
        """Returns the original if it is immutable and a rerun replaces nothing in it; else the container."""
        parts = (*(container.entries or ()), *(captured for _, captured in (*container.slots, *container.variables)))
        parameters = getattr(container.kind, "__dataclass_params__", None)
        is_mutable = parameters is not None and not parameters.frozen
        if is_mutable or any(type(captured) in (TensorAt, Container, torch.Generator) for captured in parts):
            return container
        self._seen[id(container.original)] = container.original
        return container.original
