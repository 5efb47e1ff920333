"""Calls of TorchScript in function frames: what a call saves is kept, as without a region.

TorchScript saves other tensors in the first calls of a function than in later ones: the first call takes notes, and later ones
have derivatives of their own, by plans whose guards only TorchScript knows
(https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/OVERVIEW.md#profiling-programs). A rerun is a later call, so its
saved tensors cannot stand for those of forward: they are put aside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.frame import Frame, stack
from ckpt_hooks._core.holdings import Cause, Kept, Reason, TrackedKept
from ckpt_hooks._core.hooks import are_of_frame, unpack_kept
from ckpt_hooks._torch.autograd import pop_saved_tensors_hooks, push_saved_tensors_hooks, top_saved_tensors_hooks
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.functions import divert_scripted
from ckpt_hooks._torch.tensors import detach_past_modes

_CAUSE = Cause(Reason.NOT_REPLAYED, "saved by TorchScript")


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    # An output held by its own node would never go. Autograd gives the history back as it unpacks.
    return tensor if tensor.is_leaf and tensor.requires_grad else detach_past_modes(tensor)


@skipped
def _keeping(frame: Frame) -> Callable[[torch.Tensor], Kept]:
    path, watch = frame.path, frame.watch  # not the frame, which would live as long as the graph

    def keep(tensor: torch.Tensor) -> Kept:
        kept = TrackedKept([_without_history(tensor), tensor._version, path])
        kept.cause = _CAUSE
        return kept if watch is None else watch.kept(None, kept, tensor)

    return keep


@skipped
def _run(call: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
    frame: Any = stack.innermost
    if frame is None or frame.kind != "function":
        return call(function, *args, **kwargs)
    hooks = top_saved_tensors_hooks(False) if torch.is_grad_enabled() else None
    if hooks is not None and not are_of_frame(hooks):
        hooks = None
    if hooks is not None:
        if frame.recomputing:
            push_saved_tensors_hooks(_without_history, hooks[1])
        else:
            push_saved_tensors_hooks(_keeping(frame), unpack_kept)
    try:
        return call(function, *args, **kwargs)
    finally:
        if hooks is not None:
            pop_saved_tensors_hooks()


@functools.cache
def watch_scripted() -> None:
    """Has calls of TorchScript in regions run as above, from the first region of the process on."""
    divert_scripted(_run)
