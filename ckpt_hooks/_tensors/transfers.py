"""Tensors on the host until backward: copies from a device and back, on a stream for each direction, single and in batches.

Tensors which move together form a *batch*: results that a region's policy keeps, a region's inputs, or a single saved tensor.
A backward which reaches a batch fetches the batch, and a few batches sent before, which backward reaches next.

:class:`Moved` is a saved tensor in the graph, and its taker: before the copy begins the tensor itself, then an
:class:`Offloaded`, the copy on the host, which all takers of a tensor share. :class:`Transfers` makes the copies: a tensor that
leaves stays in the stash, an :class:`Arrival` is on its way back.

The copies overlap with computing. The memory in use never depends on the progress of the device, since the host never asks for
this progress. Source: torchtune's ``OffloadActivations``, for the threshold, the two streams and the stash.
"""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any, NamedTuple

import torch

from ckpt_hooks._core.descriptions import RegionPath, describe_kind, format_path
from ckpt_hooks._core.events import Watch
from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.holdings import Cause, Holding, Reason, size_of, storage_and_size
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._core.scopes import Ending, graph_task_scope, with_ending
from ckpt_hooks._torch.autograd import CAST_NODE, LEAF_NODE, Hooks, graph_task_id
from ckpt_hooks._torch.modes import PastFunctionModes, num_function_modes
from ckpt_hooks._torch.tensors import (
    counted_detach,
    is_kept_anyway,
    past_all_modes,
    set_conj,
    set_neg,
    set_versions,
    storage_address,
    version_witness,
)

from .copies import PLAIN, has_no_gaps, layout_of

#: Bytes below which a tensor stays on its device. To start the two copies takes the host some 60 us, in which a device that
#: computes frees nothing. 256 KiB take 10 us each way at 25 GB/s; a tensor of statistics (of a norm, of attention) is smaller.
DEFAULT_MIN_OFFLOAD_SIZE = 256 * 1024

#: The most tensors on their way to the host at a time.
MAX_STASH_SIZE = 5


class _Leaving(NamedTuple):
    """A tensor on its way to the host."""

    storage: torch.UntypedStorage
    stream: Any  # the stream that saved the tensor; it may use the memory again after the copy
    copied: Any  # the event at the end of the copy


class Sent(NamedTuple):
    number: int  # among all copies sent by the device
    host: torch.Tensor
    copied: Any


class Arrival:
    """A tensor on its way back."""

    __slots__ = ("_back", "fetched", "is_used", "stream", "tensor")

    def __init__(self, tensor: torch.Tensor, stream: Any, back: Any) -> None:
        self.tensor, self.stream, self._back = tensor, stream, back
        self.fetched: Any = None  # the event at the end of the copy
        self.is_used = False

    def __del__(self) -> None:
        if not self.is_used:  # the stream owns the memory, and may reuse it only after the copy
            self.stream.wait_stream(self._back)


