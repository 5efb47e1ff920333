"""Regions and tensors in words."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# The names of a region and its parents, innermost first. A linked list: with tuples each region would copy all names of its
# parents, and few paths are ever read.
RegionPath = tuple[str, "RegionPath | None"]


@functools.lru_cache(maxsize=16)  # reports ask once per tensor of a region: the cache saves 5% of their time
def format_path(path: RegionPath | None) -> tuple[str, ...]:
    """Returns the names, outermost first."""
    names: list[str] = []
    while path is not None:
        name, path = path
        names.append(name)
    return tuple(reversed(names))


def region_in_words(names: tuple[str, ...]) -> str:
    """Returns words such as ``"region 'outer/inner'"``."""
    return f"region {'/'.join(names)!r}"


def describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """Returns words such as ``"float32[4, 8] on cpu"``."""
    return f"{_name_of(dtype)}{list(shape)} on {device}"


def describe_kind(tensor: torch.Tensor) -> str:
    """Returns words such as ``"float32[4, 8]"``; a nested or lazy tensor may have no shape."""
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return f"{_name_of(tensor.dtype)}[uninitialized]"
    return kind_in_words(dtype_and_shape(tensor))


def dtype_and_shape(tensor: torch.Tensor) -> tuple[torch.dtype, Any]:
    """Returns dtype and shape for :func:`kind_in_words`: words take longer to make, and only errors need them."""
    return tensor.dtype, tensor.shape if not tensor.is_nested or tensor.layout is not torch.strided else None


def kind_in_words(kind: tuple[torch.dtype, Any]) -> str:
    dtype, shape = kind
    return f"{_name_of(dtype)}{'[nested]' if shape is None else list(shape)}"


def describe_tensor(tensor: torch.Tensor) -> str:
    return f"{describe_kind(tensor)} on {tensor.device}"


class _TensorsInWords(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__repr__", "__format__"):
            return describe_tensor(args[0])
        return func(*args, **(kwargs or {}))


def text_of(value: Any) -> str:
    """Returns the ``repr`` of a value, at most 200 characters, with shapes and dtypes in place of the contents of tensors."""
    try:
        with _TensorsInWords():
            text = repr(value)
    except Exception:  # raised by a user's __repr__, and for integers of thousands of digits
        text = object.__repr__(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
