"""Fingerprints of saved tensors, by which the values of a recompute are compared with those of its forward.

Fingerprints which are tensors stay on their device and are compared at once, so that a recompute waits for a device once.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_hooks._core.modes import past_modes
from ckpt_hooks._torch.autograd import node_number, sequence_number
from ckpt_hooks._torch.functions import wait_for_collective
from ckpt_hooks._torch.modes import FAKE
from ckpt_hooks._torch.tensors import DISABLED_DISPATCH, nested_parts, parts_of, storage_of

from .copies import bits_of

# Fingerprints


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
    return [tensor.dequantize() if tensor.is_quantized else tensor.to_dense()]


def _of_parts(fingerprint: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Returns the fingerprints of what makes up a tensor of another class or layout; None for a tensor without values."""
    if isinstance(tensor, FAKE) or tensor.is_meta:
        return None
    if hasattr(tensor, "trigger_wait"):  # the result of a collective, for which the program still has to wait by itself
        return [fingerprint(wait_for_collective(tensor.elem))]  # type: ignore[attr-defined]
    parts = _parts_of(tensor.detach())
    return [fingerprint(part) if isinstance(part, torch.Tensor) else part for part in parts]


_ODD = 0x100000001B3


def hash_of(tensor: torch.Tensor) -> Any:
    """Returns a hash of a tensor's bits, on its device, the same for any layout; None for a tensor without values."""
    # ``torch.hash_tensor`` reads a fraction of the bytes in a second. It is an exclusive or of values, which takes an even
    # number of ones for an even number of zeros.
    if not _has_bits(tensor):
        return _of_parts(hash_of, tensor)
    if tensor.numel() == 0:
        return None
    integers = bits_of(tensor)
    if integers.dtype is torch.int64:  # as two of 32 bits: sums of round numbers would lose all of 64
        if not integers.dim() or integers.stride(-1) != 1:
            integers = integers.clone(memory_format=torch.contiguous_format).reshape(integers.shape or 1)
        integers = integers.view(torch.int32)
    # Added up in the width of the integers, since a wider sum would copy them. Many equal numbers lose bits in this sum, so
    # the last number of each row is added once more with a factor.
    last = integers.select(-1, -1) if integers.dim() else integers
    rows = torch.add(integers.sum(-1, dtype=integers.dtype).long(), last, alpha=_ODD)
    # ``s * (2 * s + 1)`` differs for any two sums ``s``: a number moved from row to row is seen.
    return torch.addcmul(rows, rows, rows, value=2).sum()


_PART = 1 << 20  # numbers, to each of which a weight is made


def hash_in_order(tensor: torch.Tensor) -> int:
    """Returns a hash of a plain tensor's bits and of their places: for contents of which no copy is left."""
    # In a tenth of a second for a gigabyte of an accelerator; in a second on a core of a host, as a conversion takes.
    integers = bits_of(tensor).contiguous().view(-1)
    integers = integers.view(torch.int32) if integers.dtype is torch.int64 else integers
    weights = torch.arange(1, min(_PART, len(integers)) + 1, device=tensor.device)
    for factor in (-0x61C8864680B583EB, -0x3B314601E57A13AD):  # of xxHash, and of MurmurHash's last step
        weights *= factor
        weights ^= weights >> 29
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(integers), _PART):
        part = integers[start : start + _PART]
        found = found * _ODD + (part * weights[: len(part)]).sum()
    return int(found)


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a class takes operators itself, and does not say what its tensors are made of."""
    is_plain = type(tensor).__torch_dispatch__ is DISABLED_DISPATCH
    return not (is_plain or isinstance(tensor, FAKE) or is_traceable_wrapper_subclass(tensor))


def ordered_hash_of(tensor: torch.Tensor) -> Any:
    return hash_in_order(tensor) if _has_bits(tensor) else _of_parts(ordered_hash_of, tensor)


# Projections, by which values may differ a little

_COLUMNS, _ROWS = 1 << 10, 1 << 10  # of a piece: 4 MB of float32
_PERIOD = 509  # of rows with signs of their own


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns four pseudo-random signs for each column and each row; none of torch's generators moves."""
    draws = random.Random(0)
    rows = [[draws.choice((-1.0, 1.0)) for _ in range(4)] for _ in range(_COLUMNS + _PERIOD)]
    columns, rows = rows[:_COLUMNS], rows[_COLUMNS:]
    repeated = [rows[at % _PERIOD] for at in range(_PERIOD + _ROWS)]
    with torch.inference_mode(False):
        return torch.tensor(columns, dtype=dtype, device=device), torch.tensor(repeated, dtype=dtype, device=device)


