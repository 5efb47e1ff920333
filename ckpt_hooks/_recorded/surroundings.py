"""Surroundings of operators: switches of the process, and gradient mode, on which some kernels depend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_hooks._ambient import switches
from ckpt_hooks._ambient.current import Current
from ckpt_hooks._ambient.switches import AUTOCAST
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.modes import pause_modes, resume_modes
from ckpt_hooks._operators.operator_events import watch_replay
from ckpt_hooks._torch.autograd import set_grad_enabled
from ckpt_hooks._torch.modes import PastFunctionModes, num_function_modes, resume_transforms, suspend_transforms
from ckpt_hooks._torch.tensors import BelowAutograd


class Surroundings:
    """The surroundings of operators."""

    __slots__ = ("current", "grad", "switches")

    def __init__(self, current: Current | None) -> None:
        self.switches = switches.capture()  # switches of the process
        self.grad = torch.is_grad_enabled()  # whether gradients were enabled
        # Current devices and streams; None where no accelerator was in use as the outermost region began.
        self.current = current


class ReplayContext:
    """A context for replayed operators: below autograd, with no frame, transform, function mode, or autocast around.

    Dispatch modes of the user's see these operators; dispatch modes of the package do not.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._current = frame.current
        self._tensors: Mapping[int, torch.Tensor] = {}

    def __enter__(self) -> ReplayContext:
        self._paused = pause_modes()
        self._transforms = suspend_transforms()
        self._casts = AUTOCAST.enter(None) if AUTOCAST.is_there() else None
        self._modes = PastFunctionModes() if num_function_modes() else None
        if self._modes is not None:
            self._modes.__enter__()
        self._grad = torch.is_grad_enabled()
        self._undo: Any = None
        self._guard = BelowAutograd()
        self._guard.__enter__()
        self.operator_watch = None if self._frame.watch is None else watch_replay(self._frame)
        return self

    def under(self, surroundings: Surroundings, tensors: Mapping[int, torch.Tensor]) -> None:
        """Restores the surroundings of forward; undone at the end."""
        self._tensors = tensors
        if surroundings.current is not self._current:
            self._move(surroundings.current)
        set_grad_enabled(surroundings.grad)
        undo = switches.enter(surroundings.switches)
        if self._undo is None or (undo[1] is not None and self._undo[1] is None):
            self._undo = undo

    def suspend(self) -> None:
        """Runs what follows above autograd without gradients, with function modes, as custom functions run: until resumed."""
        self._guard.__exit__(None, None, None)
        if self._modes is not None:
            self._modes.__exit__(None, None, None)
        self._was_grad = torch.is_grad_enabled()
        set_grad_enabled(False)

    def resume(self) -> None:
        """Ends :meth:`suspend`."""
        set_grad_enabled(self._was_grad)
        if self._modes is not None:
            self._modes = PastFunctionModes()
            self._modes.__enter__()
        self._guard = BelowAutograd()
        self._guard.__enter__()

    def _move(self, current: Current | None) -> None:
        """Makes other streams current, which wait for the operators before, and may read the present tensors."""
        if current is not None and self._current is not None and current != self._current:
            self._current.move(current, self._tensors.values())
        self._current = current or self._current

    def __exit__(self, *exc_info: object) -> None:
        if self.operator_watch is not None:
            self.operator_watch.__exit__()
        self._move(self._frame.current)
        self._guard.__exit__(None, None, None)
        if self._undo is not None:
            switches.leave(self._undo)
        set_grad_enabled(self._grad)
        if self._modes is not None:
            self._modes.__exit__(None, None, None)
        if self._casts is not None:
            AUTOCAST.leave(self._casts)
        if self._transforms is not None:
            resume_transforms(self._transforms)
        resume_modes(self._paused)
