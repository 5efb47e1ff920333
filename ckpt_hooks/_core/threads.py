"""Which threads run regions, and whether two of them do at once.

Torch's default generators belong to the process, so a recompute may set them back only where no other thread counts on them.
Threads are concurrent while two of them have a region open, its graph alive, or ran one of the last :data:`RECENT` regions.
The last clause is for threads that train side by side: between two steps such a thread has no graph, and its next draw may
come while another thread's forward is under way.

A thread of autograd's own, on which torch's reentrant checkpoint or a backward of the user's runs regions, does not count as
recent: it outlives every backward, and between two of them nothing runs there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from sys import getrefcount

from ckpt_hooks._torch import graph_task_id

__all__ = ["RECENT", "RegionThread", "is_concurrent", "on_engine_thread", "this_thread"]

#: A thread that has neither a region nor a graph stops counting after this many regions of other threads.
RECENT = 256

_next_region = count().__next__


def on_engine_thread() -> bool:
    """Whether this is a thread of autograd's engine: one that runs a backward, and that Python has not started."""
    return graph_task_id() != -1 and isinstance(threading.current_thread(), threading._DummyThread)


class RegionThread:
    """A thread that runs regions. Each of its frames holds it, so that its holders tell whether it has any.

    Attributes:
        is_of_engine: Whether it is one of autograd's, as far as is known.
        latest: The number of the latest region that it ran, or recomputed, while another thread was there.
    """

    __slots__ = ("is_of_engine", "latest")

    def __init__(self) -> None:
        self.is_of_engine = on_engine_thread()
        self.latest = -RECENT if self.is_of_engine else _next_region()


_threads: list[RegionThread] = []  # its methods run to their end before another thread goes on


class _Seat:
    """Held by a thread alone, and gone when the thread is."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = RegionThread()
        _threads.append(self.thread)

    def __del__(self, remove: Callable[[RegionThread], None] = _threads.remove) -> None:  # bound: at exit names are gone
        remove(self.thread)


class _Local(threading.local):
    seat: _Seat | None = None


_local = _Local()

# What ``getrefcount`` tells of a thread that has no frame: held by a tuple, by the list and by its seat.
_AT_REST = next(map(getrefcount, (RegionThread(),))) + 2


def this_thread() -> RegionThread:
    """Returns the present thread, for a frame that is no other frame's child to hold."""
    seat = _local.seat
    if seat is None:
        seat = _local.seat = _Seat()
    return seat.thread


def is_concurrent(own: RegionThread) -> bool:
    """Whether threads besides one run regions.

    Args:
        own: The thread that is about to run a region, or that ran the forward of one that is to be recomputed. A thread of
            autograd's engine that runs backward for it does not count: the one that it works for waits.
    """
    if len(_threads) == 1 and _threads[0] is own:
        return False
    threads = tuple(_threads)
    now, seat = _next_region(), _local.seat
    if seat is not None and seat.thread is own and not (own.is_of_engine and graph_task_id() != -1):
        own.latest = now
    for thread, holders in zip(threads, list(map(getrefcount, threads)), strict=True):  # counted before zip holds them
        if thread is not own and (holders > _AT_REST or now - thread.latest < RECENT):
            return True
    return False
