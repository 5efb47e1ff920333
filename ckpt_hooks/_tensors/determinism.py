"""The comparison of a recompute with its forward.

Forward notes a few facts of each saved tensor. After a rerun, the same facts of the rerun's saved tensors are compared with
forward's: two lists, in one operation (:mod:`ckpt_hooks._function.collector`). By default the facts are shape, dtype, device
and version, for which no value is read and no device waits.

To compare values as well, users ask for fingerprints. Fingerprints which are tensors stay on their device and are compared at
once, so that a recompute waits for a device once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_hooks._torch.modes import FAKE
from ckpt_hooks._torch.operators import wait_for_collective
from ckpt_hooks._torch.tensors import nested_parts, parts_of

__all__ = ["DEFAULT_CHECK", "NOTHING", "VALUES", "Check", "check_of", "first_difference", "hash_of", "sample_of", "version_of"]


@dataclass(frozen=True)
class Check:
    """The facts and fingerprints to compare.

    Attributes:
        facts: Returns the facts of a tensor: shape, dtype, device and version, or the version alone. The version, which counts
            modifications in place, is compared in any case: a saved value modified afterwards is wrong, and plain autograd
            raises as well.
        fingerprint: Returns the fingerprint of a tensor's values; None if values are not compared.
    """

    facts: Callable[[Any], Any]
    fingerprint: Callable[[torch.Tensor], Any] | None = None


_metadata = operator.attrgetter("shape", "dtype", "device", "_version")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, in one dimension."""
    tensor = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if tensor.stride(0) != 1:  # as it may be of one number too, which is contiguous all the same
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)


def _has_bits(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but numbers in memory."""
    return not (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_meta
        or isinstance(tensor, FAKE)
        or is_traceable_wrapper_subclass(tensor)
    )


def _parts_of(tensor: torch.Tensor) -> list[Any]:
    """Returns the tensors and numbers which make up a tensor of another class or layout: all its state."""
    if tensor.layout is torch.jagged:  # its other attributes are filled in as somebody asks for them
        return [tensor.values(), tensor.offsets(), tensor.lengths()]  # type: ignore[attr-defined]
    parts = parts_of(tensor)
    if parts is not None:
        return parts
    if tensor.is_nested:
        return nested_parts(tensor)
    if tensor.is_quantized:
        if tensor.qscheme() in _PER_TENSOR:
            return [tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point()]
        return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return [tensor.to_dense()]


_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)


def _of_parts(fingerprint: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Returns the fingerprints of the inner tensors of another class or layout; None for a tensor without values.

    Inner tensors are the local shard of a DTensor, say, or indices and values of a sparse tensor.
    """
    if isinstance(tensor, FAKE) or tensor.is_meta:
        return None
    if hasattr(tensor, "trigger_wait"):  # the result of a collective, for which the program still has to wait by itself
        return [fingerprint(wait_for_collective(tensor.elem))]  # type: ignore[attr-defined]
    parts = _parts_of(tensor.detach())
    return [fingerprint(part) if isinstance(part, torch.Tensor) else part for part in parts]


#: Integers by how many bytes they have.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ODD = 0x100000001B3


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a tensor as integers of at most 32 bits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.detach().resolve_neg()
    integers = _INTEGERS.get(tensor.element_size())
    if integers is not None:
        return tensor.view(integers)
    if tensor.dim() == 0 or tensor.stride(-1) != 1:
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.int32)


def hash_of(tensor: torch.Tensor) -> Any:
    """Returns a hash of a tensor's bits, on its device, without regard to their places; None for a tensor without values.

    The hash is the same for any layout of the tensor.
    """
    # ``torch.hash_tensor`` reads a fraction of the bytes in a second. It is an exclusive or of values, which takes an even
    # number of ones for an even number of zeros.
    if not _has_bits(tensor):
        return _of_parts(hash_of, tensor)
    if tensor.numel() == 0:
        return None
    integers = _integers(tensor)
    # Added up in the width of the integers, since a wider sum would copy them. Many equal numbers lose bits in this sum, so
    # the last number of each row is added once more with a factor.
    last = integers.select(-1, -1) if integers.dim() else integers
    rows = torch.add(integers.sum(-1, dtype=integers.dtype).long(), last, alpha=_ODD)
    # ``s * (2 * s + 1)`` differs for any two sums ``s``: a number moved from row to row is seen.
    return torch.addcmul(rows, rows, rows, value=2).sum()


