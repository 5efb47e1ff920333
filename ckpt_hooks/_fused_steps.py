"""Steps of fused optimizers, counted as the writes that they are.

Every optimizer of torch writes to its parameters in place, which their version counters count; but ``fused=True`` leaves that
out. So what a region saved, or is to read again, would be taken for what forward saw although a step came in between. From the
first region on such steps are counted: whoever asks for what they have changed gets the error that any other optimizer gives,
from a recompute as from plain autograd.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["watch_fused_steps"]


@functools.cache  # one hook is enough
def watch_fused_steps() -> None:
    """Counts the steps of fused optimizers from now on."""
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([one for one in group["params"] if one.grad is not None and not one.is_inference()])
