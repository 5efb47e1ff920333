"""Switches of the process which choose kernels and their exactness: default dtype, determinism, precision, attention.

The switches are compared once a region in forward and once a recompute, and read in full only after a move. A recompute sets
the switches which differ, and sets them back afterwards. When a recompute has ended, a few switches are compared again, which
functions tend to set without a context manager, and which an early stop leaves half done.

A precision of float32 is the precision in effect for a kind of operator, wherever it was set. Torch has an old and a new way to
set it. The getters of the old way, which are faster, raise where both ways were used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import switches
from .switches import ABSENT, DEVICES, GlobalStateGuard, Switch, are_devices_in_use

__all__ = ["Snapshot", "Undo", "capture", "enter", "leave", "read_common", "read_devices", "read_fast"]


def _reader(*which: Switch, fast: bool = True) -> Callable[[], list[Any]]:
    """Returns one expression which reads every switch, as if written out: a loop costs half as much again."""
    names: dict[str, Any] = {"absent": ABSENT}
    terms = []
    for index, switch in enumerate(which):
        if switch.place is None:
            names[f"get_{index}"] = (switch.read_fast if fast else None) or switch.read
            terms.append(f"get_{index}()")
        else:
            names[f"there_{index}"], name = switch.place
            terms.append(f"there_{index}[{name!r}]" if name in switch.place[0] else f"there_{index}.get({name!r}, absent)")
    read: Callable[[], list[Any]] = eval(f"lambda: [{', '.join(terms)}]", names)
    return read


#: Reads the switches unknown to guards; raises ``RuntimeError`` where both ways to set a precision were used.
read_fast = _reader(*switches.COMMON, *switches.FURTHER)
_read_slow = _reader(*switches.COMMON, *switches.FURTHER, fast=False)
#: Reads the first of these: the switches for operators which heed no rarer ones.
read_common = _reader(*switches.COMMON)
_read_defaults = _reader(*switches.DEFAULTS)
_read_guarded = _reader(*switches.GUARDED)
_read_device_flags = _reader(*DEVICES)
# The first two guarded switches are compared after a recompute.
_get_default_dtype, _are_deterministic = (switch.read for switch in switches.GUARDED[:2])


def _read_unguarded() -> list[Any]:
    try:
        return read_fast()
    except RuntimeError:
        return _read_slow()


def read_devices() -> list[Any] | None:
    """Returns the switches for devices; None where no device is in use."""
    return _read_device_flags() if DEVICES and are_devices_in_use() else None


def _write(which: Sequence[Switch], values: Sequence[Any]) -> None:
    for switch, value in zip(which, values, strict=True):
        if value != switch.read():
            switch.write(value)


class Snapshot:
    """The values of the switches at some moment.

    Attributes:
        guard: Checks whether the guarded switches are unchanged.
        unguarded: Values of the other switches.
        common: The first of the unguarded values; see :data:`read_common`.
        guarded: Values of the guarded switches.
        devices: Values of the switches for devices; None where no device was in use.
    """

    __slots__ = ("_defaults", "common", "devices", "guard", "guarded", "unguarded")

    def __init__(self, unguarded: list[Any], devices: list[Any] | None) -> None:
        self.guard = GlobalStateGuard()
        self.unguarded = unguarded
        self.common = unguarded[: len(switches.COMMON)]
        self.guarded = _read_guarded()
        self.devices = devices
        self._defaults = _read_defaults()

    def holds(self, unguarded: list[Any]) -> bool:
        """Whether the switches have these values now; false also where gradient mode or autocast are not the same."""
        return self.guard.check() and unguarded == self.unguarded

    def write(self) -> None:
        """Sets the switches to these values."""
        # A default comes before the switches which it holds for. A switch of the old kind may move a switch of the new kind, so
        # a second pass sets the rest.
        for _ in range(2):
            _write(switches.DEFAULTS, self._defaults)
            _write([*switches.COMMON, *switches.FURTHER], self.unguarded)
            _write(switches.GUARDED, self.guarded)
        if self.devices is not None:
            _write(DEVICES, self.devices)


#: The captured switches, and the different switches found before a recompute, if any.
Undo = tuple[Snapshot, "Snapshot | None"]

_latest = Snapshot(_read_unguarded(), None)


def capture() -> Snapshot:
    """Returns the switches; regions with the same switches share one snapshot."""
    global _latest
    latest, unguarded = _latest, _read_unguarded()
    devices = read_devices()
    if not latest.holds(unguarded) or devices != latest.devices:
        latest = _latest = Snapshot(unguarded, devices)
    return latest


def enter(captured: Snapshot) -> Undo:
    """Restores the switches as of :func:`capture`, in the same gradient mode; returns the undo."""
    unguarded = _read_unguarded()
    devices = None if captured.devices is None else _read_device_flags()
    if captured.holds(unguarded) and devices == captured.devices:
        return captured, None
    before = Snapshot(unguarded, devices)
    try:
        captured.write()
    except BaseException:  # Ctrl-C
        before.write()
        raise
    return captured, before


def leave(undo: Undo) -> None:
    """Restores the switches as of before :func:`enter`."""
    captured, before = undo
    if before is not None:
        before.write()
    elif _get_default_dtype() is not captured.guarded[0] or _are_deterministic() is not captured.guarded[1]:
        captured.write()
