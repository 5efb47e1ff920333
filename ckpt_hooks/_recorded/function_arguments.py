"""Arguments of custom functions: those which a tape compares, and those which it may hold for a rerun."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch

from ckpt_hooks._ambient import rng
from ckpt_hooks._ambient.streams import is_same_state
from ckpt_hooks._tensors.copies import is_dense
from ckpt_hooks._torch import FAKE, is_freed, is_kept_anyway

from .values import Store

__all__ = ["MOST_COMPARED", "has_moved", "is_compared", "is_plain_value"]

#: The size in bytes up to which arguments from outside without a history (weights, tables) are compared. Kernels do not write
#: to weights, and to look at so many bytes twice takes some 0.2 ms.
MOST_COMPARED = 1 << 20


def is_compared(tensor: torch.Tensor, store: Store) -> bool:
    """Whether an argument is compared: not a large weight or table, and nothing without contents."""
    if store.external and tensor.nbytes > MOST_COMPARED and (not tensor.requires_grad or is_kept_anyway(tensor)):
        return False
    return type(tensor) is not FAKE and is_dense(tensor) and not tensor.is_meta and tensor.numel() > 0 and not is_freed(tensor)


def is_plain_value(value: Any) -> bool:
    """Whether an argument is safe to hold for a rerun: a value without parts, or a function or class which is there anyway.

    An object with parts may lead to the graph, by ways which the garbage collector cannot see.
    """
    if isinstance(value, torch.Generator):
        return False
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    return isinstance(value, (type, types.BuiltinFunctionType)) or not gc.is_tracked(value)


def has_moved(before: rng.Snapshot, after: rng.Snapshot) -> bool:
    """Whether a random stream other than the CPU's has moved."""
    return before[1] is not after[1] or any(
        not is_same_state(state, now) for (_, state), (_, now) in zip(before[2], after[2], strict=True)
    )
