"""Aliases of recorded tensors made without an operator, as by ``.data``."""

from __future__ import annotations

import torch

from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._torch.tensors import set_versions

from .surroundings import Surroundings
from .tables import Tables
from .values import Op, Store, Value, new_value

_AS_STRIDED = torch.ops.aten.as_strided.default


def _share_versions(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write to one tensor counts as a write to the other."""
    if one is other:
        return True
    if one.is_inference() or other.is_inference():
        return False
    before, version = one._version, other._version
    torch.autograd.graph.increment_version(one)
    shared = other._version != version
    set_versions((one,), (before,))
    return shared


def counter_in(tables: Tables, store: Store, tensor: torch.Tensor) -> object:
    """Returns the version counter of a tensor, as found on another tensor of the storage which shares it."""
    for member in tables.live_members(store):
        value = tables.value_now(member)
        if value is not None and _share_versions(tensor, member):
            return value.counter
    return tables.another_counter(store)


def counter_of(tables: Tables, tensor: torch.Tensor) -> object:
    """Returns the version counter of a tensor."""
    value = tables.value_now(tensor)
    return counter_in(tables, tables.store_of(tensor), tensor) if value is None else value.counter


def alias_of(tables: Tables, store: Store, tensor: torch.Tensor, surroundings: Surroundings) -> Value | None:
    """Returns the value of such an alias, as a view of another tensor in the storage; None if no tensor there will do."""
    if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return None
    for member in tables.live_members(store):
        value = tables.known.get(id(member))
        if value is None or member.dtype is not tensor.dtype or member.is_conj() or member.is_neg() or member.is_inference():
            continue
        op = Op()
        tables.number = op.number = tables.number + 1
        op.facts, op.present, op.draw, op.surroundings = facts_of(_AS_STRIDED), (0,), None, surroundings
        op.is_plain = True
        op.args, op.kwargs = [value, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()], {}
        alias = new_value(op.number, store, counter_in(tables, store, tensor), op)
        tables.register(tensor, alias)
        return alias
    return None