# The last few sent tensors are held (the *stash*). To send another tensor, the stream which saved the oldest waits for the
# oldest copy, and the stash drops that tensor: later work on that stream may have the memory. A fetched tensor lies in memory
# of the stream which runs the node of backward. The copy waits for the work queued on that stream so far; if the tensor is
# dropped before use, the stream waits for the copy first.
#
# Road not taken: ``Tensor.record_stream`` gives memory back when the host finds a copy complete. A host ahead of its device
# finds none, and allocates more. So it is called only where a tensor is used on another stream than that of its fetch.
class Transfers:
    """The copies between a device and the host, in both directions."""

    def __init__(self, device: torch.device) -> None:
        # Streams and events come from the device's module in torch: ``torch.cuda``, ``torch.xpu``, or another.
        self._module: Any = getattr(torch, device.type)
        self._device = device
        self._out: Any = self._module.Stream(device)
        self._back: Any = self._module.Stream(device)
        #: Guards the state that threads share: the stash, and fetched tensors. No copy is started under the lock.
        self.lock = threading.RLock()
        self._number = 0
        self._stash: dict[int, _Leaving] = {}
        self.latest: weakref.ref[Any] | None = None  # the batch that was sent last

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)

    def present_stream(self) -> Any:
        return self._module.current_stream(self._device)

    def send(self, tensor: torch.Tensor, stream: Any = None, max_stash_size: int = MAX_STASH_SIZE) -> Sent:
        """Starts a copy to the host, once a stream is done with the tensor: the present stream, if None."""
        with self.lock:
            while len(self._stash) >= max_stash_size:
                self.leave_behind(next(iter(self._stash)))
        stream = self.present_stream() if stream is None else stream
        sent: Sent = _quietly(tensor, self._send, tensor, stream)
        return sent

    def _send(self, tensor: torch.Tensor, stream: Any) -> Sent:
        host = _with_bits_of(tensor, self.host_like(tensor))
        self._out.wait_stream(stream)
        with self._module.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            copied = self._out.record_event()
        with self.lock:
            self._number = number = self._number + 1
            self._stash[number] = _Leaving(tensor.untyped_storage(), stream, copied)
        return Sent(number, host, copied)

    def leave_behind(self, number: int) -> None:
        with self.lock:
            leaving = self._stash.get(number)
            if leaving is not None:
                leaving.stream.wait_event(leaving.copied)
                del self._stash[number]

    def fetch(self, sent: Sent) -> Arrival:
        with self.lock:
            # This tensor and tensors sent before it leave the stash, since the fetch waits for their copies anyway.
            for number in [number for number in self._stash if number <= sent.number]:
                self.leave_behind(number)
        arrival: Arrival = _quietly(sent.host, self._fetch, sent)
        return arrival

    def _fetch(self, sent: Sent) -> Arrival:
        host, stream = sent.host, self.present_stream()
        tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
        arrival = Arrival(_with_bits_of(host, tensor), stream, self._back)
        self._back.wait_stream(stream)
        self._back.wait_event(sent.copied)
        with self._module.stream(self._back):
            tensor.copy_(host, non_blocking=True)
            arrival.fetched = self._back.record_event()
        return arrival

    def wait(self, sent: Sent) -> None:
        self.present_stream().wait_event(sent.copied)

    def use(self, arrival: Arrival) -> None:
        stream = self.present_stream()
        stream.wait_event(arrival.fetched)
        if stream != arrival.stream:
            _quietly(arrival.tensor, arrival.tensor.record_stream, stream)
        arrival.is_used = True


def _quietly(tensor: torch.Tensor, function: Any, *args: Any) -> Any:
    if num_function_modes():
        with PastFunctionModes():
            return past_all_modes(tensor, function, *args)
    return past_all_modes(tensor, function, *args)


def _with_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Makes ``other`` the conjugate, or the negative, of its memory, if ``tensor`` is."""
    # If both are conjugates, a copy copies memory. Otherwise torch would conjugate the host's tensor before the copy arrives.
    if tensor.is_conj():
        set_conj(other, True)
    if tensor.is_neg():
        set_neg(other, True)
    return other


_transfers: dict[torch.device, Transfers] = {}


def transfers_for(tensor: torch.Tensor, min_offload_size: int | None = None) -> Transfers | None:
    """Returns the transfers for a tensor; None if it stays, as tensors of the model and on the host do."""
    device = tensor.device
    if device.type in ("cpu", "meta") and device not in _transfers:
        return None
    if (
        type(tensor) not in PLAIN
        or tensor.layout is not torch.strided
        or tensor.nbytes < (DEFAULT_MIN_OFFLOAD_SIZE if min_offload_size is None else min_offload_size)
        or not has_no_gaps(tensor)
        or _is_weight(tensor)
    ):
        return None
    transfers = _transfers.get(device)
    if transfers is None:
        transfers = _transfers.setdefault(device, Transfers(device))
    return transfers


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a model holds a tensor anyway: a parameter, another leaf, a view (by its base), or autocast's cast of a leaf."""
    base: Any = tensor._base if tensor._is_view() else tensor
    if not base.requires_grad or base.is_leaf:
        return bool(base.requires_grad) or type(base) is torch.nn.Parameter
    node = base.grad_fn
    return type(node) is CAST_NODE and type(node.next_functions[0][0]) is LEAF_NODE


