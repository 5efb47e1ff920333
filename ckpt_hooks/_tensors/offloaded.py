"""Tensors on the host until backward, single and in batches.

Tensors which move together form a *batch*: the outputs of one region kept by a policy, or a single saved tensor. When backward
reaches a batch, the whole batch is fetched, and so are some of the batches sent before, which backward reaches next: their
copies overlap with computing. A backward fetches each tensor once, for any number of nodes, and leaves no fetched but unused
tensor on the device.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from ckpt_hooks._core.events import Watch
from ckpt_hooks._core.stack import stack
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.tensors import counted_detach, set_versions

from .transfers import MAX_STASH_SIZE, Arrival, Sent, Transfers, drop_copies_at_end

__all__ = ["Batch", "Offloaded", "Taker"]


class Taker(Protocol):
    """One of several users of a tensor.

    Attributes:
        task: The graph task of the latest use.
    """

    task: int


class Offloaded:
    """A tensor on the host, or on its way there or back.

    Attributes:
        batch: The batch of the tensor.
        takers: The users of the tensor, if several. Each takes the tensor once in a backward, and all share one fetch.
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
            tensor: A tensor without later writes. A caller who writes nevertheless does not use this copy.
            transfers: The copies of the tensor's device.
            batch: The batch of the tensor.
            stream: The stream which makes the tensor; the present stream if None.
            max_stash_size: The largest number of tensors on their way to the host.
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
        self._watch = batch.watch or (None if frame is None else frame.watch)
        self._sent = transfers.send(tensor, stream, max_stash_size)
        if self._watch is not None:
            self._watch.moved(tensor.nbytes, to_host=True)

    def __del__(self) -> None:
        if self._sent is not None:
            self._transfers.leave_behind(self._sent.number)

    @property
    def host(self) -> torch.Tensor:
        """The copy on the host."""
        assert self._sent is not None
        return self._sent.host

    def finish_sending(self) -> None:
        """Makes the present stream wait for the copy, so that the tensor may be written to."""
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
        """Keeps a fetched tensor for further takers, until the backward ends."""
        with self._transfers.lock:
            if self._arrival is None:
                self._arrival = arrival
        drop_copies_at_end(self)

    def fetch_ahead(self, task: int) -> bool:
        """Starts the fetch, unless this backward has taken the tensor already; returns whether the tensor is still wanted.

        Args:
            task: The id of the graph task of this thread.
        """
        if self._task == task:
            return False
        if self._arrival is None:
            self._keep(self._fetch())
        return True

    def drop(self) -> None:
        """Drops the fetched, untaken tensor."""
        with self._transfers.lock:
            self._arrival = None

    def get(self, taker: Taker | None = None) -> torch.Tensor:
        """Returns the tensor on its device, in an object of the caller's own.

        Args:
            taker: The user, if several share the tensor. The tensor stays on the device for the others in this backward.
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
    """Tensors sent in sequence, and wanted together.

    Attributes:
        tensors: The sent tensors.
        before: The previous batch sent from the same device, as long as it is alive.
        watch: Hears of the copies; None for the watch of the innermost frame.
    """

    __slots__ = ("__weakref__", "_task", "before", "tensors", "watch")

    def __init__(self, watch: Watch | None = None) -> None:
        self.watch = watch
        self.tensors: list[weakref.ref[Offloaded]] = []
        self.before: weakref.ref[Batch] | None = None
        # The graph task that has fetched it last.
        self._task = -1

    def send(
        self, tensor: torch.Tensor, transfers: Transfers, stream: Any = None, max_stash_size: int = MAX_STASH_SIZE
    ) -> Offloaded:
        """Sends a tensor as part of this batch (:meth:`Transfers.send`); returns the holder of the copy."""
        sent = Offloaded(tensor, transfers, self, stream, max_stash_size)
        self.join(sent, transfers)
        return sent

    def join(self, sent: Offloaded, transfers: Transfers) -> None:
        """Adds a tensor, of another batch maybe, which is wanted with this batch."""
        if not self.tensors:
            self.before, transfers.latest = transfers.latest, weakref.ref(self)
        self.tensors.append(weakref.ref(sent))

    def _fetch(self, task: int) -> bool:
        """Starts the fetch of all tensors still wanted, in the order of sending; returns whether there are any."""
        wanted = False
        for reference in self.tensors:
            sent = reference()
            if sent is not None and sent.fetch_ahead(task):
                wanted = True
        return wanted

    def fetch_in(self, task: int) -> None:
        """Does :meth:`fetch_with_next` unless this backward has done so.

        Args:
            task: The id of the graph task of this thread.
        """
        if self._task != task:
            self.fetch_with_next()

    def fetch_with_next(self, ahead: int = 1) -> None:
        """Fetches this batch, and the batches which backward reaches next; outside of a backward, nothing.

        Args:
            ahead: The number of batches besides this batch. Batches taken already by this backward, as by a node with several
                saved tensors, do not count.
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