def _pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cuts a tensor into flat pieces in the order of its elements, all but the last one of whole rows."""
    size, most = tensor.numel(), _COLUMNS * _ROWS
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), most)
    elif size <= most:
        yield tensor.reshape(-1)
    elif len(tensor) == 1:
        yield from _pieces_of(tensor[0])
    else:
        inner = size // len(tensor)
        step = _COLUMNS // math.gcd(inner, _COLUMNS)
        for part in torch.split(tensor, step * max(1, most // (step * inner))):
            yield from _pieces_of(part) if step == 1 else torch.split(part.reshape(-1), most)


def _add_projections(total: torch.Tensor, piece: torch.Tensor, start: int) -> None:
    columns, rows = _signs(piece.device, piece.dtype)
    whole = len(piece) // _COLUMNS
    total[0] += torch.linalg.vector_norm(piece).to(total.dtype) ** 2
    if whole:
        found = piece[: whole * _COLUMNS].view(whole, _COLUMNS) @ columns
        total[1:] += (found * rows[start : start + whole]).sum(0, dtype=total.dtype)
    if rest := len(piece) % _COLUMNS:
        total[1:] += (piece[-rest:] @ columns[:rest] * rows[start + whole]).to(total.dtype)


def projections_of(tensor: torch.Tensor) -> Any:
    """Returns the squared norm of a tensor and four projections on signs, of the same elements in any layout."""
    # Norms alone tell nothing: those of two independent tensors of a million numbers differ by 2e-5.
    if not _has_bits(tensor):
        return _of_parts(projections_of, tensor)
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    device, dtype = tensor.device, torch.float64 if tensor.dtype is torch.float64 else torch.float32
    total = torch.zeros(5, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    with torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext():
        _add_all(total, tensor, dtype, is_finite=device.type == "cpu")
        if device.type == "cpu" and not total.isfinite().all():  # an accelerator would have to be waited for
            _add_all(total.zero_(), tensor, dtype, is_finite=False)
    return total if device.type != "cpu" else total.tolist()


def _add_all(total: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype, *, is_finite: bool) -> None:
    row = 0
    for piece in _pieces_of(tensor):
        numbers = piece.to(dtype)
        if not is_finite:
            numbers = numbers.nan_to_num(1.0, 2.0, -2.0).clamp(-1e15, 1e15)
        _add_projections(total, numbers, row % _PERIOD)
        row += len(piece) // _COLUMNS


def are_close(expected: Any, found: Any, dtype: torch.dtype) -> bool:
    """Whether projections differ by no more than additions in another order explain; waits for a device."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        expected, found = torch.stack([expected, found]).tolist()
    if not (isinstance(expected, list) and isinstance(found, list)):
        return bool(expected == found)
    if len(expected) != 5 or not all(isinstance(one, float) for one in expected):  # of parts
        return len(expected) == len(found) and all(
            are_close(one, other, dtype) for one, other in zip(expected, found, strict=True)
        )
    is_exact = not (dtype.is_floating_point or dtype.is_complex)  # comparisons flip where numbers are near
    most = 5e-2 if is_exact else max(1e-3, 4 * torch.finfo(dtype).eps)
    norm = math.sqrt(max(expected[0], found[0]))
    return all(abs(one - other) <= most * norm for one, other in zip(expected[1:], found[1:], strict=True))


# Comparing