class Offloaded:
    """The copy of a tensor on the host, or on its way there or back."""

    __slots__ = (
        "__weakref__",
        "_arrivals",
        "_endings",
        "_sent",
        "_task",
        "_transfers",
        "_version",
        "_watch",
        "batch",
        "takers",
    )

    def __init__(
        self, tensor: torch.Tensor, transfers: Transfers, batch: Batch, stream: Any = None, max_stash_size: int = MAX_STASH_SIZE
    ) -> None:
        self.batch = batch
        # The users of the tensor, if there are several. Each takes it once in a backward, and all share a single fetch.
        self.takers: list[weakref.ref[Moved]] = []
        self._transfers = transfers
        self._version = tensor._version
        # By graph task, a tensor fetched ahead, or kept for other takers; dropped when the backward ends or fails.
        self._arrivals: dict[int, Arrival] = {}
        self._endings: tuple[Ending, ...] = ()
        self._task = -1  # the graph task that has taken it last
        frame = stack.innermost
        self._watch = batch.watch or (None if frame is None else frame.watch)
        self._sent: Sent = transfers.send(tensor, stream, max_stash_size)
        if self._watch is not None:
            self._watch.tell("moved", tensor.nbytes, to_host=True)

    def __del__(self) -> None:
        if hasattr(self, "_sent"):  # not where sending failed
            self._transfers.leave_behind(self._sent.number)

    @property
    def host(self) -> torch.Tensor:
        return self._sent.host

    def finish_sending(self) -> None:
        """Makes the present stream wait for the copy, so that the tensor may be written to."""
        self._transfers.wait(self._sent)

    def _fetch(self) -> Arrival:
        arrival = self._transfers.fetch(self._sent)
        if self._watch is not None:
            self._watch.tell("moved", arrival.tensor.nbytes, to_host=False)
        set_versions((arrival.tensor,), (self._version,))
        return arrival

    def _keep(self, arrival: Arrival, task: int) -> None:
        self._arrivals.setdefault(task, arrival)
        self._endings = with_ending(self._endings, graph_task_scope(task), self._arrivals)

    def fetch_ahead(self, task: int) -> bool:
        """Starts the fetch, unless the graph task has taken the tensor already; returns whether the tensor is still wanted."""
        if self._task == task:
            return False
        if task not in self._arrivals:
            self._keep(self._fetch(), task)
        return True

    def get(self, taker: Moved | None = None) -> torch.Tensor:
        """Returns the tensor on its device, in an object of the caller's own; it stays there while other takers wait."""
        task = self._task = graph_task_id()
        stays = False
        if taker is not None and task != -1:
            taker.task = task
            stays = any(other.task != task for reference in self.takers if (other := reference()) is not None)
        with self._transfers.lock:
            arrival = self._arrivals.pop(task, None)
            if arrival is not None and arrival.tensor._version != self._version:
                arrival = None  # a taker wrote to the tensor
            if arrival is not None and stays:
                self._arrivals[task] = arrival
        if arrival is None:
            arrival = self._fetch()
            if stays:
                self._keep(arrival, task)
        self._transfers.use(arrival)
        return counted_detach(arrival.tensor) if stays else arrival.tensor


class Batch:
    """Tensors sent in sequence, and wanted together."""

    __slots__ = ("__weakref__", "before", "task", "tensors", "watch")

    def __init__(self, watch: Watch | None = None) -> None:
        self.watch = watch  # is told of the copies; None for the watch of the innermost frame
        self.tensors: list[weakref.ref[Offloaded]] = []
        self.before: weakref.ref[Batch] | None = None  # the batch sent before from the same device, while it lives
        self.task = -1  # the graph task that has fetched it last

    def send(
        self, tensor: torch.Tensor, transfers: Transfers, stream: Any = None, max_stash_size: int = MAX_STASH_SIZE
    ) -> Offloaded:
        sent = Offloaded(tensor, transfers, self, stream, max_stash_size)
        self.join(sent, transfers)
        return sent

    def join(self, sent: Offloaded, transfers: Transfers) -> None:
        """Adds a tensor, perhaps of another batch, which is wanted with this batch."""
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

    def fetch_with_next(self, ahead: int = 1) -> None:
        """Fetches this batch and the batches which backward reaches next; outside of a backward, nothing."""
        task = graph_task_id()
        if task == -1:
            return
        self.task = task
        self._fetch(task)
        batch = self
        # Batches that this backward has taken do not count: a node with several saved tensors asks again.
        for _ in range(4 * ahead):  # a limit, since all of a long chain may have been taken
            before = None if batch.before is None else batch.before()
            if before is None:
                return
            batch = before
            if batch._fetch(task):
                ahead -= 1
                if not ahead:
                    return


