"""Copies of tensors to which forward may write, shared by all regions between two writes."""

from __future__ import annotations

import weakref

import torch

from ckpt_hooks._tensors.copies import copy_of, same_bits, same_layout

__all__ = ["has_storage", "is_compared", "is_same", "known_copy", "take_copy"]

#: Tensors on the CPU up to this size are compared byte by byte, since batch norm moves no version; tensors of one dimension,
#: as those of batch norm, up to the other size.
_COMPARED_BYTES, _COMPARED_BYTES_1D = 1 << 16, 1 << 20


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the memory of a strided tensor is there, which a framework may have freed."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + count) * tensor.element_size() if count else 0
    return tensor.untyped_storage().nbytes() >= needed


def is_compared(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small enough to compare its bytes, if on the CPU."""
    return tensor.nbytes <= (_COMPARED_BYTES if tensor.dim() > 1 else _COMPARED_BYTES_1D)


def is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor of unchanged version still equals its copy; devices other than the CPU are not made to wait."""
    if not same_layout(tensor, copy):
        return False
    if not is_compared(copy):
        return True
    return tensor.device.type == "cpu" and same_bits(tensor, copy)


# The latest copy of each tensor, with its version, while a region holds the copy.
_copies: dict[int, tuple[weakref.ref[torch.Tensor], int, weakref.ref[torch.Tensor]]] = {}


def known_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the latest copy of a tensor, if unchanged since."""
    known = _copies.get(id(tensor))
    if known is not None and known[0]() is tensor and known[1] == tensor._version:
        copy = known[2]()
        if copy is not None and is_same(tensor, copy):
            return copy
    return None


def take_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor; other regions get the same copy while it is the latest and held by a region."""
    copy, key = copy_of(tensor), id(tensor)
    _copies[key] = weakref.ref(tensor, lambda _: _copies.pop(key, None)), tensor._version, weakref.ref(copy)
    return copy
