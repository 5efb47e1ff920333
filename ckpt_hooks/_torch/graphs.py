"""Autograd's graph, read without running anything: the saved tensors of a node, and what stands for each; and its engine.

2.11 to 2.15. Goes when torch has a public way to list the tensors that a node saved, without the unpack hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from ckpt_hooks._torch.autograd import NodeSavedTensor

__all__ = [
    "CAST_NODE",
    "LEAF_NODE",
    "SAVED_TENSORS",
    "attributes_of",
    "is_in_two_backwards",
    "is_packed",
    "packed_of",
    "saved_in",
]

#: The classes of saved tensors, which have the packed object as ``data``.
SAVED_TENSORS: tuple[type, ...] = (torch._C._autograd.SavedTensor, NodeSavedTensor)

# Likewise.
_functions: Any = torch._C._functions
#: The classes of the nodes of casts, and of the nodes which accumulate the gradients of leaves.
CAST_NODE, LEAF_NODE = _functions.ToCopyBackward0, _functions.AccumulateGrad

# The attributes which hold saved tensors, by the class of nodes, one for each operator. Custom functions have one attribute.
_fields: dict[type, tuple[str, ...]] = {}
_OF_FUNCTIONS = ("_raw_saved_tensors",)

_NOTHING: Sequence[Any] = ()


def saved_in(node: Any) -> Iterable[Any]:
    """Returns the saved tensors of a node; none for a node whose backward has freed them.

    Nodes written in C++ outside of torch's own formulas show none, and neither does the function inside ``CopySlices``.
    """
    kind = type(node)
    fields = _fields.get(kind)
    if fields is None:
        if issubclass(kind, torch.autograd.function.BackwardCFunction):
            return _saved(node, _OF_FUNCTIONS)
        fields = _fields[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return _saved(node, fields) if fields else _NOTHING


def _saved(node: Any, fields: Iterable[str]) -> list[Any]:
    found: list[Any] = []
    for field in fields:
        try:
            saved = getattr(node, field)
        except RuntimeError:  # freed by a backward
            continue
        if isinstance(saved, (list, tuple)):
            found += saved
        elif saved is not None:
            found.append(saved)
    return found


def packed_of(saved: Any) -> Any:
    """Returns the tensor itself, or the result of the pack hook; None for a tensor that is undefined, or freed."""
    if type(saved) is NodeSavedTensor:
        (saved,) = saved_in(saved.output.grad_fn)
    try:
        return saved.data
    except RuntimeError:  # freed by a backward
        return None


def is_packed(saved: Any) -> bool:
    """Whether saved-tensor hooks have packed a saved tensor."""
    return type(saved) is NodeSavedTensor or saved.unpack_hook is not None


def attributes_of(node: Any) -> dict[str, Any]:
    """Returns the attributes on a custom function's ``ctx``; none for other nodes."""
    return getattr(node, "__dict__", {})


# By which every backward is run that Python begins. 2.11 to 2.15. Goes with a public way to tell a backward in a hook.
_RUN_ENGINE = torch.autograd.graph._engine_run_backward.__code__


def is_in_two_backwards() -> bool:
    """Whether this thread runs a backward in the middle of another, as in a hook. Takes a walk of the stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and count < 2:
        count += frame.f_code is _RUN_ENGINE
        frame = frame.f_back
    return count == 2
