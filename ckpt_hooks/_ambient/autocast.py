"""Autocast of every device type: enabled, dtype, and the cache of cast weights."""

from __future__ import annotations

import torch

__all__ = ["Snapshot", "capture", "enter", "leave"]

# Whether casts of weights are cached, and (enabled, dtype) for each device type in order.
Snapshot = tuple[bool, tuple[tuple[bool, torch.dtype], ...]]

_DEVICE_TYPES = tuple(
    device_type
    for device_type in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "maia", "ipu", "xla", "privateuseone")
    if torch.amp.is_autocast_available(device_type)
)

# What each type's dtype is where nobody set it, which is what a function of a region outside of autocast meets that enters
# autocast without a dtype, in a backward that runs under autocast.
_OFF = tuple((False, torch.get_autocast_dtype(device_type)) for device_type in _DEVICE_TYPES)


def _write(snapshot: Snapshot) -> None:
    cache_enabled, settings = snapshot
    torch.set_autocast_cache_enabled(cache_enabled)
    for device_type, (enabled, dtype) in zip(_DEVICE_TYPES, settings, strict=True):
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)


def capture() -> Snapshot:
    """Returns the settings of every device type."""
    return torch.is_autocast_cache_enabled(), tuple(
        (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)) for device_type in _DEVICE_TYPES
    )


def enter(captured: Snapshot | None) -> Snapshot:
    """Makes autocast what it was at :func:`capture`, off for every type if None; returns what it was before."""
    before = capture()
    # A level of nesting, as ``torch.autocast`` opens one: casts are cached within it and dropped with the last level.
    torch.autocast_increment_nesting()
    _write((before[0], _OFF) if captured is None else captured)
    return before


def leave(before: Snapshot) -> None:
    """Makes autocast what it was before :func:`enter`."""
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    _write(before)
