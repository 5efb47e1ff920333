"""What an operator runs under: switches of the process, and gradient mode, by which some kernels choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_hooks._ambient import autocast, flags
from ckpt_hooks._ambient.current import Current
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.modes import pause_modes, resume_modes
from ckpt_hooks._operators.watched import watch_replay
from ckpt_hooks._torch import (
    BelowAutograd,
    PastFunctionModes,
    is_any_autocast_enabled,
    num_dispatch_modes,
    num_function_modes,
    resume_transforms,
    set_grad_enabled,
    suspend_transforms,
)

__all__ = ["Around", "Below", "look_around"]


class Around:
    """What operators ran under.

    Attributes:
        switches: Those of the process.
        current: Devices and streams that were current; None where no accelerator was in use as the outermost region began.
        grad: Whether gradients were enabled.
    """

    __slots__ = ("current", "grad", "switches")

    def __init__(self, switches: flags.Snapshot, grad: bool, current: Current | None = None) -> None:
        self.switches = switches
        self.grad = grad
        self.current = current


_latest = Around(flags.capture(), torch.is_grad_enabled())


def look_around(current: Current | None) -> Around:
    """Returns what an operator would run under now; the same object as long as that is the same.

    Args:
        current: Devices and streams that are current.
    """
    global _latest
    latest, switches, grad = _latest, flags.capture(), torch.is_grad_enabled()
    if latest.switches is not switches or latest.grad is not grad or latest.current is not current:
        latest = _latest = Around(switches, grad, current)
    return latest


class Below:
    """Where operators are replayed: below autograd, with no frame, transform, function mode, or autocast around.

    Dispatch modes of the user's see them, those of the package do not.
    """

    __slots__ = (
        "_before",
        "_casts",
        "_current",
        "_frame",
        "_grad",
        "_guard",
        "_home",
        "_modes",
        "_operator_watch",
        "_paused",
        "_tensors",
        "_transforms",
        "_undo",
    )

    def __init__(self, frame: Frame) -> None:
        """Prepares to replay.

        Args:
            frame: The frame that is replayed.
        """
        self._frame = frame
        self._home = self._current = frame.current
        self._tensors: Mapping[int, torch.Tensor] = {}

    def __enter__(self) -> Below:
        self._paused = pause_modes() if num_dispatch_modes() else ()
        self._transforms = suspend_transforms()
        self._casts = autocast.enter(None) if is_any_autocast_enabled() else None
        self._modes = PastFunctionModes() if num_function_modes() else None
        if self._modes is not None:
            self._modes.__enter__()
        self._grad = torch.is_grad_enabled()
        self._before: Around | None = None
        self._undo: Any = None
        self._guard = BelowAutograd()
        self._guard.__enter__()
        self._operator_watch = None if self._frame.watch is None else watch_replay(self._frame)
        return self

    def under(self, around: Around, tensors: Mapping[int, torch.Tensor]) -> None:
        """Makes what operators run under the same as at forward; undone in the end.

        Args:
            around: What they ran under.
            tensors: What they may read.
        """
        self._tensors = tensors
        if around.current is not self._current:
            self._move(around.current)
        set_grad_enabled(around.grad)
        undo = flags.enter(around.switches)
        if self._undo is None or (undo[1] is not None and self._undo[1] is None):
            self._undo = undo

    def _move(self, current: Current | None) -> None:
        """Makes other streams current, which wait for those of the operators before, and may read what is there."""
        if current is not None and self._current is not None and current != self._current:
            self._current.move(current, self._tensors.values())
        self._current = current or self._current

    def __exit__(self, *exc_info: object) -> None:
        if self._operator_watch is not None:
            self._operator_watch.__exit__()
        self._move(self._home)
        self._guard.__exit__(None, None, None)
        if self._undo is not None:
            flags.leave(self._undo)
        set_grad_enabled(self._grad)
        if self._modes is not None:
            self._modes.__exit__(None, None, None)
        if self._casts is not None:
            autocast.leave(self._casts)
        if self._transforms is not None:
            resume_transforms(self._transforms)
        if self._paused:
            resume_modes(self._paused)
