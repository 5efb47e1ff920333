"""Tensors that share memory with one on the tape and came to be without an operator, as ``.data`` makes them."""

from __future__ import annotations

import torch

from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._torch import set_versions

from .surroundings import Around
from .tables import Tables
from .values import Op, Store, Unsettled, Value, new_value

__all__ = ["alias_of", "group_in", "group_of", "is_in"]

_AS_STRIDED = torch.ops.aten.as_strided.default


def _share_versions(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether to write to one tensor counts as a write to the other."""
    if one is other:
        return True
    if one.is_inference() or other.is_inference():
        return False
    before, version = one._version, other._version
    if before != version:
        return False
    torch.autograd.graph.increment_version(one)
    shared = other._version != version
    set_versions((one,), (before,))
    return shared


def group_in(tables: Tables, store: Store, tensor: torch.Tensor) -> object:
    """Returns what stands for the version counter of a tensor, by looking for another one in the storage that shares it."""
    for member in tables.live_members(store):
        value = tables.value_now(member)
        if value is not None and type(value.group) is not Unsettled and _share_versions(tensor, member):
            return value.group
    for reference in store.held or ():
        value = reference()
        kept = None if value is None or value.saved is None else value.saved.tensor
        if value is None or kept is None or not store.has(kept):
            continue
        if type(value.group) is not Unsettled and _share_versions(tensor, kept):
            return value.group
    return object()


def group_of(tables: Tables, tensor: torch.Tensor) -> object:
    """Returns what stands for the version counter of a tensor."""
    value = tables.value_now(tensor)
    if value is not None and type(value.group) is not Unsettled:
        return value.group
    group = group_in(tables, tables.store_of(tensor), tensor)
    if value is not None:
        value.group = group
    return group


def is_in(tables: Tables, value: Value, groups: list[object]) -> bool:
    """Whether one of some version counters is that of a value."""
    group, tensor = value.group, value.tensor()
    if type(group) is Unsettled and tensor is not None and tables.value_now(tensor) is not None:
        group = group_of(tables, tensor)
    while type(group) is Unsettled:  # of a tensor that is gone: one that autograd made of an output to save it, mostly
        group = group.base
    return any(group is other for other in groups)


def alias_of(tables: Tables, store: Store, tensor: torch.Tensor, around: Around) -> Value | None:
    """Returns the value of such a tensor, which is a view of another one in the storage; None if there is none that will do."""
    if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return None
    for member in tables.live_members(store):
        value = tables.known.get(id(member))
        if value is None or member.dtype is not tensor.dtype or member.is_conj() or member.is_neg() or member.is_inference():
            continue
        op = Op()
        tables.number = op.number = tables.number + 1
        op.facts, op.present, op.draw, op.around = facts_of(_AS_STRIDED), (0,), None, around
        op.is_plain = True
        op.args, op.kwargs = [value, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()], {}
        group = value.group if _share_versions(member, tensor) else object()
        alias = new_value(op.number, store, group, op)
        tables.register(tensor, alias)
        return alias
    return None
