"""Walks over nested values: arguments and results of operators, in lists, tuples and dicts at any depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ckpt_hooks._torch.tensors import inner_tensors

__all__ = ["instances_in", "replaced_in", "tensors_in"]

T = TypeVar("T")


def instances_in(value: Any, kind: type[T]) -> list[T]:
    """Returns the instances of a class in a value, in order."""
    found: list[T] = []
    _gather(value, kind, found)
    return found


def _gather(value: Any, kind: type[T], found: list[T]) -> None:
    if isinstance(value, kind):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _gather(one, kind, found)
    elif isinstance(value, dict):
        for one in value.values():
            _gather(one, kind, found)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in a value in order, then the inner tensors of wrapper subclasses at any depth."""
    if type(value) is torch.Tensor:
        return [value]
    found = instances_in(value, torch.Tensor)
    for tensor in found:  # including tensors added in the loop
        if type(tensor) is not torch.Tensor:
            found += inner_tensors(tensor)
    return found


def replaced_in(value: Any, kind: type[T], function: Callable[[T], Any]) -> Any:
    """Returns the same lists and tuples with each instance of a class replaced by a function's result."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([replaced_in(one, kind, function) for one in value])
    return value
