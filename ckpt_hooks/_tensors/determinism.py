"""Fingerprints of saved tensors, by which the values of a recompute are compared with those of its forward.

Fingerprints which are tensors stay on their device and are compared at once, so that a recompute waits for a device once.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ckpt_hooks._core.modes import past_modes
from ckpt_hooks._torch.autograd import node_number, sequence_number
from ckpt_hooks._torch.functions import wait_for_collective
from ckpt_hooks._torch.modes import FAKE
from ckpt_hooks._torch.tensors import (
    handles_operators,
    is_traceable_wrapper_subclass,
    nested_parts,
    parts_of,
    past_all_modes,
    storage_of,
)

from .copies import bits_of, is_on_host

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
    if tensor.layout is torch.jagged:  # other attributes of such a tensor are caches
        return [tensor.values(), tensor.offsets(), tensor.lengths()]  # type: ignore[attr-defined]
    parts = parts_of(tensor)
    if parts is not None:
        return parts
    if tensor.is_nested:
        return nested_parts(tensor)
    return [tensor.dequantize() if tensor.is_quantized else tensor.to_dense()]


def _of_parts(fingerprint: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Returns the fingerprints of the parts of a tensor of another class or layout; None for a tensor without values."""
    if isinstance(tensor, FAKE) or tensor.is_meta:
        return None
    if hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor, for which the program has yet to wait
        return [fingerprint(wait_for_collective(tensor.elem))]  # type: ignore[attr-defined]
    parts = _parts_of(tensor.detach())
    return [fingerprint(part) if isinstance(part, torch.Tensor) else part for part in parts]


