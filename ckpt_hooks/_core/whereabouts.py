"""Places in the user's program: the present line, and the module whose forward runs."""

from __future__ import annotations

import os
import sys
import types

import torch

from ckpt_hooks._torch import MODULE_CALL

from .words import is_of_library

__all__ = ["module_in_call", "site_of"]


def site_of(frame: types.FrameType | None) -> str | None:
    """Returns the innermost line outside of this package and of torch, as in ``"model.py:12"``; None without one.

    Args:
        frame: The frame of Python to start at.
    """
    while frame is not None and is_of_library(frame):
        frame = frame.f_back
    return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def module_in_call(module: torch.nn.Module | None) -> str | None:
    """Returns the name of a module in the outermost called module; ``""`` for the outermost module itself.

    Args:
        module: The module; None for the innermost called module.

    Returns:
        The name; None without a module, or if the outermost module does not contain this module.
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
