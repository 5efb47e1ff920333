"""Tensors and other instances in nested lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ckpt_hooks._torch.pytree import tree_leaves
from ckpt_hooks._torch.tensors import inner_tensors

T = TypeVar("T")


def instances_in(value: Any, kind: type[T]) -> list[T]:
    instances: list[T] = []
    _gather(value, kind, instances)
    return instances


def _gather(value: Any, kind: type[T], instances: list[T]) -> None:
    if isinstance(value, kind):
        instances.append(value)
    elif isinstance(value, (list, tuple)):
        for element in value:
            _gather(element, kind, instances)
    elif isinstance(value, dict):
        for element in value.values():
            _gather(element, kind, instances)


def entries_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the entries of a container, or the fields of a dataclass, by name; None for other values."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module)):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def with_entries(value: Any, entries: Sequence[Any]) -> Any:
    """Returns a value like another, with other entries or fields."""
    if isinstance(value, tuple):
        return value._make(entries) if hasattr(value, "_make") else tuple(entries)
    if isinstance(value, list):
        return list(entries)
    if type(value) is dict:
        return dict(zip(value, entries, strict=True))
    made = copy.copy(value)
    for (name, _), entry in zip(entries_of(value) or (), entries, strict=True):
        if isinstance(value, dict):
            made[name] = entry
        else:
            object.__setattr__(made, name, entry)
    return made


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in a value in order, then the inner tensors of wrapper subclasses at any depth."""
    if type(value) is torch.Tensor:
        return [value]
    tensors = instances_in(value, torch.Tensor)
    for tensor in tensors:  # including tensors added in the loop
        if type(tensor) is not torch.Tensor:
            tensors += inner_tensors(tensor)
    return tensors


def leaf_tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in a value of a user's: in what torch's trees know, in dataclasses, and in dicts of any class."""
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += leaf_tensors_in([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, dict):  # of a class that torch's trees do not know
            tensors += leaf_tensors_in(list(leaf.values()))
    return tensors


def replaced_in(value: Any, kind: type[T], function: Callable[[T], Any]) -> Any:
    """Returns the same lists and tuples with each instance of a class replaced by a function's result."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([replaced_in(element, kind, function) for element in value])
    return value
