"""Waits on a thread of autograd's engine, with an end to waits which would last for ever.

A rerun with a backward inside hands the backward's nodes for another device to the other device's thread. If the other thread
waits for a lock of the rerun, neither goes on. Such a wait differs from the wait for a long rerun by its length, and by the
place of the lock's owner: one and the same call of the engine, with nothing of Python on top.

Threads started by Python wait without a limit, and in C alone: no backward needs such a thread to go on, and an interrupt finds
no place between a lock's acquisition and its ``with`` block.
"""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

from torch.autograd import graph

from ckpt_hooks.errors import CheckpointError

from .paths import RegionPath, format_path, region_in_words
from .threads import on_engine_thread

__all__ = ["Patience", "patient"]

#: How often a thread looks whether a wait can end, in seconds.
INTERVAL = 1.0

#: How often in a row the owner of a lock may be found in one call of the engine.
LOOKS = 60


class Patience:
    """Observations of one wait on the thread waited for."""

    __slots__ = ("_call", "_looks")

    def __init__(self) -> None:
        self._call: FrameType | None = None
        self._looks = 0

    def look(self, thread: int | None, path: RegionPath | None = None) -> None:
        """Looks at the place of a thread, after an interval of waiting.

        Args:
            thread: Its identifier; None where unknown.
            path: The region brought back by the waiting thread.

        Raises:
            CheckpointError: The thread stood in the same call of autograd's engine for too long.
        """
        call = None if thread is None else sys._current_frames().get(thread)
        if call is None or call.f_code is not graph._engine_run_backward.__code__:
            self._call = None
            return
        self._looks = self._looks + 1 if call is self._call else 1
        self._call = call
        if self._looks >= LOOKS:
            self._call = None
            named = "a region" if path is None else region_in_words(path)
            raise CheckpointError(
                f"{named} cannot be recomputed: a thread of autograd waited for another one that is recomputing it, which "
                f"stood in one call of backward for {LOOKS * INTERVAL:g} seconds. A backward inside a region on several "
                "devices waits for the threads of all of them, and one of those waits for the region. Call "
                "torch.autograd.grad outside of the region, or keep each region on one device.",
                region=format_path(path),
            )


_OWNER = re.compile(r"owner=(\d+)")


class _Patient:
    """Enters a lock with patience."""

    __slots__ = ("_lock", "_path")

    def __init__(self, lock: Any, path: RegionPath) -> None:
        self._lock = lock
        self._path = path

    def __enter__(self) -> None:
        patience = Patience()
        while not self._lock.acquire(timeout=INTERVAL):
            owner = _OWNER.search(repr(self._lock))  # a reentrant lock tells it in no other way
            patience.look(None if owner is None else int(owner[1]), self._path)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def patient(lock: Any, path: RegionPath) -> Any:
    """Returns a context manager to enter in place of a reentrant lock, in a recompute.

    Args:
        lock: The lock.
        path: The recomputed region.
    """
    return _Patient(lock, path) if on_engine_thread() else lock
