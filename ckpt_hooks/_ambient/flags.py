"""Switches of the process which choose kernels and their exactness: default dtype, determinism, precision, attention.

The switches are compared once a region in forward and once a recompute, and read in full only after a move. A recompute sets
the switches which differ, and sets them back afterwards. When a recompute has ended, a few switches are compared again, which
functions tend to set without a context manager, and which an early stop leaves half done.

A precision of float32 is the precision in effect for a kind of operator, wherever it was set. Torch has an old and a new way to
set it. The getters of the old way, which are faster, raise where both ways were used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .switches import (
    ABSENT,
    CUDNN_PRECISION,
    DEVICE_FLAGS,
    FLAGS,
    GUARDED_FLAGS,
    MKLDNN_PRECISION,
    PRECISION_DEFAULTS,
    RARER_PRECISIONS,
    VARIABLES,
    Flag,
    StateGuard,
    are_devices_in_use,
    new_state_guard,
)

__all__ = ["Snapshot", "Undo", "capture", "enter", "leave", "read_common", "read_devices", "read_fast"]


def _reader(getters: list[Callable[[], Any]], variables: list[tuple[dict[str, Any], str]]) -> Callable[[], list[Any]]:
    """Returns one expression which reads every switch, as if written out: a loop costs half as much again."""
    names: dict[str, Any] = {f"get_{index}": getter for index, getter in enumerate(getters)}
    terms = [f"{name}()" for name in names]
    names["absent"] = ABSENT
    for index, (there, name) in enumerate(variables):
        names[f"there_{index}"] = there
        terms.append(f"there_{index}[{name!r}]" if name in there else f"there_{index}.get({name!r}, absent)")
    read: Callable[[], list[Any]] = eval(f"lambda: [{', '.join(terms)}]", names)
    return read


def _set_variable(variables: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        variables.pop(name, None)
    else:
        variables[name] = value


_some, _more = [getter for getter, _ in (*FLAGS, MKLDNN_PRECISION)], [getter for getter, _ in RARER_PRECISIONS]
#: Reads the switches unknown to guards; raises ``RuntimeError`` where both ways to set a precision were used.
read_fast = _reader([*_some, CUDNN_PRECISION[0], *_more], VARIABLES)
_read_slow = _reader([*_some, CUDNN_PRECISION[1], *_more], VARIABLES)
#: Reads the first of these: the switches for operators besides convolutions and recurrent layers.
read_common = _reader([*_some, CUDNN_PRECISION[0]], [])
_NUM_COMMON = len(_some) + 1
_read_defaults = _reader([getter for getter, _ in PRECISION_DEFAULTS], [])
_read_guarded = _reader([getter for getter, _ in GUARDED_FLAGS], [])
_read_device_flags = _reader([getter for getter, _ in DEVICE_FLAGS], [])
# The first two guarded switches are compared after a recompute.
(_get_default_dtype, _), (_are_deterministic, _) = GUARDED_FLAGS[:2]


def _read_unguarded() -> list[Any]:
    try:
        return read_fast()
    except RuntimeError:
        return _read_slow()


def read_devices() -> list[Any] | None:
    """Returns the switches for devices; None where no device is in use."""
    return _read_device_flags() if DEVICE_FLAGS and are_devices_in_use() else None


def _read_cudnn_precision() -> Any:
    try:
        return CUDNN_PRECISION[0]()
    except RuntimeError:
        return CUDNN_PRECISION[1]()


# In the order of a snapshot's values. A default comes before the switches it holds for.
_SWITCHES: list[Flag] = [
    *PRECISION_DEFAULTS,
    *FLAGS,
    MKLDNN_PRECISION,
    (_read_cudnn_precision, CUDNN_PRECISION[2]),
    *RARER_PRECISIONS,
    *((partial(there.get, name, ABSENT), partial(_set_variable, there, name)) for there, name in VARIABLES),
    *GUARDED_FLAGS,
]


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
        self.guard: StateGuard = new_state_guard()
        self.unguarded = unguarded
        self.common = unguarded[:_NUM_COMMON]
        self.guarded = _read_guarded()
        self.devices = devices
        self._defaults = _read_defaults()

    def holds(self, unguarded: list[Any]) -> bool:
        """Whether the switches have these values now; false also where gradient mode or autocast are not the same."""
        return self.guard.check() and unguarded == self.unguarded

    def write(self) -> None:
        """Sets the switches to these values."""
        wanted = [*self._defaults, *self.unguarded, *self.guarded]
        # A switch of the old kind may move a switch of the new kind, so a second pass sets the rest.
        for _ in range(2):
            for (read, write), value in zip(_SWITCHES, wanted, strict=True):
                if value != read():
                    write(value)
        if self.devices is not None:
            for (read, write), value in zip(DEVICE_FLAGS, self.devices, strict=True):
                if value != read():
                    write(value)


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
    captured.write()
    return captured, before


def leave(undo: Undo) -> None:
    """Restores the switches as of before :func:`enter`."""
    captured, before = undo
    if before is not None:
        before.write()
    elif _get_default_dtype() is not captured.guarded[0] or _are_deterministic() is not captured.guarded[1]:
        captured.write()
