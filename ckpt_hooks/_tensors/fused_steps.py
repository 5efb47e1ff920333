"""Steps of fused optimizers, which write to parameters without counting the version.

Other optimizers of torch write to parameters in place and count the version; ``fused=True`` does not. A recompute would take
such a parameter for forward's, in spite of a step in between. From the first region on, this module counts fused steps. Torch's
own counters stay as they are: plain autograd, which takes no notice of such a step, goes on as without regions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_hooks._torch.tensors import storage_of

__all__ = ["num_fused_steps", "stepped_since", "watch_fused_steps"]

_count = 0
# The number of the latest step which wrote to a parameter, by the address of its object and of its storage. A tensor at the
# address of a dead parameter is younger than that step, which does not count for it.
_latest: dict[int | None, int] = {}


@functools.cache  # one hook is enough
def watch_fused_steps() -> None:
    """Counts the steps of fused optimizers from now on."""
    register_optimizer_step_post_hook(_count_step)


def num_fused_steps() -> int:
    """Returns the number of fused steps so far."""
    return _count


def stepped_since(tensor: torch.Tensor, count: int) -> bool:
    """Whether a step has written to a tensor, or to its storage.

    Args:
        tensor: The tensor.
        count: An earlier result of :func:`num_fused_steps`; only later steps count.
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
