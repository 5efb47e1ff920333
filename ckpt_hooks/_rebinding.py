"""Names in a module that forward has bound to other objects, and that a rerun has to find as they were.

Tensors are, and containers of tensors. Numbers, flags and the like go with the tensors of the same module, which they may
guard, as in ``if n > self.size: self.table = ...``, and flags with those of modules below as well. By themselves they are
left as they are, like any effect of Python code: they may as well guard what nobody puts back.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ._module_plan import ModulePlan, Slot

__all__ = ["ABSENT", "ATOMS", "HAD_GRAPH", "WAS_NONE", "carries_graph", "is_guard", "rebound"]

#: Stands for what a name is bound to that is not there.
ABSENT = object()
#: Stands for an object that carried a graph, which to keep would keep the graph of the forward before.
HAD_GRAPH = object()
#: Stands for None where it goes with a tensor of the same module.
WAS_NONE = object()

#: Types of values that have no content to change.
ATOMS = frozenset({int, float, complex, bool, str, bytes, torch.Size, torch.dtype, torch.device, type(None)})
_CONTAINERS = (list, tuple, dict, set, deque)
#: What is no number, flag or the like.
_PARTS = (torch.Tensor, torch.nn.Module, ModulePlan)


def rebound(
    namespaces: Sequence[tuple[dict[str, Any], dict[str, Any]]], changed_owners: Callable[[], set[int]]
) -> list[tuple[Slot, Any]]:
    """Returns names with the objects that they had.

    Args:
        namespaces: Dictionaries of modules, and how they were before forward, in pairs: attributes, and buffers.
        changed_owners: Returns the ``id`` of each dictionary that has a tensor which forward has changed.
    """
    found: list[tuple[Slot, Any]] = []
    changed: set[int] | None = None
    for (own, before), (buffers, buffers_before) in zip(namespaces[::2], namespaces[1::2], strict=True):
        if not _is_bound_alike(buffers, buffers_before):
            found += _turned_to_tensors(buffers, buffers_before)
        if _is_bound_alike(own, before):
            continue
        others = [(name, value) for name, value in before.items() if own.get(name, ABSENT) is not value]
        tensors = _turned_to_tensors(own, before)
        tensors += [((own, name), _or_was_none(value)) for name, value in others if _are_of_tensors(value, own.get(name))]
        plain = [(name, value) for name, value in others if _may_guard(value, own.get(name, ABSENT))]
        if plain:
            changed = changed_owners() if changed is None else changed
            if not (tensors or not changed.isdisjoint(map(id, (own, buffers, own.get("_parameters"))))):
                plain = [(name, value) for name, value in plain if type(value) is bool]
                plain = plain if changed and not changed.isdisjoint(_owners_below(own)) else []
            found += [((own, name), _or_was_none(value)) for name, value in plain]
        found += tensors
    return found


def _owners_below(own: dict[str, Any]) -> Iterator[int]:
    """Goes through the ``id`` of each dictionary that may have tensors of the modules in a module."""
    todo = list(own["_modules"].values())
    while todo:
        child = todo.pop()
        if child is not None:
            below = vars(child)
            yield from map(id, (below, below.get("_buffers"), below.get("_parameters")))
            todo += below.get("_modules", {}).values()


def is_guard(value: Any, now: Any) -> bool:
    """Whether an object that a name is bound to again may have the function initialise something once more."""
    return value is WAS_NONE or type(value) is bool or (value is None and isinstance(now, torch.Tensor))


def _is_bound_alike(owner: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether names are bound to the very objects that they were bound to."""
    return len(owner) == len(before) and not any(map(operator.is_not, list(owner.values()), before.values()))


def _turned_to_tensors(owner: dict[str, Any], before: dict[str, Any]) -> list[tuple[Slot, Any]]:
    """Returns names that are bound to a tensor by now, and were not: caches that forward builds, averages that begin as 0.0."""
    return [
        ((owner, name), before.get(name, ABSENT))
        for name, value in list(owner.items())
        if isinstance(value, torch.Tensor) and (name not in before or type(before[name]) in ATOMS)
    ]


def _may_guard(value: Any, now: Any) -> bool:
    """Whether an attribute that was bound to something else is a number, a flag, or a value of another kind."""
    if isinstance(value, _PARTS) or isinstance(now, _PARTS) or now is ABSENT:
        return False
    return value is not None or type(now) in ATOMS or (type(now) is tuple and ATOMS.issuperset(map(type, now)))


def _or_was_none(value: Any) -> Any:
    return WAS_NONE if value is None else value


def _are_of_tensors(value: Any, now: Any) -> bool:
    """Whether values are containers or None, and hold tensors."""
    return all(one is None or isinstance(one, _CONTAINERS) for one in (value, now)) and any(
        _has_tensor(one, _is_any, levels=2) for one in (value, now)
    )


def carries_graph(value: Any) -> bool:
    """Whether a value is a tensor with a history, or holds one."""
    if isinstance(value, torch.Tensor):  # as most are
        return value.requires_grad and _has_history(value)
    return _has_tensor(value, _has_history, levels=3)


def _has_tensor(value: Any, test: Callable[[torch.Tensor], bool], *, levels: int) -> bool:
    """Whether a value is a tensor that passes a test, or holds one so many levels down."""
    if isinstance(value, torch.Tensor):
        return test(value)
    if not isinstance(value, _CONTAINERS) or not levels:
        return False
    inner = list(value.values() if isinstance(value, dict) else value)
    return any(_has_tensor(one, test, levels=levels - 1) for one in inner)


def _is_any(tensor: torch.Tensor) -> bool:
    return True


def _has_history(tensor: torch.Tensor) -> bool:
    try:
        return tensor.requires_grad and not tensor.is_leaf
    except RuntimeError:  # a view of many whose base was modified, which has lost its graph
        return True
