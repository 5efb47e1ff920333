"""Saved-tensor hooks of frames: telling frames' hooks from the user's, and ending a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._torch import pop_saved_tensors_hooks

from .frame import Frame
from .stack import stack

__all__ = ["UNPACKS", "are_of_frame", "close_frame", "hand_back"]


def hand_back(tensor: torch.Tensor) -> torch.Tensor:
    """Unpacks a tensor in the graph made by a rerun: the tensor itself."""
    return tensor


#: The unpack hooks of all kinds of frames, each added by its own.
UNPACKS: list[Callable[[Any], torch.Tensor]] = []


def are_of_frame(hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> bool:
    """Whether a pair of hooks belongs to a frame, in forward or in a rerun."""
    return hooks[1] in UNPACKS or hooks[1] is hand_back


def close_frame(frame: Frame) -> None:
    """Ends the forward of the innermost frame, well or by an exception; the parent is innermost again."""
    pop_saved_tensors_hooks()
    stack.innermost, frame.parent = frame.parent, None
    frame.release()
    del frame.release
