"""How messages call a tensor."""

from __future__ import annotations

import torch

__all__ = ["describe", "describe_kind", "describe_tensor"]


def describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """Returns metadata in words, as in ``"float32[4, 8] on cpu"``."""
    return f"{_name_of(dtype)}{list(shape)} on {device}"


def describe_kind(tensor: torch.Tensor) -> str:
    """Returns dtype and shape of a tensor in words, as in ``"float32[4, 8]"``; nested and lazy ones may have no shape."""
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return f"{_name_of(tensor.dtype)}[uninitialized]"
    has_shape = not tensor.is_nested or tensor.layout is not torch.strided
    return f"{_name_of(tensor.dtype)}{list(tensor.shape) if has_shape else '[nested]'}"


def describe_tensor(tensor: torch.Tensor) -> str:
    """Returns the metadata of a tensor in words, as :func:`describe` does."""
    return f"{describe_kind(tensor)} on {tensor.device}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
