"""The frame stack of each thread, and whether the thread is recomputing.

Autograd's own stack of hooks already gives each saved tensor to the innermost frame (Rule 1). This one says who that frame's
parent is, and it is what a recompute exchanges for its own, so that it runs as if no frame were active (Rule 3).
"""

from __future__ import annotations

import threading
from threading import get_ident

from .frame import Frame

__all__ = ["Presence", "is_crowded", "is_recomputing", "stack"]


class Presence:
    """Counts the threads besides the main one that run forwards of regions; goes when its thread does."""

    count = 0
    _lock = threading.Lock()

    def __init__(self) -> None:
        with Presence._lock:
            Presence.count += 1

    def __del__(self) -> None:
        with Presence._lock:
            Presence.count -= 1


class FrameStack(threading.local):
    """One thread's frames, linked from the innermost to its parents.

    Attributes:
        innermost: The frame whose forward or recompute is running, or None.
        presence: What says that this thread runs forwards; None for the main thread, and as long as it has run none.
    """

    innermost: Frame | None = None
    presence: Presence | None = None


stack = FrameStack()
_main_thread = threading.main_thread().ident


def is_crowded() -> bool:
    """Whether threads besides the main one run regions, this one among them, whose forward is about to begin.

    What belongs to the process cannot be borrowed for a while then. A thread that merely runs a backward, as those of
    autograd's engine do, does not count: it works for another one that waits.
    """
    if get_ident() != _main_thread and stack.presence is None and stack.innermost is None:
        stack.presence = Presence()
    return Presence.count > 0


def is_recomputing() -> bool:
    """Whether this thread is inside the recompute of a region.

    A function frame runs its function again during backward, with all its side effects. Code that must not happen twice
    (a log line, a counter, an auxiliary loss) asks here.

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
    frame = stack.innermost
    while frame is not None and not frame.recomputing:
        frame = frame.parent
    return frame is not None
