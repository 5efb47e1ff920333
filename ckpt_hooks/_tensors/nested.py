"""Nested values: the tensors in results of operators, and in users' values of any structure, which can be built anew."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._torch.pytree import tree_leaves
from ckpt_hooks._torch.tensors import inner_tensors

# Results and arguments of operators: lists, tuples and dicts


def outer_tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in a value in order, without the inner tensors of wrapper subclasses."""
    tensors: list[torch.Tensor] = []
    _gather(value, tensors)
    return tensors


def _gather(value: Any, tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (list, tuple)):
        for element in value:
            _gather(element, tensors)
    elif isinstance(value, dict):
        for element in value.values():
            _gather(element, tensors)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in a value in order, then the inner tensors of wrapper subclasses at any depth."""
    if type(value) is torch.Tensor:
        return [value]
    tensors = outer_tensors_in(value)
    for tensor in tensors:  # including tensors added in the loop
        if type(tensor) is not torch.Tensor:
            tensors += inner_tensors(tensor)
    return tensors


# Users' values: dataclasses and other containers too


def named_entries(value: Any) -> list[tuple[Any, Any]] | None:
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
    for (name, _), entry in zip(named_entries(value) or (), entries, strict=True):
        if isinstance(value, dict):
            made[name] = entry
        else:
            object.__setattr__(made, name, entry)
    return made


def leaves_of(value: Any) -> list[Any]:
    """Returns the entries of a value at any depth that are neither containers nor dataclasses."""
    entries = named_entries(value)
    return [value] if entries is None else [leaf for _, entry in entries for leaf in leaves_of(entry)]


def leaf_tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in a user's value: in containers that torch's pytree knows, in dataclasses, and in any dict."""
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += leaf_tensors_in([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, dict):  # of a class that torch's pytree does not know
            tensors += leaf_tensors_in(list(leaf.values()))
    return tensors