class Moved:
    """A saved tensor, on its device until the copy to the host begins."""

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_max_stash_size",
        "_sent",
        "_stream",
        "_tensor",
        "_transfers",
        "_version",
        "batch",
        "path",
        "storage",
        "task",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        transfers: Transfers,
        max_stash_size: int = MAX_STASH_SIZE,
        batch: Batch | None = None,  # None for a batch of this tensor only
        path: RegionPath | None = None,  # None outside of regions
    ) -> None:
        self._tensor, self._transfers, self._version = tensor, transfers, tensor._version
        self._stream, self._max_stash_size = transfers.present_stream(), max_stash_size
        # How many batches a backward fetches ahead: if each is a single tensor, as many as may be on their way.
        self._ahead = max_stash_size if batch is None else 1
        self._sent: Offloaded | None = None
        self.batch, self.path = batch, path
        self.task = -1  # the graph task of the latest use, if the copy has several takers
        self.storage = weakref.ref(tensor.untyped_storage())

    def send(self, shared: Shared) -> None:
        tensor, is_unchanged = self._tensor, self._tensor._version == self._version
        if self.batch is None:
            self.batch = Batch()
        self._sent = self.batch.send(tensor, self._transfers, self._stream, self._max_stash_size)
        self._tensor = version_witness(tensor)  # which keeps no memory alive
        if is_unchanged:  # after the send, since another thread that finds this object asks for the copy
            shared.add(tensor, self)

    def again(self, batch: Batch | None, path: RegionPath | None) -> Moved:
        """Returns a holder of the same copy for another operator, or another region."""
        saved, sent = copy.copy(self), self._sent
        assert sent is not None
        sent.takers = [*(sent.takers or [weakref.ref(self)]), weakref.ref(saved)]
        saved.path = path
        if batch is not None:
            batch.join(sent, self._transfers)
            saved.batch = batch
        return saved

    def holding(self, cause: Cause) -> Holding:
        sent, why = self._sent, cause.in_words()
        tensor, reason = (self._tensor, cause.reason) if sent is None else (sent.host, Reason.OFFLOADED)
        return Holding(reason, why, size_of(tensor), *storage_and_size(tensor), tensor.shape, tensor.dtype, tensor.device)

    def get(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            kind = describe_kind(self._tensor if self._sent is None else self._sent.host)
            why = Why.OFFLOADED if self.path is None else Why.NEEDED
            raise mutated(why, format_path(self.path), self._tensor, self._version, kind=kind, detail="moved to the host")
        if self._sent is None:
            return self._tensor
        assert self.batch is not None
        self.batch.fetch_with_next(self._ahead)
        return self._sent.get(self if self._sent.takers else None)


# Copies shared by takers of the same tensor


def _key_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key, equal for two tensors of a storage only if the tensors are the same."""
    return storage_address(tensor), layout_of(tensor), tensor._version


class Shared:
    """Sent tensors, as long as their graph lives, for when another operator or region saves the same tensor."""

    # A tensor without gradient is not looked for: an operator may write to such a tensor without counting the version.

    def __init__(self) -> None:
        self._sent: weakref.WeakValueDictionary[Any, Moved] = weakref.WeakValueDictionary()

    def find(self, tensor: torch.Tensor, batch: Batch | None = None, path: RegionPath | None = None) -> Moved | None:
        identity = _key_of(tensor)
        moved = self._sent.get(identity)
        if moved is None or moved.storage() is not tensor.untyped_storage():  # another storage may have the address by now
            return None
        again = self._sent[identity] = moved.again(batch, path)
        return again

    def add(self, tensor: torch.Tensor, saved: Moved) -> None:
        self._sent[_key_of(tensor)] = saved


_inputs = Shared()


def hooks_for_inputs(path: RegionPath, watch: Watch | None, min_size: int) -> Hooks:
    """Returns saved-tensor hooks for the inputs of a region (``offload_inputs=True``), which form a batch."""
    batch = Batch(watch)

    def pack(tensor: torch.Tensor) -> Moved | torch.Tensor:
        # Tensors without gradients stay: models pass masks, say, to all their regions. The caller compares the versions of
        # tensors that stay.
        if not tensor.requires_grad or is_kept_anyway(tensor):
            return tensor
        transfers = transfers_for(tensor, min_size)
        if transfers is None:
            return counted_detach(tensor)
        moved = _inputs.find(tensor, batch, path)
        if moved is None:
            moved = Moved(tensor, transfers, batch=batch, path=path)
            moved.send(_inputs)
        return moved

    return pack, _unpack_input


def _unpack_input(packed: Moved | torch.Tensor) -> torch.Tensor:
    return packed.get() if type(packed) is Moved else packed  # type: ignore[return-value]
