"""Copies of tensors that forward may write to, shared by all regions between two writes."""

from __future__ import annotations

import weakref

import torch

from ._refit import copy_of, is_plain, same_layout
from ._torch import past_all_modes

__all__ = ["has_storage", "is_compared", "is_same", "known_copy", "same_bits", "take_copy"]

#: Up to this size tensors on the CPU are compared byte by byte, since batch norm moves no version; its own, which have one
#: dimension, up to the other size.
_COMPARED_BYTES, _COMPARED_BYTES_1D = 1 << 16, 1 << 20


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the elements of a strided tensor are there, which a framework may have freed."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + count) * tensor.element_size() if count else 0
    return tensor.untyped_storage().nbytes() >= needed


def is_compared(tensor: torch.Tensor) -> bool:
    """Whether a tensor is so small that its bytes are compared, if it is on the CPU."""
    return tensor.nbytes <= (_COMPARED_BYTES if tensor.dim() > 1 else _COMPARED_BYTES_1D)


#: An integer of each size: floating-point numbers compare by value, by which -0.0 is 0.0 and not-a-number is not itself.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits. True for two of one class whose bits cannot be had: sparse, quantised, fake."""
    if not (is_plain(one) and is_plain(other)):
        return type(one) is type(other) and one.is_nested is other.is_nested
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return one.is_meta or bool(past_all_modes(one, _same_bits, one, other))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bits_of(one), _bits_of(other))


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.itemsize])


def is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor still equals its copy, if its version says so: other devices than the CPU are not made to wait."""
    if not same_layout(tensor, copy):
        return False
    if not is_compared(copy):
        return True
    return tensor.device.type == "cpu" and same_bits(tensor, copy)


# The latest copy of each tensor, with its version, as long as somebody holds that copy.
_copies: dict[int, tuple[weakref.ref[torch.Tensor], int, weakref.ref[torch.Tensor]]] = {}


def known_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the latest copy of a tensor, if it has not changed since."""
    known = _copies.get(id(tensor))
    if known is not None and known[0]() is tensor and known[1] == tensor._version:
        copy = known[2]()
        if copy is not None and is_same(tensor, copy):
            return copy
    return None


def take_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor, which others get as well as long as it is the latest and somebody holds it."""
    copy, key = copy_of(tensor), id(tensor)
    _copies[key] = weakref.ref(tensor, lambda _: _copies.pop(key, None)), tensor._version, weakref.ref(copy)
    return copy
