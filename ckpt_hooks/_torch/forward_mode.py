"""Forward-mode differentiation: tangents of tensors, in the level that is in force.

2.11 to 2.15: the number of the level. Goes with a public way to ask whether there is a level.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["has_tangent"]


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
