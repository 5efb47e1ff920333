"""Saved-tensor hooks of frames: telling frames' hooks from the user's, and ending a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._torch.autograd import pop_saved_tensors_hooks
from ckpt_hooks.errors import CheckpointError

from .descriptions import RegionPath, format_path
from .frame import Frame
from .stack import stack

__all__ = ["UNPACKS", "HandBack", "are_of_frame", "close_frame"]


class HandBack:
    """The unpack hook of the graph that a rerun makes, in which values stand by their numbers.

    A result that escapes (to a global list, say) keeps its graph. If that graph held the values, one escaped tensor would keep
    all that the rerun has saved. So it holds numbers, and only a backward inside the function gets the values.
    """

    __slots__ = ("_path", "_values")

    def __init__(self, values: Sequence[torch.Tensor], path: RegionPath) -> None:
        """Takes the values of the rerun, by the number before theirs; the sequence is emptied when the rerun ends."""
        self._values, self._path = values, path

    def __call__(self, packed: int | torch.Tensor) -> torch.Tensor:
        """Returns the value with a number, or the tensor itself.

        Raises:
            CheckpointError: If the rerun has ended.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        if packed > len(self._values):
            raise CheckpointError(
                f"region {'/'.join(format_path(self._path))!r}: backward goes through a tensor that a recompute of the region "
                "has left outside, in a global list, say. What a recompute saves is gone when it ends. Use the tensor that "
                "forward left, and ask is_recomputing() before you keep one.",
                region=format_path(self._path),
            )
        return self._values[packed - 1]


#: The unpack hooks of all kinds of frames, each added by its own.
UNPACKS: list[Callable[[Any], torch.Tensor]] = []


def are_of_frame(hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> bool:
    """Whether a pair of hooks belongs to a frame, in forward or in a rerun."""
    return hooks[1] in UNPACKS or type(hooks[1]) is HandBack


def close_frame(frame: Frame) -> None:
    """Ends the forward of the innermost frame, well or by an exception; the parent is innermost again."""
    release = frame.release
    del frame.release  # first: with it, and out of the stack, an interrupted frame would be a cycle
    pop_saved_tensors_hooks()
    stack.innermost, frame.parent = frame.parent, None
    release()
