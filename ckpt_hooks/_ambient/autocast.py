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

# The default dtype of each type. A region outside of autocast may enter autocast without a dtype, and gets this one, in a
# backward under autocast too.
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
    """Restores autocast as of :func:`capture`, off for every type if None; returns the settings before."""
    before = capture()
    # A level of nesting, as of ``torch.autocast``: casts are cached within, and dropped with the last level.
    torch.autocast_increment_nesting()
    _write((before[0], _OFF) if captured is None else captured)
    return before


def leave(before: Snapshot) -> None:
    """Restores autocast as of before :func:`enter`."""
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    _write(before)
