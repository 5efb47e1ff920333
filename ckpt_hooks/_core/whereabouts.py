"""Where in the user's program something happens: the line, and the module whose forward runs."""

from __future__ import annotations

import os
import sys
import types

import torch

from ckpt_hooks._torch import MODULE_CALL

from .words import is_of_library

__all__ = ["module_in_call", "site_of"]


def site_of(frame: types.FrameType | None) -> str | None:
    """Returns the innermost line that is neither of this package nor of torch, as in ``"model.py:12"``; None if there is none.

    Args:
        frame: A frame of Python, to start at.
    """
    while frame is not None and is_of_library(frame):
        frame = frame.f_back
    return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def module_in_call(module: torch.nn.Module | None) -> str | None:
    """Returns the name of a module in the outermost module that is being called, ``""`` for that one itself.

    Args:
        module: The module; the innermost that is being called if None.

    Returns:
        The name; None if no module is being called and none was given, or the outermost one does not have it.
    """
    outermost = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            outermost = frame.f_locals["self"]
            module = outermost if module is None else module
        frame = frame.f_back
    if outermost is None:
        return None if module is None else ""
    return next((name for name, other in outermost.named_modules() if other is module), None)
