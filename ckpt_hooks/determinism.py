"""How a recompute is compared with its forward.

Of each tensor that autograd saves, forward notes a few facts, and when a rerun has ended the same facts of what it saved are
compared with them: two lists, in one operation (:mod:`ckpt_hooks._filling`). By default these are shape, dtype, device and
version, none of which looks at a value or makes a device wait.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DEFAULT_CHECK", "DETERMINISM_CHECKS", "Check", "describe", "unknown_determinism_check", "version_of"]


@dataclass(frozen=True)
class Check:
    """What is compared.

    Attributes:
        facts: Returns what is noted of a tensor: shape, dtype, device and version, or the version alone. The version, which
            counts modifications in place, is compared whatever the user asks for: a value that was modified since it was saved
            is wrong, and plain autograd raises for it as well.
    """

    facts: Callable[[Any], Any]


DEFAULT_CHECK = Check(operator.attrgetter("shape", "dtype", "device", "_version"))

#: What ``determinism_check`` may be.
DETERMINISM_CHECKS: dict[str, Check] = {"default": DEFAULT_CHECK, "none": Check(operator.attrgetter("_version"))}


def unknown_determinism_check(determinism_check: object) -> ValueError:
    """Returns the error for a ``determinism_check`` that is not among :data:`DETERMINISM_CHECKS`."""
    choices = ", ".join(repr(choice) for choice in DETERMINISM_CHECKS)
    return ValueError(
        f"determinism_check should be one of {choices}, but got {determinism_check!r}. "
        "'default' compares shape, dtype and device of what forward and recompute saved; 'none' compares nothing."
    )


def version_of(facts: Any) -> int:
    """Returns the version that was noted with other facts, or alone."""
    version: int = facts[-1] if isinstance(facts, tuple) else facts
    return version


def describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """Returns metadata in words, as in ``"float32[4, 8] on cpu"``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
