"""Steps of fused optimizers, which write to parameters without a version counter that tells.

Every optimizer of torch writes to its parameters in place, and their version counters count that; ``fused=True`` leaves them as
they are. So a parameter that a recompute reads again would be taken for the one that forward saw although a step came in
between. From the first region on such steps are counted here. Torch's own counters stay as they are: plain autograd, which
takes no notice of such a step, goes on as it does without regions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_hooks._torch import storage_of

__all__ = ["num_fused_steps", "stepped_since", "watch_fused_steps"]

_count = 0
# The number of the latest step that wrote to a parameter, by the address of its object and by that of its storage. A tensor
# that takes over the address of a dead parameter is younger than that step, and is not asked about it.
_latest: dict[int | None, int] = {}


@functools.cache  # one hook is enough
def watch_fused_steps() -> None:
    """Counts the steps of fused optimizers from now on."""
    register_optimizer_step_post_hook(_count_step)


def num_fused_steps() -> int:
    """Returns how many steps were counted."""
    return _count


def stepped_since(tensor: torch.Tensor, count: int) -> bool:
    """Whether a step has written to a tensor, or to the storage that it is in.

    Args:
        tensor: The tensor.
        count: What :func:`num_fused_steps` returned; steps before that are not asked for.
    """
    return _count > count and (_latest.get(id(tensor), 0) > count or _latest.get(storage_of(tensor), 0) > count)


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global _count
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        if group.get("fused"):
            _count += 1
            written = [parameter for parameter in group["params"] if parameter.grad is not None]
            _latest.update(dict.fromkeys(map(id, written), _count))
            _latest.update(dict.fromkeys(map(storage_of, written), _count))
            _latest.pop(None, None)  # of those without a storage
