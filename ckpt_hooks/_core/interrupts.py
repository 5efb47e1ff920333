"""Bringing a thread back to where it was before a region, whatever step an exception has come between.

Ctrl-C raises between any two steps of Python code: after a hook was pushed and before anybody knows, or where a context manager
is about to be left. So a region notes beforehand how its thread is, and an exception that leaves the region by any way brings
that back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._torch.autograd import Hooks, pop_saved_tensors_hooks, top_saved_tensors_hooks
from ckpt_hooks._torch.modes import dispatch_mode_at, num_dispatch_modes

from .frame import Frame
from .hooks import are_of_frame
from .modes import is_quiet, leave_modes
from .stack import stack

__all__ = ["ThreadMark", "mark_thread", "rewind", "undo"]

#: The innermost saved-tensor hooks, the number of dispatch modes, the innermost frame, and whether gradients are enabled.
ThreadMark = tuple["Hooks | None", int, "Frame | None", bool]


def mark_thread() -> ThreadMark:
    """Returns the state of this thread, for :func:`rewind`."""
    return top_saved_tensors_hooks(False), num_dispatch_modes(), stack.innermost, torch.is_grad_enabled()


def rewind(mark: ThreadMark, error: BaseException | None) -> None:
    """Takes hooks and modes of regions off this thread, and closes open frames, down to a mark.

    Args:
        mark: The mark, of :func:`mark_thread`.
        error: The exception which left the region. After an ``Exception`` with nothing of a region left over, hooks and modes
            of the user's stay.
    """
    hooks, modes, frame, grad_enabled = mark
    if isinstance(error, Exception) and not _is_anything_left(mark):
        return
    while top_saved_tensors_hooks(False) not in (hooks, None):
        pop_saved_tensors_hooks()
    leave_modes(modes)
    left, stack.innermost = stack.innermost, frame
    while left is not None and left is not frame:
        if hasattr(left, "release"):
            left.release()
            del left.release
        parent, left.parent = left.parent, None
        left = parent
    if torch.is_grad_enabled() != grad_enabled:
        torch.set_grad_enabled(grad_enabled)


def undo(step: Callable[..., object], *args: Any) -> None:
    """Calls an undo step; once more if an exception, such as Ctrl-C, interrupts it."""
    try:
        step(*args)
    except BaseException:
        step(*args)
        raise


def _is_anything_left(mark: ThreadMark) -> bool:
    hooks, modes, frame, _ = mark
    top = top_saved_tensors_hooks(False)
    return (
        stack.innermost is not frame
        or (top is not None and top != hooks and are_of_frame(top))
        or (num_dispatch_modes() > modes and is_quiet(dispatch_mode_at(num_dispatch_modes() - 1)))
    )