def _equal(one: Any, other: Any) -> bool:
    """Whether two results of a user's fingerprint function are equal, or both not-a-number, in containers too."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return first_difference([one], [other]) is None
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return all(map(_equal, one, other))
    if isinstance(one, dict) and type(one) is type(other):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    same: Any = (one == other) | ((one != one) & (other != other))
    return bool(same.all() if hasattr(same, "all") else same)  # of arrays of NumPy


def first_difference(expected: Sequence[Any], found: Sequence[Any]) -> int | None:
    """Returns the position of the first differing fingerprint, or None; waits for each device once."""
    differs: list[int] = []
    tensors: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one is None or other is None:  # no fingerprint in one of the runs
            continue
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if not _equal(one, other):
                differs.append(index)
        elif (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            differs.append(index)
        elif one.numel():
            tensors.setdefault((one.device, one.dtype), []).append(index)
    for indices in tensors.values():
        one, other = (bits_of(torch.cat([values[index].reshape(-1) for index in indices])) for values in (expected, found))
        if not torch.equal(one, other):
            differs.append(next(i for i in indices if not torch.equal(bits_of(expected[i]), bits_of(found[i]))))
    return min(differs, default=None)


# Memory left unfilled


def _is_any(tensor: torch.Tensor) -> bool:
    return True


def _is_random_state(tensor: torch.Tensor) -> bool:
    # Two integers of 64 bits, or one number each for seed and offset. Lengths of sequences, saved as well, have 32 bits.
    return tensor.dtype in (torch.int64, torch.uint64) or tensor.dim() == 0


def _is_bytes_or_statistics(tensor: torch.Tensor) -> bool:
    # Statistics are saved as well, and updated by the same operator; of no account in training.
    return tensor.dtype is torch.uint8 or tensor.dim() == 1


def _is_bytes(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.uint8


_RRELU = "RreluWithNoise"
_FUSED = ("FlashAttention", "EfficientAttention", "CudnnAttention", "FusedAttentionOverrideable")
_NORMS = ("CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm", "BatchNormWithUpdate", "BatchNormNoUpdate")

#: Nodes of operators which save memory partly unfilled, with a test for such tensors, all without gradient: oneDNN's workspace,
#: the paths of shorter sequences, the noise of a leaky rectifier in evaluation; the generator's state of attention without
#: dropout; and workspaces of cuDNN and MIOpen, of which only the library knows the filled part.
_UNFILLED: dict[str, Callable[[torch.Tensor], bool]] = {
    **dict.fromkeys(("MkldnnRnnLayer", "CtcLoss", _RRELU), _is_any),
    **dict.fromkeys((*_FUSED, *(f"ScaledDotProduct{name}" for name in _FUSED)), _is_random_state),
    **dict.fromkeys(("CudnnRnn", "MiopenRnn"), _is_bytes),
    **dict.fromkeys(_NORMS, _is_bytes_or_statistics),
}


def _unfilled_by(node: Any) -> Callable[[torch.Tensor], bool] | None:
    """Returns a test for possibly unfilled tensors without gradient saved by a node; None for a node without such tensors."""
    if node is None:
        return None
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    return None if name == _RRELU and node._saved_training else _UNFILLED.get(name)


def may_be_unfilled(node: Any, tensor: torch.Tensor) -> bool:
    """Whether a saved tensor without gradient may be memory unfilled by the node's operator."""
    is_unfilled = _unfilled_by(node)
    return is_unfilled is not None and is_unfilled(tensor)


def _node_at_work(tensor: torch.Tensor) -> Any:
    """Returns the node which is saving its own result ``tensor``; None if the tensor is no result of that node."""
    node = None if tensor._is_view() else tensor.grad_fn  # asking a view may make another node
    return None if node is None or node_number(node) != sequence_number() - 1 else node


class Fingerprints:
    """Fingerprints of tensors saved in forward, each taken past all modes, once the value is complete."""

    __slots__ = ("_fingerprint", "_is_unfilled", "_late", "_left_out", "_sequence", "_unfilled", "_waiting", "taken")

    def __init__(self, fingerprint: Callable[[torch.Tensor], Any], left_out: Collection[int | None]) -> None:
        self._fingerprint = fingerprint
        self._left_out = left_out  # storages to which operators may write at any time in forward
        self._late: list[tuple[int, torch.Tensor, int]] = []
        self._waiting: list[tuple[int, torch.Tensor, int]] = []
        self._sequence = self._unfilled = -1
        self._is_unfilled: Callable[[torch.Tensor], bool] = _is_any
        self.taken: list[Any] = []

    def note(self, tensor: torch.Tensor, *, kept: bool = False) -> None:
        """Takes the fingerprint of a saved tensor, now or later; a kept tensor leaves nothing to compare."""
        if self._waiting and self._sequence != sequence_number():
            self.finish()
        if self._left_out and storage_of(tensor) in self._left_out and not kept:
            self._late.append((len(self.taken), tensor, tensor._version))
            self.taken.append(None)
        elif kept or tensor.requires_grad:
            is_unfilled = _unfilled_by(_node_at_work(tensor))
            if is_unfilled is not None:
                self._unfilled, self._is_unfilled = sequence_number(), is_unfilled
            self.taken.append(None if kept else past_modes(self._fingerprint, tensor))
        else:
            # An operator may save a tensor before filling it: this one waits until another operator saves, or forward ends.
            self._sequence = sequence_number()
            self.taken.append(None)
            self._waiting.append((len(self.taken) - 1, tensor, tensor._version))

    def finish(self) -> None:
        """Takes the waiting fingerprints, except for tensors modified meanwhile or never filled."""
        for index, tensor, version in self._waiting:
            if tensor._version == version and not (self._sequence == self._unfilled and self._is_unfilled(tensor)):
                self.taken[index] = past_modes(self._fingerprint, tensor)
        self._waiting.clear()

    def close(self) -> None:
        self.finish()
        self._waiting, self._sequence = self._late, -2  # no node's
        self.finish()
        self.taken = []  # the frame has them, and the pack hook keeps this object alive
