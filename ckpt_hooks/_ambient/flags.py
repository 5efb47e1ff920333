"""Switches of the process that say which kernels run, and how exactly: default dtype, determinism, precision, attention.

They are looked at once a region in forward and once a recompute. What they are is read in full only when one has moved since
the latest look; then those that differ are set, and set back afterwards. When a recompute has ended, a few are looked at again
that functions tend to switch without a context manager, which an early stop leaves half done.

Precisions of float32 are those in effect for a kind of operator, wherever they were set: torch has an old and a new way to say
so, and the getters of the old one, which are the faster ones, raise where both were used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_hooks._torch import CUDNN_PRECISION, FLAGS, GUARDED_FLAGS, MKLDNN_PRECISION, StateGuard, new_state_guard

__all__ = ["Snapshot", "Undo", "capture", "enter", "leave", "read_fast"]


def _reader(getters: list[Callable[[], Any]]) -> Callable[[], list[Any]]:
    """Returns one expression that calls every getter, as if it were written out: a loop costs half as much again."""
    names = {f"get_{index}": getter for index, getter in enumerate(getters)}
    read: Callable[[], list[Any]] = eval(f"lambda: [{', '.join(f'{name}()' for name in names)}]", names)
    return read


_some = [getter for getter, _ in FLAGS] + [MKLDNN_PRECISION[0]]
read_fast = _reader([*_some, CUDNN_PRECISION[0]])
_read_slow = _reader([*_some, CUDNN_PRECISION[1]])
_read_guarded = _reader([getter for getter, _ in GUARDED_FLAGS])
_setters: list[Callable[[Any], object]] = [
    *(setter for _, setter in FLAGS),
    MKLDNN_PRECISION[1],
    CUDNN_PRECISION[2],
    *(setter for _, setter in GUARDED_FLAGS),
]
# The first two of the guarded ones are looked at after a recompute.
(_get_default_dtype, _), (_are_deterministic, _) = GUARDED_FLAGS[:2]


def _read_unguarded() -> list[Any]:
    try:
        return read_fast()
    except RuntimeError:
        return _read_slow()


class Snapshot:
    """What the switches were.

    Attributes:
        guard: Tells whether those that it knows of are the same still.
        unguarded: Values of the others.
        guarded: Values of those that the guard knows of.
    """

    __slots__ = ("guard", "guarded", "unguarded")

    def __init__(self, unguarded: list[Any]) -> None:
        self.guard: StateGuard = new_state_guard()
        self.unguarded = unguarded
        self.guarded = _read_guarded()

    def holds(self, unguarded: list[Any]) -> bool:
        """Whether the switches are the same now; false also where gradient mode or autocast are not the same."""
        return self.guard.check() and unguarded == self.unguarded

    def write(self) -> None:
        """Makes the switches the same now."""
        wanted = self.unguarded + self.guarded
        # A switch of the old kind may move one of the new kind, so what is still off is set once more.
        for _ in range(2):
            for setter, value, now in zip(_setters, wanted, _read_unguarded() + _read_guarded(), strict=True):
                if value != now:
                    setter(value)


#: What was captured, and what was found instead of it before a recompute, if anything.
Undo = tuple[Snapshot, "Snapshot | None"]

_latest = Snapshot(_read_unguarded())


def capture() -> Snapshot:
    """Returns the switches; regions that saw the same share one snapshot."""
    global _latest
    latest, unguarded = _latest, _read_unguarded()
    if not latest.holds(unguarded):
        latest = _latest = Snapshot(unguarded)
    return latest


def enter(captured: Snapshot) -> Undo:
    """Makes the switches what they were at :func:`capture`, in the same gradient mode; returns how to undo that."""
    unguarded = _read_unguarded()
    if captured.holds(unguarded):
        return captured, None
    before = Snapshot(unguarded)
    captured.write()
    return captured, before


def leave(undo: Undo) -> None:
    """Makes the switches what they were before :func:`enter`."""
    captured, before = undo
    if before is not None:
        before.write()
    elif _get_default_dtype() is not captured.guarded[0] or _are_deterministic() is not captured.guarded[1]:
        captured.write()
