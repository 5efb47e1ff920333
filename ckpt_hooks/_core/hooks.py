"""Saved-tensor hooks of frames: telling them from the user's, and removing them when a forward returns or raises.

Ctrl-C may raise between any two bytecodes: after a hook is pushed and before the frame knows, or just before a context manager
exits. So a region first notes the state of its thread, and restores that state when an exception leaves the region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._torch.autograd import Hooks, pop_saved_tensors_hooks, push_saved_tensors_hooks, top_saved_tensors_hooks
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.modes import dispatch_mode_at, num_dispatch_modes
from ckpt_hooks.errors import CheckpointError

from .descriptions import RegionPath, format_path, region_in_words
from .frame import Frame, stack
from .modes import is_quiet, leave_modes


class StopRecompute(BaseException):
    """Ends a rerun with all wanted values. Not an ``Exception``, so that no handler of exceptions catches the stop (Rule 8)."""


class HandBack:
    """The unpack hook of a rerun's graph, which holds numbers in place of values."""

    # A result that escapes (to a global list, say) keeps its graph. If that graph held the values, an escaped tensor would
    # keep all that the rerun has saved. So it holds numbers, and only a backward inside the function gets the values.
    __slots__ = ("_path", "_values")

    def __init__(self, values: Sequence[torch.Tensor], path: RegionPath) -> None:
        self._values, self._path = values, path  # value number n is at index n - 1; emptied when the rerun ends

    @skipped
    def __call__(self, packed: int | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if packed > len(self._values):
            raise CheckpointError(
                f"{region_in_words(format_path(self._path))}: backward goes through a tensor that a recompute of the region "
                "stored outside, such as in a global list. Tensors that a recompute saves for backward are freed when it ends. "
                "Store forward's tensor instead: store only where is_recomputing() is False.",
                region=format_path(self._path),
            )
        return self._values[packed - 1]


#: The unpack hook of each kind of frame, added by the module of that kind, and whether the hook hands out a tensor only once.
UNPACKS: dict[Callable[[Any], torch.Tensor], bool] = {}


def are_of_frame(hooks: Hooks) -> bool:
    """Whether a pair of hooks belongs to a frame, in forward or in a rerun."""
    return hooks[1] in UNPACKS or type(hooks[1]) is HandBack


def close_frame(frame: Frame) -> None:
    """Ends the forward of the innermost frame, after a return or an exception, and makes its parent innermost."""
    release = frame.release
    del frame.release  # first: it refers to the frame, and an interrupt below would leave that cycle
    others = []  # hooks that the user has pushed in the region and not popped
    while (hooks := top_saved_tensors_hooks(False)) is not None and not are_of_frame(hooks):
        others.append(hooks)
        pop_saved_tensors_hooks()
    pop_saved_tensors_hooks()
    for hooks in reversed(others):
        push_saved_tensors_hooks(*hooks)
    stack.innermost, frame.parent = frame.parent, None
    release()


#: The innermost saved-tensor hooks, the number of dispatch modes, the innermost frame, and whether gradients are enabled.
ThreadMark = tuple["Hooks | None", int, "Frame | None", bool]


def mark_thread() -> ThreadMark:
    return top_saved_tensors_hooks(False), num_dispatch_modes(), stack.innermost, torch.is_grad_enabled()


def rewind(mark: ThreadMark, error: BaseException | None) -> None:
    """Takes hooks and modes of regions off this thread, and closes open frames, down to a mark."""
    hooks, modes, frame, grad_enabled = mark
    # If regions left nothing behind, the user's hooks and modes stay.
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


def close(error: BaseException | None, *steps: Callable[[], object]) -> None:
    """Runs every closing step, even if some fail; raises the first failure if the block had none."""
    first = None if isinstance(error, (StopRecompute, GeneratorExit)) else error  # these two exceptions are no failures
    for step in steps:
        try:
            step()
        except BaseException as another:
            first = another if first is None else first
    if first is not None and first is not error:
        try:
            raise first
        finally:
            del first, error  # or a cycle stays: the traceback refers to this call


def undo(step: Callable[..., object], *args: Any) -> None:
    """Calls an undo step, and calls it again if an exception, such as Ctrl-C, interrupts the first call."""
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
