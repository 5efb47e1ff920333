"""Giving a tensor that went through somebody's saved-tensor hooks the strides it had.

Hooks that copy (``torch.autograd.graph.save_on_cpu``) bring back a dense tensor, whatever was packed. Plain autograd does not
mind; a function that is called again does: a transposed input takes other kernels than a dense one, with other roundings, and
other tensors saved.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["with_strides"]


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of the same values and gradient edge with the strides asked for.

    Args:
        tensor: The tensor, strided.
        strides: One number a dimension, in elements.
    """
    if tensor.stride() == strides:
        return tensor
    with torch.enable_grad():
        restrided: torch.Tensor = _Restride.apply(tensor, strides)  # type: ignore[no-untyped-call]
    return restrided


class _Restride(torch.autograd.Function):
    """The copy as an operator: its output is no leaf where the input is none, and no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        # Dimensions of stride 0 are expanded ones: one element is stored for all of them.
        stored = tensor
        for dimension, stride in enumerate(strides):
            if stride == 0 and tensor.shape[dimension] > 1:
                stored = stored.narrow(dimension, 0, 1)
        copy = torch.empty_strided(stored.shape, strides, dtype=tensor.dtype, device=tensor.device)
        copy.copy_(stored)  # where windows overlap, the elements that share a place are equal
        return copy.as_strided(tensor.shape, strides)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
