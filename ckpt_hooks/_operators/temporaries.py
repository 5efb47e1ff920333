"""Memory that kernels of the host take inside of an operator, by its shapes: what a dry run cannot see."""

from __future__ import annotations

from typing import Any

import torch

_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8  # floats in a register


def temporary_of(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    """Returns the most bytes which an operator takes besides its results; 0 where there is no rule."""
    if not made or made[0].device.type != "cpu":
        return 0
    name = func._schema.name.removeprefix("aten::")
    if name in ("convolution", "convolution_backward"):
        return _of_convolution(given, made, is_backward=name == "convolution_backward")
    if name == "native_batch_norm_backward":
        return made[0].nbytes if given[0].is_contiguous() else 0
    if name.startswith("upsample_") and name.endswith("_backward"):
        return 0 if given[0].is_contiguous() else given[0].nbytes
    if name.startswith("upsample_"):  # channels last, for small pictures
        is_copied = given[0].is_contiguous() and given[0].dim() == 4 and sum(made[0].shape[2:]) <= 128
        return given[0].nbytes + made[0].nbytes if is_copied else 0
    if torch.Tag.pointwise in func.tags:  # in the dtype of the result
        casts = [one for one in given if one.dim() and one.dtype != made[0].dtype and one.is_floating_point()]
        return sum(one.numel() for one in casts) * made[0].itemsize if made[0].is_floating_point() else 0
    return 0


def _of_convolution(given: list[torch.Tensor], made: list[torch.Tensor], *, is_backward: bool) -> int:
    # oneDNN copies tensors to a form in which channels lie in groups, one for each lane of a register, and results back.
    y, x, weight = (given[0], *given[1:3]) if is_backward else (made[0], *given[:2])
    step = x.shape[-1] / y.shape[-1]  # the stride, or a part of one where convolutions are transposed
    if max(weight.shape[2:]) == 1 and step == 1 and x.shape[0] < 16 and torch.get_num_threads() == 1:
        return 0  # a product of matrices
    if not x.is_contiguous() or x.dtype is not torch.float32:  # channels last, and others which are not copied as a whole
        return (1 + is_backward + weight.is_contiguous()) * weight.nbytes
    of_x = _in_lanes(x, _LANES, 1) if x.shape[1] >= _LANES else 0
    of_y, of_weight = _in_lanes(y, _LANES, 1), _in_lanes(weight, _LANES, 0)
    if not is_backward:
        return max(of_x + of_weight + of_y - y.nbytes, of_y + (y.nbytes if step < 0.75 else 0))
    gradient, total = (x.nbytes if made[0].shape == x.shape else 0), sum(one.nbytes for one in made)
    lanes = 8 if 8 <= x.shape[1] < 16 else _LANES
    of_weights = gradient + of_weight + _in_lanes(y, lanes, 1) + (_in_lanes(x, lanes, 1) if x.shape[1] >= 8 else 0)
    if not gradient:
        return max(0, of_weights - total)
    of_x = _in_lanes(x, _LANES, 1)
    of_data = max(of_y + of_weight + of_x, of_x + gradient * (2 if step > 1.5 else 1))
    return max(0, of_data - total, of_weights - total)


def _in_lanes(tensor: torch.Tensor, lanes: int, dim: int) -> int:
    channels = tensor.shape[dim]
    return tensor.nbytes // channels * (-(-channels // lanes) * lanes)
