"""Tensors and other instances in nested lists, tuples and dicts."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in a value in order, then the inner tensors of wrapper subclasses at any depth."""
    if type(value) is torch.Tensor:
        return [value]
    tensors = instances_in(value, torch.Tensor)
    for tensor in tensors:  # including tensors added in the loop
        if type(tensor) is not torch.Tensor:
            tensors += inner_tensors(tensor)
    return tensors
