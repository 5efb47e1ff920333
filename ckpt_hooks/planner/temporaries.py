"""Memory that operators of the host take and give back within a run, by shapes: measured on torch 2.13 with oneDNN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

_LANES = 16  # channels in a block of oneDNN's layouts


def temporary_of(operator: Any, args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Returns the most bytes that a run has taken beside its results; 0 for operators without a rule."""
    rule = _RULES.get(operator)
    return 0 if rule is None or not made or made[0].device.type != "cpu" else rule(args, made)


def _convolution(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    x, weight, (y,) = args[0], args[1], made
    if not _is_blocked(x, weight, args[3], args[5], args[8]):
        return _columns(x, weight, y)
    blocked = _padded(y, 1)
    first = blocked + _padded(weight, 0) + (x.nbytes if x.shape[1] >= _LANES else 0)  # input, weight and result in blocks
    return max(first, blocked + y.nbytes) - y.nbytes


def _convolution_backward(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    gradient, x, weight = args[:3]
    needs_x, needs_weight, _ = args[10]
    if not _is_blocked(x, weight, args[4], args[6], args[9]):
        return _columns(x, weight, gradient)
    given, own = _padded(gradient, 1), x.nbytes if needs_x else 0
    of_x = max(given + _padded(weight, 0, 1) + _padded(x, 1), _padded(x, 1) + own) if needs_x else 0
    other = given + (x.nbytes if x.shape[1] > 4 else 0)
    padded = _padded(weight, 0) if x.shape[1] >= _LANES else weight.nbytes
    of_weight = own + padded + max(other, weight.nbytes) if needs_weight else 0
    return max(0, max(of_x, of_weight) - sum(one.nbytes for one in made))


def _is_blocked(x: torch.Tensor, weight: torch.Tensor, stride: Any, dilation: Any, groups: int) -> bool:
    """Whether a convolution is one of oneDNN's, as ``use_mkldnn`` in torch's ``Convolution.cpp`` has it."""
    kernel = weight.shape[2:]
    if x.dim() != 4 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    is_plain = max(*stride, *dilation, *kernel) == 1
    if is_plain and x.shape[0] < 16 and torch.get_num_threads() == 1:
        return False
    return groups > 1 or min(kernel) > 3 or x.shape[0] > 1 or x.numel() > 20480


def _padded(tensor: torch.Tensor, *dims: int) -> int:
    """Returns the bytes of a tensor whose channels fill blocks."""
    nbytes = tensor.nbytes
    for dim in dims:
        nbytes = nbytes // tensor.shape[dim] * (-(-tensor.shape[dim] // _LANES) * _LANES)
    return nbytes


def _columns(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> int:
    kernel = math.prod(weight.shape[2:])
    return 0 if kernel == 1 else x.element_size() * x.shape[0] * x.shape[1] * kernel * math.prod(y.shape[2:])


def _batch_norm_backward(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    return int(args[1].nbytes) if args[0].is_contiguous() and args[1].is_contiguous() else 0


def _attention(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    queries, keys = args[0], args[1]
    rows, columns = _split(queries, keys)
    return 4 * torch.get_num_threads() * rows * (columns + 2 + int(queries.shape[-1]))


def _attention_backward(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    rows, columns = _split(args[1], args[2])
    # The gradient in the layout of the result.
    copied = 0 if args[0].stride() == args[4].stride() and args[0].transpose(1, 2).is_contiguous() else args[0].nbytes
    return int(copied) + 4 * torch.get_num_threads() * (2 * rows * columns + rows)


def _product(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    factors = [one for one in args[-2:] if isinstance(one, torch.Tensor)]
    return sum(one.numel() * one.element_size() for one in factors if 1 not in one.stride()[-2:])  # which BLAS does not take


def _split(queries: torch.Tensor, keys: torch.Tensor) -> tuple[int, int]:
    """Returns how many queries and keys a thread takes at once."""
    length = queries.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, keys.shape[2])


_aten = torch.ops.aten
_RULES: dict[Any, Callable[[Sequence[Any], Sequence[torch.Tensor]], int]] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.mm.default: _product,
    _aten.addmm.default: _product,
    _aten.bmm.default: _product,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
