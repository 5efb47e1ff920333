"""Tensors in words, and warnings at a line of the user's program."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import torch

__all__ = ["describe", "describe_kind", "describe_tensor", "dtype_and_shape", "is_of_library", "kind_in_words", "warn_user"]


def describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """Returns metadata in words, as in ``"float32[4, 8] on cpu"``."""
    return f"{_name_of(dtype)}{list(shape)} on {device}"


def describe_kind(tensor: torch.Tensor) -> str:
    """Returns dtype and shape of a tensor in words, as in ``"float32[4, 8]"``; a nested or lazy tensor may have no shape."""
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return f"{_name_of(tensor.dtype)}[uninitialized]"
    return kind_in_words(dtype_and_shape(tensor))


def dtype_and_shape(tensor: torch.Tensor) -> tuple[torch.dtype, Any]:
    """Returns dtype and shape for :func:`kind_in_words`: the words take longer, and are needed in errors alone."""
    return tensor.dtype, tensor.shape if not tensor.is_nested or tensor.layout is not torch.strided else None


def kind_in_words(kind: tuple[torch.dtype, Any]) -> str:
    """Returns dtype and shape in words."""
    dtype, shape = kind
    return f"{_name_of(dtype)}{'[nested]' if shape is None else list(shape)}"


def describe_tensor(tensor: torch.Tensor) -> str:
    """Returns the metadata of a tensor in words, as :func:`describe` does."""
    return f"{describe_kind(tensor)} on {tensor.device}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_of_library(frame: types.FrameType) -> bool:
    """Whether a frame of Python runs code of this package or of torch."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("ckpt_hooks", "torch")


def warn_user(message: str) -> None:
    """Warns at the innermost line of the user's program."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and is_of_library(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
