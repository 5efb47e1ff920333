"""Threads with regions, and whether two threads run regions at once.

Torch's default generators belong to the process, so a recompute may set a generator back only where no other thread counts on
the generator. Threads are concurrent while two have a region open, a region's graph alive, or ran one of the last
:data:`RECENT` regions. The last clause is for threads training side by side: between two steps such a thread has no graph, and
its next draw may come while another thread's forward is under way. A thread that draws before its first region is not known.

A thread of autograd's engine, on which torch's reentrant checkpoint or a backward of the user's runs regions, does not count as
recent: the thread outlives every backward, and idles between two backwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from sys import getrefcount

from ckpt_hooks._torch.autograd import graph_task_id

__all__ = ["RECENT", "RegionThread", "is_concurrent", "this_thread"]

#: A thread that has neither a region nor a graph stops counting after this many regions of other threads.
RECENT = 256

_next_region = count().__next__


def _on_engine_thread() -> bool:
    """Whether this thread belongs to autograd's engine: it runs a backward, and Python has not started it."""
    return graph_task_id() != -1 and isinstance(threading.current_thread(), threading._DummyThread)


class RegionThread:
    """A thread with regions. Each frame of the thread holds this object, so the number of holders tells whether any is alive.

    Attributes:
        is_of_engine: Whether the thread is known to belong to autograd's engine.
        latest: The number of the latest region run, or recomputed, by the thread beside another thread.
    """

    __slots__ = ("is_of_engine", "latest")

    def __init__(self) -> None:
        self.is_of_engine = _on_engine_thread()
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
    """Whether threads other than ``own`` run regions.

    Args:
        own: The thread of a forward, present or recomputed. A thread of autograd's engine at work for this thread does not
            count, since ``own`` waits meanwhile.
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
