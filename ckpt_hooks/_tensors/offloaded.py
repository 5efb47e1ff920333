"""Tensors that are on the host until backward wants them, one by one and in batches.

Tensors that are moved together form a *batch*: what a policy keeps of one region, or a single saved tensor. When backward comes
to a batch, all of it is fetched, and so are some of the batches sent before it, which backward wants next: their way overlaps
with the computing of this one. One backward fetches a tensor once, however many nodes take it, and leaves nothing behind on the
device that it fetched and did not use.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from ckpt_hooks._core.stack import stack
from ckpt_hooks._torch import counted_detach, graph_task_id, set_versions

from .transfers import MAX_STASH_SIZE, Arrival, Sent, Transfers, drop_at_end

__all__ = ["Batch", "Offloaded", "Taker"]


class Taker(Protocol):
    """One of several who take a tensor.

    Attributes:
        task: The graph task that it has taken the tensor in last.
    """

    task: int


class Offloaded:
    """A tensor that is on the host, or on its way there or back.

    Attributes:
        batch: What it was sent as part of.
        takers: Those who take it, each once in a backward, if there are several: for them it comes back once.
    """

    __slots__ = ("__weakref__", "_arrival", "_sent", "_task", "_transfers", "_version", "_watch", "batch", "takers")

    def __init__(
        self,
        tensor: torch.Tensor,
        transfers: Transfers,
        batch: Batch,
        stream: Any = None,
        max_stash_size: int = MAX_STASH_SIZE,
    ) -> None:
        """Sends a tensor.

        Args:
            tensor: What nobody will write to any more, or whoever does will see to it that this is not used.
            transfers: The way to go.
            batch: What it is part of.
            stream: The stream that makes the tensor; the present one if None.
            max_stash_size: How many tensors are on their way to the host at most.
        """
        self.batch = batch
        self.takers: list[weakref.ref[Taker]] = []
        self._transfers = transfers
        self._version = tensor._version
        self._arrival: Arrival | None = None
        # The graph task that has taken it last.
        self._task = -1
        self._sent: Sent | None = None
        frame = stack.innermost
        self._watch = None if frame is None else frame.watch
        self._sent = transfers.send(tensor, stream, max_stash_size)
        if self._watch is not None:
            self._watch.moved(tensor.nbytes, to_host=True)

    def __del__(self) -> None:
        if self._sent is not None:
            self._transfers.leave_behind(self._sent.number)

    def finish_sending(self) -> None:
        """Has the present stream wait until the copy is there, so that what was sent may be written to."""
        assert self._sent is not None
        self._transfers.wait(self._sent)

    def _fetch(self) -> Arrival:
        assert self._sent is not None
        arrival = self._transfers.fetch(self._sent)
        if self._watch is not None:
            self._watch.moved(arrival.tensor.nbytes, to_host=False)
        set_versions((arrival.tensor,), (self._version,))
        return arrival

    def _keep(self, arrival: Arrival) -> None:
        """Has what was fetched stay for those who take it yet, until the backward ends."""
        with self._transfers.lock:
            if self._arrival is None:
                self._arrival = arrival
        drop_at_end(self)

    def fetch_ahead(self, task: int) -> bool:
        """Starts the way back, unless this backward has taken the tensor already; returns whether it has not.

        Args:
            task: The id of the graph task that is running on this thread.
        """
        if self._task == task:
            return False
        if self._arrival is None:
            self._keep(self._fetch())
        return True

    def drop(self) -> None:
        """Lets go of what was fetched and not taken."""
        with self._transfers.lock:
            self._arrival = None

    def get(self, taker: Taker | None = None) -> torch.Tensor:
        """Returns the tensor on its device, in an object that nobody else has.

        Args:
            taker: Who takes it, if that is one of several. As long as another one may, the tensor stays on the device.
        """
        task = self._task = graph_task_id()
        stays = False
        if taker is not None and task != -1:
            taker.task = task
            stays = any(other.task != task for reference in self.takers if (other := reference()) is not None)
        with self._transfers.lock:
            arrival = self._arrival
            if arrival is not None and arrival.tensor._version != self._version:
                arrival = self._arrival = None  # somebody wrote to it
            if not stays:
                self._arrival = None
        if arrival is None:
            arrival = self._fetch()
            if stays:
                self._keep(arrival)
        self._transfers.use(arrival)
        return counted_detach(arrival.tensor) if stays else arrival.tensor


class Batch:
    """Tensors that are sent one after the other, and wanted together.

    Attributes:
        tensors: What was sent.
        before: The batch that was sent before this one, to the same device, as long as it is alive.
    """

    __slots__ = ("__weakref__", "_task", "before", "tensors")

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[Offloaded]] = []
        self.before: weakref.ref[Batch] | None = None
        # The graph task that has fetched it last.
        self._task = -1

    def send(
        self, tensor: torch.Tensor, transfers: Transfers, stream: Any = None, max_stash_size: int = MAX_STASH_SIZE
    ) -> Offloaded:
        """Sends a tensor as part of this batch; see :meth:`Transfers.send`. Returns what keeps it."""
        if not self.tensors:
            self.before, transfers.latest = transfers.latest, weakref.ref(self)
        sent = Offloaded(tensor, transfers, self, stream, max_stash_size)
        self.tensors.append(weakref.ref(sent))
        return sent

    def _fetch(self, task: int) -> bool:
        """Starts the way back of all that is still wanted, in the order of sending; returns whether anything is."""
        wanted = False
        for reference in self.tensors:
            sent = reference()
            if sent is not None and sent.fetch_ahead(task):
                wanted = True
        return wanted

    def fetch_in(self, task: int) -> None:
        """Does :meth:`fetch_with_next` unless this backward has done so.

        Args:
            task: The id of the graph task that is running on this thread.
        """
        if self._task != task:
            self.fetch_with_next()

    def fetch_with_next(self, ahead: int = 1) -> None:
        """Fetches this batch, and those that backward will want after it. Outside of a backward, nothing is wanted next.

        Args:
            ahead: How many batches besides this one. Those that the backward has taken already, as a node does that saved
                several tensors, do not count.
        """
        task = graph_task_id()
        if task == -1:
            return
        self._task = task
        self._fetch(task)
        batch = self
        for _ in range(4 * ahead):  # not through all of a long chain that was taken
            before = None if batch.before is None else batch.before()
            if before is None:
                return
            batch = before
            if batch._fetch(task):
                ahead -= 1
                if not ahead:
                    return
