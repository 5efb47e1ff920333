"""Copies of tensors from a device to the host and back, on a stream for each direction, which overlap with computing.

The memory in use never depends on the progress of the device, since the host never asks for it. Source: torchtune's
``OffloadActivations``, for the threshold, the two streams and the stash.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple, Protocol

import torch

from ckpt_hooks._torch.autograd import CAST_NODE, LEAF_NODE, queue_callback
from ckpt_hooks._torch.modes import PastFunctionModes, num_function_modes
from ckpt_hooks._torch.tensors import past_all_modes, set_conj, set_neg

#: Bytes below which a tensor stays on its device. To start the two copies takes the host some 60 us, in which a device that
#: computes frees nothing. 256 KiB take 10 us each way at 25 GB/s; a tensor of statistics (of a norm, of attention) is smaller.
DEFAULT_MIN_OFFLOAD_SIZE = 256 * 1024

#: How many tensors are on their way to the host at most.
MAX_STASH_SIZE = 5


class _Leaving(NamedTuple):
    """A tensor on its way to the host."""

    storage: torch.UntypedStorage
    stream: Any  # which saved the tensor, and may use the memory again after waiting for the copy
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
        # The event at the end of the copy.
        self.fetched: Any = None
        self.is_used = False

    def __del__(self) -> None:
        if not self.is_used:  # the stream, which owns the memory, may have it afterwards
            self.stream.wait_stream(self._back)


class _Droppable(Protocol):
    def drop(self) -> None: ...


class _Ahead:
    """A tensor fetched to its device ahead of use; gone when the fetching backward ends or fails."""

    __slots__ = ("_fetched",)

    def __init__(self, fetched: _Droppable) -> None:
        self._fetched = weakref.ref(fetched)

    def __del__(self) -> None:
        fetched = self._fetched()
        if fetched is not None:
            fetched.drop()


# The last few sent tensors are held (the *stash*). To send another tensor, the stream which saved the oldest waits for the
# oldest copy, and the stash drops that tensor: later work on that stream may have the memory. A fetched tensor lies in memory
# of the stream which runs the node of backward. The copy waits for the work queued on that stream so far; if the tensor is
# dropped before use, the stream waits for the copy first.
#
# Road not taken: ``Tensor.record_stream`` gives memory back when the host finds a copy complete. A host ahead of its device
# finds none, and allocates more. So it is called only where a tensor is used on another stream than that of its fetch.
class Transfers:
    """The copies between one device and the host, in both directions."""

    def __init__(self, device: torch.device) -> None:
        # Streams and events come from the device's module in torch: ``torch.cuda``, ``torch.xpu``, or another.
        self._module: Any = getattr(torch, device.type)
        self._device = device
        self._out: Any = self._module.Stream(device)
        self._back: Any = self._module.Stream(device)
        #: Guards what threads share: the stash, and what was fetched. No copy is started under it.
        self.lock = threading.RLock()
        self._number = 0
        self._stash: dict[int, _Leaving] = {}
        #: The batch that was sent last.
        self.latest: weakref.ref[Any] | None = None

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)

    def present_stream(self) -> Any:
        return self._module.current_stream(self._device)

    def send(self, tensor: torch.Tensor, stream: Any = None, max_stash_size: int = MAX_STASH_SIZE) -> Sent:
        """Starts a copy to the host, once a stream is done with the tensor: the present one, if None."""
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
            # Tensors sent no later may go, since the fetch waits for their copies anyway.
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


def drop_copies_at_end(fetched: _Droppable) -> None:
    """Has a fetched tensor leave the device when the backward of this thread ends, unless it was taken by then."""
    queue_callback([_Ahead(fetched)].clear)


def _quietly(tensor: torch.Tensor, function: Any, *args: Any) -> Any:
    if num_function_modes():
        with PastFunctionModes():
            return past_all_modes(tensor, function, *args)
    return past_all_modes(tensor, function, *args)


def _with_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Makes ``other`` the conjugate, or the negative, of its memory, if ``tensor`` is."""
    # A copy between the two copies memory then. Otherwise torch conjugates the host's tensor at once, before the copy lands.
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
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.nbytes < (DEFAULT_MIN_OFFLOAD_SIZE if min_offload_size is None else min_offload_size)
        or not _is_dense(tensor)
        or _is_weight(tensor)
    ):
        return None
    found = _transfers.get(device)
    if found is None:
        found = _transfers.setdefault(device, Transfers(device))
    return found


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a model holds a tensor anyway: a parameter, another leaf, a view (by its base), or autocast's cast of a leaf."""
    base: Any = tensor._base if tensor._is_view() else tensor
    if not base.requires_grad or base.is_leaf:
        return bool(base.requires_grad) or type(base) is torch.nn.Parameter
    node = base.grad_fn
    return type(node) is CAST_NODE and type(node.next_functions[0][0]) is LEAF_NODE


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each with a place of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return expected > 0
