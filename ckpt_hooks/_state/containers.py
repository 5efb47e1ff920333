"""Containers: arguments taken apart, with a stand-in for each tensor.

Containers are captured with their entries of forward. A rerun gets containers of its own, and sees no later change to the
originals; all else is handed on as the same object.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

#: Types whose values neither are nor hold tensors.
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})


class TensorAt:
    """Stands for a tensor, by its position among the saved tensors."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class Container:
    """Stands for a list, tuple, dict or dataclass, subclasses included."""

    __slots__ = ("entries", "identity", "is_namespace", "kind", "original", "slots", "variables")

    def __init__(self, original: Any) -> None:
        self.original = original  # dropped when the walk is over
        self.kind, self.identity = type(original), id(original)
        # Captured entries of a list or tuple; of a dict, keys with captured values.
        self.entries: list[Any] = []
        # Captured attributes in slots, by their descriptors, and in ``__dict__``, by name.
        self.slots: list[tuple[Any, Any]] = []
        self.variables: list[tuple[str, Any]] = []
        # A dict which is its own ``__dict__``.
        self.is_namespace = False

    def build(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> Any:
        if self.identity in built:
            return built[self.identity]
        kind = self.kind
        made: Any
        if issubclass(kind, tuple):
            made = built[self.identity] = new_frozen(kind, [build(entry, tensors, built) for entry in self.entries])
        else:
            # What a subclass's own ``__new__`` does, which may want arguments, is among the captured attributes.
            new: Any = builtin_of(kind).__new__
            made = built[self.identity] = new(kind)
            if issubclass(kind, list):
                list.extend(made, (build(entry, tensors, built) for entry in self.entries))
            elif issubclass(kind, dict):
                set_item = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
                for key, entry in self.entries:
                    set_item(made, key, build(entry, tensors, built))
        for slot, captured in self.slots:
            slot.__set__(made, build(captured, tensors, built))
        if self.is_namespace:
            object.__setattr__(made, "__dict__", made)
        elif self.variables:
            vars(made).update((name, build(captured, tensors, built)) for name, captured in self.variables)
        return made


def slots_of(kind: type[Any]) -> list[Any]:
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base) or base is defaultdict]
    return [slot for base in bases for slot in vars(base).values() if isinstance(slot, types.MemberDescriptorType)]


def new_frozen(kind: Any, content: list[Any]) -> Any:
    """Returns a tuple or frozenset of a kind, past constructors of subclasses."""
    if hasattr(kind, "n_sequence_fields"):  # torch's named results take a sequence
        return kind(content)
    return frozenset.__new__(kind, content) if issubclass(kind, frozenset) else tuple.__new__(kind, content)


def builtin_of(kind: type[Any]) -> type[Any]:
    """Returns the builtin class from which a class derives, ``object`` if no other."""
    return next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinMethodType))


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
        self.paths: list[str] = []  # of the tensors
        self.objects: list[Any] = []  # objects not taken apart
        self._seen: dict[int, Any] = {}
        self._containers: list[Container] = []

    def finish(self) -> list[int]:
        """Drops the walked containers, which keep their ids until then; returns these ids."""
        for container in self._containers:
            container.original = None
        return [container.identity for container in self._containers]

    def value(self, value: Any, path: str) -> Any:
        """Returns the stand-in for a value at ``path``, a place in the notation of users."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.paths.append(path)
            return TensorAt(len(self.tensors) - 1)
        if type(value) in ATOMS:
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        kind = type(value)
        if issubclass(kind, enum.Enum):  # a singleton
            return value
        if issubclass(kind, list):
            return self._sequence(value, list.__iter__(value), path)
        if issubclass(kind, dict):
            return self._dict(value, path)
        if issubclass(kind, tuple):
            return self._unless_empty(self._sequence(value, tuple.__iter__(value), path))
        # A dataclass which is also a number, a set or an exception has more state than attributes.
        if dataclasses.is_dataclass(kind) and not issubclass(kind, torch.nn.Module) and builtin_of(kind) is object:
            return self._unless_empty(self._with_attributes(self._container(value), path))
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

    def _sequence(self, value: Any, entries: Iterator[Any], path: str) -> Container:
        container = self._container(value)
        for index, entry in enumerate(entries):
            container.entries.append(self.value(entry, f"{path}[{index}]"))
        return self._with_attributes(container, path)

    def _dict(self, value: dict[Any, Any], path: str) -> Container:
        container = self._container(value)
        for key, entry in dict.items(value):
            container.entries.append((key, self.value(entry, f"{path}[{key!r}]")))
        return self._with_attributes(container, path)

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

    def _unless_empty(self, container: Container) -> Any:
        """Returns the original if it is immutable, and nothing in it is rebuilt; else the container."""
        parts = (*container.entries, *(captured for _, captured in (*container.slots, *container.variables)))
        parameters = getattr(container.kind, "__dataclass_params__", None)
        is_mutable = parameters is not None and not parameters.frozen
        if is_mutable or any(type(captured) in (TensorAt, Container, torch.Generator) for captured in parts):
            return container
        self._seen[id(container.original)] = container.original
        return container.original