#: How many values of a tensor are looked at, about.
_SAMPLES = 64


def sample_of(tensor: torch.Tensor) -> Any:
    """Returns some values of a tensor, on its device: at the same places each time, spread over all dimensions."""
    if not _has_bits(tensor):
        return _of_parts(sample_of, tensor)
    if tensor.numel() == 0:
        return None
    sizes, strides, offset = _sampled(tuple(tensor.shape), tensor.stride())
    samples = torch.as_strided(tensor.detach(), sizes, strides, tensor.storage_offset() + offset)
    try:
        return samples.clone()
    except NotImplementedError:  # for dtypes of which torch knows no more than how many bits they have
        return samples.view(torch.uint8).clone()


@functools.lru_cache(maxsize=1024)
def _sampled(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[list[int], list[int], int]:
    """Returns sizes, strides and offset of the samples of a tensor; kept, since that is a third of the time of a sample."""
    sizes, strides, offset, left = list(shape), list(stride), 0, _SAMPLES
    # Small dimensions first, so that large ones share evenly what is left.
    for rank, dimension in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        size = sizes[dimension]
        step = max(1, size // max(1, round(left ** (1 / (len(sizes) - rank)))))
        first = step // 2
        sizes[dimension] = (size - first - 1) // step + 1
        offset += first * strides[dimension]
        strides[dimension] *= step
        left = max(1, left // sizes[dimension])
    return sizes, strides, offset


DEFAULT_CHECK = Check(_metadata)
NOTHING = Check(operator.attrgetter("_version"))
VALUES = Check(_metadata, hash_of)

_CHECKS: dict[str, Check] = {
    "default": DEFAULT_CHECK,
    "none": NOTHING,
    "values": VALUES,
    "sampled_values": Check(_metadata, sample_of),
}


def check_of(determinism_check: Any) -> Check:
    """Returns the check for a ``determinism_check`` argument.

    Raises:
        ValueError: If the argument is neither a choice nor callable.
    """
    try:
        check = _CHECKS.get(determinism_check)
    except TypeError:  # not hashable
        check = None
    if check is not None:
        return check
    if callable(determinism_check):
        return Check(_metadata, determinism_check)
    choices = ", ".join(repr(choice) for choice in _CHECKS)
    raise ValueError(
        f"determinism_check should be one of {choices}, or a function of a tensor, but got {determinism_check!r}. 'default' "
        "compares shape, dtype and device of what forward and recompute saved; 'values' compares a hash of all values too, "
        "'sampled_values' some of the values, and a function what it returns; 'none' compares nothing. Leave it out "
        "for 'default'."
    )


def version_of(facts: Any) -> int:
    """Returns the version among noted facts, or noted alone."""
    version: int = facts[-1] if isinstance(facts, tuple) else facts
    return version


def _equal(one: Any, other: Any) -> bool:
    """Whether two results of a user's fingerprint function are equal, or both not-a-number, in containers too."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return first_difference([one], [other]) is None
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return all(map(_equal, one, other))
    if isinstance(one, dict) and type(one) is type(other):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    try:
        return bool(one == other) or bool(one != one and other != other)
    except (RuntimeError, ValueError):  # of tensors in other objects, and of arrays of NumPy, which may have NaN in them too
        equal = one == other
        if hasattr(equal, "all") and not (same := equal.all()):
            same = (equal | ((one != one) & (other != other))).all()
        return bool(same)


def first_difference(expected: Sequence[Any], found: Sequence[Any]) -> int | None:
    """Returns the position of the first differing fingerprint, or None; waits for each device once.

    Args:
        expected: Fingerprints of forward.
        found: Fingerprints of the recompute, as many; None in either stands for no fingerprint.
    """
    differs: list[int] = []
    tensors: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one is None or other is None:
            continue
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if not _equal(one, other):
                differs.append(index)
        elif (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            differs.append(index)
        elif one.numel():
            tensors.setdefault((one.device, one.dtype), []).append(index)
    for indices in tensors.values():
        one, other = (_bits(torch.cat([values[index].reshape(-1) for index in indices])) for values in (expected, found))
        if not torch.equal(one, other):
            differs.append(next(i for i in indices if not torch.equal(_bits(expected[i]), _bits(found[i]))))
    return min(differs, default=None)
