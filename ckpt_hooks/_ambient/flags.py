"""Switches of the process that say which kernels run, and how exactly: default dtype, determinism, precision, attention.

All of them are read once a region in forward and once a recompute, 20 ns each for most; only those that differ are set. When a
recompute has ended, a few are looked at again that functions tend to switch without a context manager, which an early stop
leaves half done.

Precisions of float32 are those in effect for a kind of operator, wherever they were set: torch has an old and a new way to say
so, and the getters of the old one, which are the faster ones, raise where both were used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_hooks._torch import FLAGS, MKLDNN_PRECISION_FLAGS, PRECISION_FLAGS, precision_of

__all__ = ["Snapshot", "capture", "enter", "leave"]

#: Values of all switches, in one order.
Snapshot = list[Any]

_setters = [setter for *_, setter in (*FLAGS, *PRECISION_FLAGS, *MKLDNN_PRECISION_FLAGS)]


def _reader(getters: list[Callable[[], Any]], operators: list[str]) -> Callable[[], Snapshot]:
    """Returns one expression that calls every getter, as if it were written out: a loop costs half as much again."""
    names = {f"get_{index}": getter for index, getter in enumerate(getters)}
    calls = [f"{name}()" for name in names] + [f"precision_of('mkldnn', {operator!r})" for operator in operators]
    read: Callable[[], Snapshot] = eval(f"lambda: [{', '.join(calls)}]", {**names, "precision_of": precision_of})
    return read


_operators = [operator for operator, _ in MKLDNN_PRECISION_FLAGS]
_read_fast = _reader([getter for getter, _ in FLAGS] + [older for older, _, _ in PRECISION_FLAGS], _operators)
_read_slow = _reader([getter for getter, _ in FLAGS] + [newer for _, newer, _ in PRECISION_FLAGS], _operators)
#: How many switches, the first ones, are looked at after a recompute: default dtype and deterministic algorithms.
_LOOKED_AT = 3
_read_some = _reader([getter for getter, _ in FLAGS[:_LOOKED_AT]], [])


def _read() -> Snapshot:
    try:
        return _read_fast()
    except RuntimeError:
        return _read_slow()


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
    if now == captured:
        return captured
    _write(captured)
    return now


def leave(before: Snapshot, captured: Snapshot) -> None:
    """Makes the switches what they were before :func:`enter`, which was given those captured."""
    if before is not captured or _read_some() != before[:_LOOKED_AT]:
        _write(before)
