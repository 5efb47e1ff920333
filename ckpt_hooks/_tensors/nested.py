"""Tensors in nested lists, tuples and dicts."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_hooks._torch.tensors import inner_tensors


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
