"""Tensors that share memory with one on the tape and came to be without an operator, as ``.data`` makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ckpt_hooks._torch import set_versions

from .facts import facts_of
from .values import Op, Store, Value

if TYPE_CHECKING:
    from .tables import Tables

__all__ = ["alias_of"]

_AS_STRIDED = torch.ops.aten.as_strided.default


def _share_versions(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether to write to one tensor counts as a write to the other."""
    before, version = one._version, other._version
    if before != version:
        return False
    torch.autograd.graph.increment_version(one)
    shared = other._version != version
    set_versions((one,), (before,))
    return shared


def alias_of(tables: Tables, store: Store, tensor: torch.Tensor) -> Value | None:
    """Returns the value of such a tensor, which is a view of another one in the storage; None if there is none that will do."""
    if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return None
    for member in tables.live_members(store):
        value = tables.known.get(id(member))
        if value is None or member.dtype is not tensor.dtype or member.is_conj() or member.is_neg() or member.is_inference():
            continue
        op = Op()
        tables.number = op.number = tables.number + 1
        op.facts, op.present, op.draw, op.around = facts_of(_AS_STRIDED), (0,), None, tables.around
        op.is_plain = True
        op.args, op.kwargs = [value, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()], {}
        alias = Value()
        alias.number, alias.op, alias.index, alias.before, alias.saved = op.number, op, 0, None, None
        alias.store, alias.group = store, value.group if _share_versions(member, tensor) else object()
        tables.register(tensor, alias)
        return alias
    return None
