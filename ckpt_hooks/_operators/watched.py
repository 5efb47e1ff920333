"""The dispatch mode which tells observers of operators, for observers which ask for operators."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._core.stack import is_recomputing, stack
from ckpt_hooks._core.whereabouts import site_of

from .facts import facts_of
from .kinds import Kind

__all__ = ["OperatorWatch", "wants_operators", "watch_forward", "watch_replay"]


class OperatorWatch(QuietDispatchMode):
    """Tells observers of the operators of a region and of regions inside: the observers of the innermost region."""

    def __init__(self, replayed: Frame | None = None) -> None:
        """Makes a mode.

        Args:
            replayed: The frame being replayed; None in a forward or a rerun.
        """
        super().__init__()
        self._replayed = replayed

    def _recreate_cm(self) -> OperatorWatch:
        """Returns another mode, for a rerun inside a rerun: the outer mode is paused meanwhile."""
        return OperatorWatch(self._replayed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs) if kwargs else func(*args)
        count_writes(func, args)
        kind = facts_of(func).kind
        if kind is Kind.RANGE:
            self.note_range(func, args)
            return output
        replayed = self._replayed
        frame = replayed or stack.innermost
        if not self.paused and kind is not Kind.IGNORED and frame is not None and frame.watch is not None:
            frame.watch.ran(
                str(func),
                _tensors_in((args, kwargs)),
                _tensors_in(output),
                in_recompute=replayed is not None or is_recomputing(),
                site=None if replayed is not None else site_of(sys._getframe(1)),
            )
        return output


def wants_operators(frame: Frame | None) -> bool:
    """Whether an observer of a frame wants to hear of operators."""
    return frame is not None and frame.watch is not None and frame.watch.wants_operators


def watch_forward(frame: Frame) -> OperatorWatch | None:
    """Returns the entered mode for a forward; None if no observer wants it, or the frame around has such a mode."""
    return OperatorWatch().__enter__() if wants_operators(frame) and not wants_operators(frame.parent) else None


def watch_replay(frame: Frame) -> OperatorWatch | None:
    """Returns the entered mode for a replay; None if no observer wants it."""
    return OperatorWatch(frame).__enter__() if wants_operators(frame) else None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]
