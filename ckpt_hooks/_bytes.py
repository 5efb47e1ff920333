"""Whether two small tensors hold the same bytes, at a fifth of the cost of ``torch.equal``; and bytes copied likewise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["memcmp", "memcpy", "same_bits", "same_bytes"]


def _load(name: str, result: Any) -> Callable[[int, int, int], Any] | None:
    try:
        function = getattr(ctypes.PyDLL(None), name)
    except (AttributeError, OSError, TypeError):  # no C library to be had by that name
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = result
    loaded: Callable[[int, int, int], Any] = function
    return loaded


#: The C functions: two addresses and a number of bytes; None where there is no C library to be had.
memcmp: Any = _load("memcmp", ctypes.c_int)
memcpy: Any = _load("memcpy", None)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype on the CPU are equal: 0.4 us for the state of a generator, not 2.5.

    Tensors that are not contiguous are compared by value, so that not-a-number makes them differ.
    """
    if memcmp is None or not (one.is_contiguous() and other.is_contiguous()):
        return torch.equal(one, other)
    return bool(memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of any kind hold the same bits; True for those of kinds whose bits cannot be had."""
    if not (type(one) is type(other) is torch.Tensor and one.layout is other.layout is torch.strided):
        return type(one) is type(other)
    if one.is_nested or other.is_nested:
        return one.is_nested is other.is_nested
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    try:
        return torch.equal(_bits_of(one), _bits_of(other))
    except (NotImplementedError, RuntimeError):  # quantised
        return True


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
