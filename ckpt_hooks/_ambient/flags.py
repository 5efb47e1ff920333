"""Switches of the process that say which kernels run, and how exactly: default dtype, determinism, precision, attention.

They are looked at once a region in forward and once a recompute. What they are is read in full only when one has moved since
the latest look; then those that differ are set, and set back afterwards. When a recompute has ended, a few are looked at again
that functions tend to switch without a context manager, which an early stop leaves half done.

Precisions of float32 are those in effect for a kind of operator, wherever they were set: torch has an old and a new way to say
so, and the getters of the old one, which are the faster ones, raise where both were used.
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
    """Returns one expression that reads every switch, as if it were written out: a loop costs half as much again."""
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
#: Reads the switches that no guard knows of; raises ``RuntimeError`` where both ways to state a precision were used.
read_fast = _reader([*_some, CUDNN_PRECISION[0], *_more], VARIABLES)
_read_slow = _reader([*_some, CUDNN_PRECISION[1], *_more], VARIABLES)
#: Reads the first of them: those that matter to operators besides convolutions and recurrent layers.
read_common = _reader([*_some, CUDNN_PRECISION[0]], [])
_NUM_COMMON = len(_some) + 1
_read_defaults = _reader([getter for getter, _ in PRECISION_DEFAULTS], [])
_read_guarded = _reader([getter for getter, _ in GUARDED_FLAGS], [])
_read_device_flags = _reader([getter for getter, _ in DEVICE_FLAGS], [])
# The first two of the guarded ones are looked at after a recompute.
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


# In the order of a snapshot's values. A default comes before what it holds for.
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
    """What the switches were.

    Attributes:
        guard: Tells whether those that it knows of are the same still.
        unguarded: Values of the others.
        common: The first of them; see :data:`read_common`.
        guarded: Values of those that the guard knows of.
        devices: Values of those for devices; None where no device was in use.
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
        """Whether the switches are the same now; false also where gradient mode or autocast are not the same."""
        return self.guard.check() and unguarded == self.unguarded

    def write(self) -> None:
        """Makes the switches the same now."""
        wanted = [*self._defaults, *self.unguarded, *self.guarded]
        # A switch of the old kind may move one of the new kind, so what is still off is set once more.
        for _ in range(2):
            for (read, write), value in zip(_SWITCHES, wanted, strict=True):
                if value != read():
                    write(value)
        if self.devices is not None:
            for (read, write), value in zip(DEVICE_FLAGS, self.devices, strict=True):
                if value != read():
                    write(value)


#: What was captured, and what was found instead of it before a recompute, if anything.
Undo = tuple[Snapshot, "Snapshot | None"]

_latest = Snapshot(_read_unguarded(), None)


def capture() -> Snapshot:
    """Returns the switches; regions that saw the same share one snapshot."""
    global _latest
    latest, unguarded = _latest, _read_unguarded()
    devices = read_devices()
    if not latest.holds(unguarded) or devices != latest.devices:
        latest = _latest = Snapshot(unguarded, devices)
    return latest


def enter(captured: Snapshot) -> Undo:
    """Makes the switches what they were at :func:`capture`, in the same gradient mode; returns how to undo that."""
    unguarded = _read_unguarded()
    devices = None if captured.devices is None else _read_device_flags()
    if captured.holds(unguarded) and devices == captured.devices:
        return captured, None
    before = Snapshot(unguarded, devices)
    captured.write()
    return captured, before


def leave(undo: Undo) -> None:
    """Makes the switches what they were before :func:`enter`."""
    captured, before = undo
    if before is not None:
        before.write()
    elif _get_default_dtype() is not captured.guarded[0] or _are_deterministic() is not captured.guarded[1]:
        captured.write()