def _pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yields a tensor's numbers in order: one vector if contiguous, else copies, each overwritten by the next."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        yield tensor.view(-1)
        return
    piece = torch.empty(min(size, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
    filled, rest = 0, [tensor]
    while rest:
        part = rest.pop()
        room = len(piece) - filled
        if part.numel() > room:
            rows = room * len(part) // part.numel()
            rest += (part[rows:], part[:rows]) if rows else (part[1:], part[0])
            continue
        piece[filled : filled + part.numel()].view(part.shape).copy_(part)
        filled += part.numel()
        if filled == len(piece):
            yield piece
            filled = 0
    if filled:
        yield piece[:filled]


_ODD = 0x100000001B3


def _hash_of_rows(integers: torch.Tensor, after: int = 0) -> torch.Tensor:
    """Returns a hash of rows; ``after`` is the number of rows that follow in the tensor."""
    if integers.dtype is torch.int64:  # as pairs of int32: the low bits of round float64s are zeros, and sums overflow
        if not integers.dim() or integers.stride(-1) != 1:
            integers = integers.clone(memory_format=torch.contiguous_format).reshape(integers.shape or 1)
        integers = integers.view(torch.int32)
    if integers.dim() < 2 and integers.numel() <= _ROW:  # such as labels: a number is a row
        integers = integers.unsqueeze(-1)
    # A row is added up in the width of its integers, since a wider sum would copy them. Many equal numbers lose bits in this
    # sum, so the last number of each row is added once more with a factor.
    rows = torch.add(integers.sum(-1, dtype=integers.dtype).long(), integers.select(-1, -1), alpha=_ODD)
    # The square shows a number that has moved to another row. Sums of sums weigh each row by its place, which shows rows in
    # another order, such as those of a batch that is shuffled again.
    sums = torch.addcmul(rows, rows, rows, value=2).flatten().cumsum(0)
    return torch.add(sums.sum(), sums[-1], alpha=after)


_ROWS = 1 << 16  # rows hashed at once, each of which takes 32 bytes meanwhile
_ROW = 1 << 12  # bytes of a row, where the last dimension is too long or too short
_COPIED = 1 << 19  # bytes copied at once


def hash_of(tensor: torch.Tensor) -> Any:
    """Returns a hash of a tensor's bits, on its device, the same for any layout; None for a tensor without values."""
    # ``torch.hash_tensor`` is several times slower. It is an exclusive or of values, for which an even number of ones is the
    # same as an even number of zeros.
    if not _has_bits(tensor):
        return _of_parts(hash_of, tensor)
    count, width = tensor.numel(), tensor.itemsize
    if count == 0:
        return None
    row = tensor.shape[-1] if tensor.dim() and not tensor.is_complex() else 1
    # A row is a row of the last dimension, or _ROW bytes if such rows are too long, or too many and too short; so equal shapes
    # have equal rows, whatever the layout.
    if row * width <= _COPIED and count <= row * max(_ROWS, count * width // _ROW):
        is_split = width == 8 and not tensor.is_complex()
        is_copied = tensor.is_conj() or tensor.is_neg() or (is_split and tensor.stride()[-1:] != (1,))
        if count * width <= _COPIED or not is_copied:
            return _hash_of_rows(bits_of(tensor))
    else:
        row = _ROW // width
    total: Any = 0
    after = count // row
    for piece in _pieces(tensor.detach(), _COPIED // (row * width) * row):
        whole = len(piece) // row * row
        for rows in (piece[:whole].view(-1, row), piece[whole:]):
            if rows.numel():
                after = after - len(rows) if rows.dim() == 2 else 0
                total = total + _hash_of_rows(bits_of(rows).flatten(-2) if rows.is_complex() else bits_of(rows), after)
    return total


_PART = 1 << 20  # numbers hashed at once, each with a weight


def hash_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a hash of a plain tensor's bits and of their places, on its device."""
    # A gigabyte takes 0.1 s on an accelerator, and 1 s on a core of a host, like a conversion to another dtype.
    integers = bits_of(tensor).contiguous().view(-1)
    integers = integers.view(torch.int32) if integers.dtype is torch.int64 else integers
    weights = torch.arange(1, min(_PART, len(integers)) + 1, device=tensor.device)
    for factor in (-0x61C8864680B583EB, -0x3B314601E57A13AD):  # of xxHash, and of MurmurHash's last step
        weights *= factor
        weights ^= weights >> 29
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(integers), _PART):
        part = integers[start : start + _PART]
        total = total * _ODD + (part * weights[: len(part)]).sum()
    return total


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class handles operators itself, and does not tell the inner tensors."""
    return handles_operators(tensor) and not (isinstance(tensor, FAKE) or is_traceable_wrapper_subclass(tensor))


def ordered_hash_of(tensor: torch.Tensor) -> Any:
    return hash_in_order(tensor) if _has_bits(tensor) else _of_parts(ordered_hash_of, tensor)


# Projections: close to each other for results that kernels add up in another order

#: Dtypes that convert to float32.
_NUMBERS = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)

_PROJECTED = 1 << 18  # numbers projected at once
_MIXERS = (-0x61C88647, -0x7A143589, -0x3D4D51C3)  # odd factors, from xxHash


@functools.cache
def _signs(device: torch.device, count: int) -> torch.Tensor:
    """Returns numbers of 1 and -1, each hashed from its place."""
    signs = torch.empty(count, dtype=torch.float32, device=device)
    for part in signs.chunk(4 * len(signs) // _PROJECTED):
        start = int(part.storage_offset())
        places = torch.arange(start, start + len(part), dtype=torch.int32, device=device)
        for factor in _MIXERS:
            places.add_(1).mul_(factor).bitwise_xor_(places >> 15)
        part.copy_(places.bitwise_and_(1 << 8)).div_(-128).add_(1)
    signs[-1].item()  # waits, once for each device, since other streams read the signs too
    return signs


# Places in a projection. All numbers up to the sums are measured in the unit, the squared norm in its square.
_SQUARE = 0  # the squared norm
_SUMS = slice(1, 5)  # four sums of the numbers, each with signs of its own
_NOT_FINITE = slice(5, 7)  # the count of numbers that are not finite, and a sum of their hashed places
_UNIT = 7


def _project(numbers: torch.Tensor, start: int, signs: torch.Tensor) -> torch.Tensor:
    numbers = numbers if numbers.dtype is torch.float64 else numbers.float()
    dtype = torch.float32 if numbers.device.type == "mps" else torch.float64
    missing = places = torch.zeros((), device=numbers.device)
    smallest, largest = numbers.aminmax()
    unit = torch.maximum(largest, -smallest)  # a norm takes ten times as long
    on_host = is_on_host(numbers)
    if not (on_host and unit.isfinite()):
        finite = (numbers * 0).eq_(0).bool()  # ``isfinite`` takes five times as long
        missing = len(numbers) - finite.sum()
        places = torch.arange(start, start + len(numbers), dtype=torch.int32, device=numbers.device)
        places = places.mul_(_MIXERS[0]).bitwise_right_shift_(12).masked_fill_(finite, 0).sum()
        numbers = numbers.where(finite, 0)
        smallest, largest = numbers.aminmax()
        unit = torch.maximum(largest, -smallest)
    if on_host and 1e-9 < float(unit) < 1e9:
        unit, numbers = torch.ones_like(unit), numbers.float()
    else:  # squares of large numbers would be infinite, squares of small numbers zero
        numbers = (numbers / unit.clamp(min=torch.finfo(numbers.dtype).tiny)).float()
    sums = _sums_on(numbers, start, signs) if on_host else _sums_on_device(numbers, start, signs)
    return torch.cat([numbers.dot(numbers)[None], sums, torch.stack([missing.to(dtype), places.to(dtype), unit.to(dtype)])])


_COLUMNS = 1 << 10


def _sums_on(numbers: torch.Tensor, start: int, signs: torch.Tensor) -> torch.Tensor:
    """Returns four signed sums of numbers: a number's sign is the sign of its column times the sign of its row."""
    first, whole = 4 * (_COLUMNS + start // _COLUMNS % (_PROJECTED // 8)), len(numbers) // _COLUMNS
    columns, rows = signs[: 4 * _COLUMNS].view(-1, 4), signs[first : first + 4 * (whole + 1)].view(-1, 4)
    # A matrix product reads the numbers once; four sums would read them four times.
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
        sums = ((numbers[: whole * _COLUMNS].view(whole, _COLUMNS) @ columns) * rows[:whole]).sum(0)
        rest = numbers[whole * _COLUMNS :]
        return sums + (rest @ columns[: len(rest)]) * rows[whole]


def _sums_on_device(numbers: torch.Tensor, start: int, signs: torch.Tensor) -> torch.Tensor:
    places = ((start // (_PROJECTED // 2) * 4 + number + 1) * _MIXERS[0] for number in range(4))
    starts = [(place & 0xFFFFFFFF) * _PROJECTED >> 32 for place in places]
    return torch.stack([numbers.dot(signs[first : first + len(numbers)]) for first in starts])


def projections_of(tensor: torch.Tensor) -> Any:
    """Returns a tensor's squared norm and four projections on signs, the same for any layout; None without values."""
    # The result is on the tensor's device, and has more numbers besides (``_NOT_FINITE``, ``_UNIT``).
    if not _has_bits(tensor):
        return _of_parts(projections_of, tensor)
    if tensor.numel() == 0:
        return None
    tensor = tensor.detach() if tensor.dtype in _NUMBERS else bits_of(tensor)
    per = 2 if tensor.is_complex() else 1
    at_once = _PROJECTED if is_on_host(tensor) else 4 * _PROJECTED  # on a device most time goes into starting kernels
    size = at_once // max(per, tensor.itemsize // 4)
    signs, projections, start = past_all_modes(tensor, _signs, tensor.device, at_once + _PROJECTED), [], 0
    for piece in _pieces(tensor, size):
        reals = torch.view_as_real(piece).view(-1) if piece.is_complex() else piece
        for numbers in reals.split(size * per):  # type: ignore[no-untyped-call]
            projections.append(_project(numbers, start, signs))
            start += len(numbers)
    if len(projections) == 1:
        return projections[0]
    pieces = torch.stack(projections)
    unit = pieces[:, _UNIT:].amax(0)
    shares = (pieces[:, _UNIT:] / unit).nan_to_num_()
    pieces[:, : _SUMS.stop] *= shares
    pieces[:, : _SUMS.start] *= shares  # once more, since the norm is squared
    return torch.cat([pieces[:, :_UNIT].sum(0), unit])


# Comparing


def are_close(expected: Any, recomputed: Any, dtype: torch.dtype) -> bool:
    """Whether two results of :func:`projections_of`, as numbers, differ by no more than another order of additions explains."""
    if isinstance(expected, list) and isinstance(recomputed, list):
        return len(expected) == len(recomputed) and all(map(are_close, expected, recomputed, [dtype] * len(recomputed)))
    if not (isinstance(expected, (tuple, array)) and isinstance(recomputed, (tuple, array))):
        return expected is None or recomputed is None or bool(expected == recomputed)
    numbers, other = tuple(expected), tuple(recomputed)
    if len(numbers) != len(other):
        return True  # a hash, and projections: ``use_deterministic_algorithms`` was called between the two runs
    if len(numbers) == 1:  # a hash
        return numbers == other
    if numbers[_NOT_FINITE] != other[_NOT_FINITE]:
        return False
    unit = max(numbers[_UNIT], other[_UNIT]) or 1.0
    (norm, *projections), (other_norm, *others) = (
        [value * share for value in (math.sqrt(values[_SQUARE]), *values[_SUMS])]
        for values, share in ((numbers, numbers[_UNIT] / unit), (other, other[_UNIT] / unit))
    )
    tolerance = 5e-2
    if dtype in _NUMBERS and (dtype.is_floating_point or dtype.is_complex):
        tolerance = min(max(1e-3, 4 * torch.finfo(dtype).eps), 0.5)  # with a larger tolerance nothing would differ
    tolerance *= max(norm, other_norm)
    return all(abs(a - b) <= tolerance for a, b in zip((norm, *projections), (other_norm, *others), strict=True))


def _equal(fingerprint: Any, other: Any) -> bool:
    """Whether two fingerprints, also of a user's function, are equal, or both not-a-number, in containers too."""
    if isinstance(fingerprint, torch.Tensor) and isinstance(other, torch.Tensor):
        return first_difference([fingerprint], [other]) is None
    if isinstance(fingerprint, (list, tuple)) and type(fingerprint) is type(other) and len(fingerprint) == len(other):
        return all(map(_equal, fingerprint, other))
    if isinstance(fingerprint, dict) and type(fingerprint) is type(other):
        return fingerprint.keys() == other.keys() and all(_equal(value, other[key]) for key, value in fingerprint.items())
    same: Any = (fingerprint == other) | ((fingerprint != fingerprint) & (other != other))
    return bool(same.all() if hasattr(same, "all") else same)  # NumPy's arrays compare by element


def first_difference(expected: Sequence[Any], actual: Sequence[Any]) -> int | None:
    """Returns the position of the first differing fingerprint, or None; waits for each device once."""
    differs: list[int] = []
    tensors: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (before, after) in enumerate(zip(expected, actual, strict=True)):
        if before is None or after is None:  # one of the runs took no fingerprint
            continue
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            if not _equal(before, after):
                differs.append(index)
        elif (before.shape, before.dtype, before.device) != (after.shape, after.dtype, after.device):
            differs.append(index)
        elif before.numel():
            tensors.setdefault((before.device, before.dtype), []).append(index)
    for indices in tensors.values():
        before, after = (bits_of(torch.cat([values[index].reshape(-1) for index in indices])) for values in (expected, actual))
        if not torch.equal(before, after):
            differs.append(next(i for i in indices if not torch.equal(bits_of(expected[i]), bits_of(actual[i]))))
    return min(differs, default=None)


# Memory left unfilled


def _is_any(tensor: torch.Tensor) -> bool:
    return True


def _is_random_state(tensor: torch.Tensor) -> bool:
    # The state is two 64-bit integers, or scalars for seed and offset. Lengths of sequences, saved as well, have 32 bits.
    return tensor.dtype in (torch.int64, torch.uint64) or tensor.dim() == 0


def _is_bytes_or_statistics(tensor: torch.Tensor) -> bool:
    # Running statistics are saved too: the operator itself updates them, and backward of training does not read them.
    return tensor.dtype is torch.uint8 or tensor.dim() == 1


def _is_bytes(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.uint8


_RRELU = "RreluWithNoise"
_FUSED = ("FlashAttention", "EfficientAttention", "CudnnAttention", "FusedAttentionOverrideable")
_NORMS = ("CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm", "BatchNormWithUpdate", "BatchNormNoUpdate")

#: For nodes of operators that save partly unfilled memory, a test for such tensors, all without gradient. By line: oneDNN's
#: workspace, the paths of shorter sequences in CTC loss, the noise of RReLU in evaluation; the generator's state of attention
#: without dropout; workspaces of cuDNN and MIOpen, whose filled part only the library knows.
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
    node = None if tensor._is_view() else tensor.grad_fn  # a view may make a new node when asked for ``grad_fn``
    return None if node is None or node_number(node) != sequence_number() - 1 else node


class Twice(NamedTuple):
    """The fingerprints of a tensor when saved and when forward ended: batch normalization writes without counting a version."""

    saved: Any
    ended: Any

    def unless_written(self) -> Any:
        return self.ended if _equal(self.saved, self.ended) else None


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
            self.taken.append(past_modes(self._fingerprint, tensor))
        elif kept or tensor.requires_grad:
            is_unfilled = _unfilled_by(_node_at_work(tensor))
            if is_unfilled is not None:
                self._unfilled, self._is_unfilled = sequence_number(), is_unfilled
            self.taken.append(None if kept else past_modes(self._fingerprint, tensor))
        else:
            # An operator may save a tensor before filling it: the tensor waits until another operator saves, or forward ends.
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
        saved = [(index, self.taken[index]) for index, *_ in self._late]
        for index, _ in saved:
            self.taken[index] = None
        self._waiting, self._sequence = self._late, -2  # no node has this number, so no tensor counts as unfilled
        self.finish()
        for index, fingerprint in saved:
            if self.taken[index] is not None:
                self.taken[index] = Twice(fingerprint, self.taken[index])
        self.taken = []  # the frame has the fingerprints; the pack hook, which keeps this object alive, needs none
