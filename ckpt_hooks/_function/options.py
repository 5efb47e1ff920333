"""Options of a function frame."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from ckpt_hooks._tensors.determinism import DEFAULT_CHECK, Check

__all__ = ["DEFAULT_OPTIONS", "RegionOptions", "name_of_function"]


@dataclasses.dataclass(frozen=True)
class RegionOptions:
    """Options of a region's recomputes.

    Attributes:
        preserve_rng_state: Whether a rerun draws the random numbers of forward.
        early_stop: Whether a rerun ends with the last value needed, or runs the function to its end.
        preserve_buffers: Whether a rerun finds buffers and the like as forward found them, and leaves them unchanged.
        check: The comparison with forward.
        name: The region's name in errors and reports; the function's own if None.
        respect_hooks: Whether outputs kept by a selective policy go through the saved-tensor hooks around the region.
        offload_inputs: Whether inputs go to the host, where no saved-tensor hooks are active around the region.
        split_backward: Whether values stay for a second backward; see :mod:`ckpt_hooks._core.split`.
    """

    preserve_rng_state: bool = True
    early_stop: bool = True
    preserve_buffers: bool = True
    check: Check = DEFAULT_CHECK
    name: str | None = None
    respect_hooks: bool = True
    offload_inputs: bool = False
    split_backward: bool = False


DEFAULT_OPTIONS = RegionOptions()


def name_of_function(function: Callable[..., Any]) -> str:
    """Returns the name of a region which was given none."""
    # A module's __getattr__ would look through its parameters and submodules, and fail slowly.
    if isinstance(function, Module):
        return type(function).__qualname__
    return getattr(function, "__qualname__", None) or type(function).__qualname__
