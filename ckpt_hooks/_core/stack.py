"""The frame stack of each thread, and whether the thread is recomputing.

Autograd's own stack of hooks gives each saved tensor to the innermost frame (Rule 1). This stack has the frame's parents. A
recompute exchanges the stack for its own, and runs as if no frame were active (Rule 3).
"""

from __future__ import annotations

import threading

from .frame import Frame, is_in_recompute

__all__ = ["is_recomputing", "stack"]


class FrameStack(threading.local):
    """One thread's open frames: the innermost one, which links to the frame around, and so on.

    Attributes:
        innermost: The frame whose forward or recompute is running, or None.
    """

    innermost: Frame | None = None


stack = FrameStack()


def is_recomputing() -> bool:
    """Whether this thread is inside the recompute of a region.

    A function frame runs its function again during backward, with all side effects; a recorded region, the forward of a custom
    ``autograd.Function``. Code which must not happen twice (a log
    line, a counter, an auxiliary loss) asks here.

    Returns:
        True inside a recompute, at whatever depth; False in forward and outside of regions.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, is_recomputing
        >>> def block(x):
        ...     if not is_recomputing():
        ...         print("forward")
        ...     return x.sin().cos()
        >>> checkpoint(block, torch.ones(2, requires_grad=True)).sum().backward()
        forward
    """
    return is_in_recompute(stack.innermost)
