"""How a recompute is compared with its forward.

The default compares shape, dtype and device of each tensor that a recompute saves with those that forward saved, which costs
no look at the values and no synchronisation. The comparison itself is one of two lists, when a rerun has ended
(:mod:`ckpt_hooks._filling`); this module names the choices and puts findings into words.
"""

from __future__ import annotations

import torch

__all__ = ["DETERMINISM_CHECKS", "describe", "unknown_determinism_check"]

#: What ``determinism_check`` may be, and whether it notes and compares metadata.
DETERMINISM_CHECKS: dict[str, bool] = {"default": True, "none": False}


def unknown_determinism_check(determinism_check: object) -> ValueError:
    """Returns the error for a ``determinism_check`` that is not among :data:`DETERMINISM_CHECKS`."""
    choices = ", ".join(repr(choice) for choice in DETERMINISM_CHECKS)
    return ValueError(
        f"determinism_check should be one of {choices}, but got {determinism_check!r}. "
        "'default' compares shape, dtype and device of what forward and recompute saved; 'none' compares nothing."
    )


def describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """Returns metadata in words, as in ``"float32[4, 8] on cpu"``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
