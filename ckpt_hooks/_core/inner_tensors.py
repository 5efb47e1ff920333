"""The parts of tensors of other classes and layouts."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_hooks._torch.tensors import sparse_parts

__all__ = ["dense_parts", "inner_tensors", "parts_of"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BY_ROWS, _BY_COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors directly inside a wrapper subclass; none for other tensors."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    return [part for name in flatten()[0] if isinstance(part := getattr(tensor, name), torch.Tensor)]


def parts_of(tensor: torch.Tensor) -> list[Any] | None:
    """Returns the parts of a tensor, tensors and for some layouts numbers; None for a tensor with memory of its own."""
    if hasattr(tensor, "__tensor_flatten__"):
        return inner_tensors(tensor)
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in _BY_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _BY_COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def dense_parts(value: Any) -> list[torch.Tensor]:
    """Returns the tensors with memory of their own which a tensor is made of; nothing for other objects."""
    if type(value) in _PLAIN and value.layout is torch.strided:
        return [value]
    if not isinstance(value, torch.Tensor):
        return []
    parts = parts_of(value)
    return [value] if parts is None else [inner for part in parts for inner in dense_parts(part)]
