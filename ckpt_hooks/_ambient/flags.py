"""Switches of the process that say which kernels run, and how exactly: default dtype, determinism, precision, attention.

All of them are read once a region in forward and twice a recompute, 20 ns each for most; only those that differ are set.

Precisions of float32 are those in effect for a kind of operator, wherever they were set: torch has an old and a new way to say
so, and the getters of the old one raise where both were used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_hooks._torch import FLAGS

__all__ = ["Snapshot", "capture", "enter", "leave"]

#: Values of all switches, in one order.
Snapshot = list[Any]

_setters = [setter for _, setter in FLAGS]

# One expression that calls every getter, as if it were written out: a loop costs half as much again.
_names = [f"get_{index}" for index in range(len(FLAGS))]
_read: Callable[[], Snapshot] = eval(
    f"lambda: [{', '.join(f'{name}()' for name in _names)}]",
    {name: getter for name, (getter, _) in zip(_names, FLAGS, strict=True)},
)

_latest: Snapshot = []


def _write(wanted: Snapshot) -> None:
    # A switch of the old kind may move one of the new kind, so what is still off is set once more.
    for _ in range(2):
        for setter, value, now in zip(_setters, wanted, _read(), strict=True):
            if value != now:
                setter(value)


def capture() -> Snapshot:
    """Returns all switches; regions that saw the same share one list."""
    global _latest
    now = _read()
    if now == _latest:
        return _latest
    _latest = now
    return now


def enter(captured: Snapshot) -> Snapshot:
    """Makes the switches what they were at :func:`capture`; returns what they were before."""
    now = _read()
    if now != captured:
        _write(captured)
    return now


def leave(before: Snapshot) -> None:
    """Makes the switches what they were before :func:`enter`, also where a rerun ended with some of its own doing."""
    if _read() != before:
        _write(before)
