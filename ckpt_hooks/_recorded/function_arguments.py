"""The arguments of custom functions: taken apart, compared, and held for a rerun where that is safe."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._ambient import streams
from ckpt_hooks._ambient.streams import is_same_state
from ckpt_hooks._tensors.containers import ATOMS, Capture, TensorAt
from ckpt_hooks._tensors.copies import is_dense
from ckpt_hooks._torch.modes import FAKE
from ckpt_hooks._torch.tensors import is_freed, is_kept_anyway

from .values import Store

#: The size in bytes up to which arguments from outside without a history (weights, tables) are compared. Kernels do not write
#: to weights, and to look at so many bytes twice takes some 0.2 ms.
MOST_COMPARED = 1 << 20


_tensor_at = functools.cache(TensorAt)


def taken_apart(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], list[torch.Tensor], tuple[bool, ...], str | None]:
    """Takes the arguments of a call apart."""
    tensors: list[torch.Tensor] = []
    needs: list[bool] = []
    arguments: list[Any] = []
    capture: Capture | None = None
    try:
        for one in args:
            if isinstance(one, torch.Tensor):
                arguments.append(_tensor_at(len(tensors)))
                needs.append(one.requires_grad)
                tensors.append(one)
                continue
            needs.append(False)
            if type(one) not in ATOMS:
                capture = capture or Capture(tensors)
                one = capture.value(one, "")
            arguments.append(one)
        if kwargs:
            capture = capture or Capture(tensors)
            needs += [isinstance(one, torch.Tensor) and one.requires_grad for one in kwargs.values()]
            kwargs = {name: capture.value(one, "") for name, one in kwargs.items()}
    except TypeError:  # from an iterator, at whatever depth
        tensors += [one for one in args[len(arguments) :] if isinstance(one, torch.Tensor)]
        return [], {}, tensors, (), "has an iterator among its arguments, which can be read once"
    reason = None
    if capture is not None:
        capture.finish()
        if not all(map(_is_plain, capture.objects)):
            reason = "has an object among its arguments, which it may change"
    return arguments, kwargs, tensors, tuple(needs), reason


def is_compared(tensor: torch.Tensor, store: Store) -> bool:
    """Whether an argument is compared: not a large weight or table, and nothing without contents."""
    if type(tensor) is FAKE or not is_dense(tensor) or tensor.is_meta or not tensor.numel() or is_freed(tensor):
        return False
    is_weight = store.external and (not tensor.requires_grad or is_kept_anyway(tensor))
    return not is_weight or tensor.nbytes <= MOST_COMPARED


def _is_plain(value: Any) -> bool:
    """Whether an argument is safe to hold for a rerun: a value without parts, or a function or class which is there anyway."""
    # An object with parts may lead to the graph, by ways which the garbage collector cannot see: a leak for ever.
    if isinstance(value, torch.Generator):
        return False
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    return isinstance(value, (type, types.BuiltinFunctionType)) or not gc.is_tracked(value)


def read_streams() -> streams.Snapshot:
    """Returns the states of random streams other than the CPU's, whose draws are noted one by one."""
    return None, streams.read_devices(), tuple((stream, stream.read()) for stream in streams.TRACKED)


def has_moved(before: streams.Snapshot, after: streams.Snapshot) -> bool:
    """Whether a random stream other than the CPU's has moved."""
    return before[1] is not after[1] or any(
        not is_same_state(state, now) for (_, state), (_, now) in zip(before[2], after[2], strict=True)
    )
