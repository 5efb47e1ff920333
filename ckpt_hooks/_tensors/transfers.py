"""The ways of tensors from a device to the host and back.

Each way has a stream of its own, so that copies overlap with computing. How much memory is in use never depends on how far the
device has come, since nothing asks it:

- The last few tensors that were sent are held (the *stash*). To send one more, the stream that saved the oldest waits for its
  copy, and lets go of it: what runs on that stream from then on may have the memory.
- A tensor that is fetched lies in memory of the stream that runs the node of backward. The copy waits for what that stream was
  told so far. A tensor that is dropped before its use has that stream wait for its copy first.

``Tensor.record_stream``, the other way to do this, gives memory back when the host finds a copy complete. A host that runs
ahead of its device does not, and allocates more. It is called only where a tensor is used on another stream than it was
fetched for.

What is not worth moving, or cannot be moved as it is, stays: tensors on the host, small ones, those whose elements share
memory, subclasses, other layouts than strided ones, and what a model holds anyway: parameters, their views and their casts.

Source: torchtune's ``OffloadActivations``, which is where the threshold, the two streams and the stash come from.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple, Protocol

import torch

from ckpt_hooks._torch import PastFunctionModes, num_function_modes, past_all_modes, queue_callback, set_conj, set_neg

__all__ = ["DEFAULT_MIN_OFFLOAD_SIZE", "MAX_STASH_SIZE", "Arrival", "Sent", "Transfers", "drop_at_end", "transfers_for"]

#: Bytes below which a tensor stays on its device. To start the two copies takes the host some 60 us, in which a device that
#: computes frees nothing. 256 KiB take 10 us each way at 25 GB/s; a tensor of statistics (of a norm, of attention) is smaller.
DEFAULT_MIN_OFFLOAD_SIZE = 256 * 1024

#: How many tensors are on their way to the host at most.
MAX_STASH_SIZE = 5


class _Leaving(NamedTuple):
    """A tensor on its way to the host.

    Attributes:
        storage: The memory that is read.
        stream: The stream that the tensor was saved on, which may use the memory again when it has waited for the copy.
        copied: The event that says that the copy is there.
    """

    storage: torch.UntypedStorage
    stream: Any
    copied: Any


class Sent(NamedTuple):
    """A copy on the host.

    Attributes:
        number: Which one, of all that the device has sent.
        host: The copy.
        copied: The event that says that it is there.
    """

    number: int
    host: torch.Tensor
    copied: Any


class Arrival:
    """A tensor on its way back.

    Attributes:
        tensor: The tensor, on its device.
        fetched: The event that says that it is there.
        stream: The stream that its memory belongs to.
        is_used: Whether a stream has waited for it.
    """

    __slots__ = ("_back", "fetched", "is_used", "stream", "tensor")

    def __init__(self, tensor: torch.Tensor, stream: Any, back: Any) -> None:
        self.tensor, self.stream, self._back = tensor, stream, back
        self.fetched: Any = None
        self.is_used = False

    def __del__(self) -> None:
        """Has the stream wait for a copy that nobody wants any more: it may have the memory then."""
        if not self.is_used:
            self.stream.wait_stream(self._back)


class _Droppable(Protocol):
    """What keeps a tensor that was fetched."""

    def drop(self) -> None:
        """Lets go of the tensor, if it was not taken."""


class _Ahead:
    """A tensor that a backward has on its device ahead of use. It goes when that backward ends or fails."""

    __slots__ = ("_fetched",)

    def __init__(self, fetched: _Droppable) -> None:
        self._fetched = weakref.ref(fetched)

    def __del__(self) -> None:
        fetched = self._fetched()
        if fetched is not None:
            fetched.drop()


class Transfers:
    """The two ways between one device and the host.

    Streams and events are those of the device's module in torch: ``torch.cuda``, ``torch.xpu``, or another one.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the streams.

        Args:
            device: Which accelerator, with its index.
        """
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
        """Returns an uninitialised tensor of the same shape, strides and dtype, in pinned memory.

        Torch pools that memory in blocks whose sizes are powers of two.
        """
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)

    def present_stream(self) -> Any:
        """Returns the stream on which operators of this thread run."""
        return self._module.current_stream(self._device)

    def send(self, tensor: torch.Tensor, stream: Any = None, max_stash_size: int = MAX_STASH_SIZE) -> Sent:
        """Starts a copy to the host, once a stream is done with the tensor.

        Args:
            tensor: What to copy. Its memory is held as long as it is among the last that were sent.
            stream: The stream that makes it; the present one if None.
            max_stash_size: How many tensors are on their way to the host at most, this one counted.
        """
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
        """Lets go of a tensor in the stash, if it is there."""
        with self.lock:
            leaving = self._stash.get(number)
            if leaving is not None:
                leaving.stream.wait_event(leaving.copied)
                del self._stash[number]

    def fetch(self, sent: Sent) -> Arrival:
        """Starts a copy back. What was sent no later leaves the stash: its copies are waited for in any case."""
        with self.lock:
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
        """Lets the present stream wait for a copy on the host."""
        self.present_stream().wait_event(sent.copied)

    def use(self, arrival: Arrival) -> None:
        """Lets the present stream wait for a copy on the device, and use it."""
        stream = self.present_stream()
        stream.wait_event(arrival.fetched)
        if stream != arrival.stream:
            _quietly(arrival.tensor, arrival.tensor.record_stream, stream)
        arrival.is_used = True


def drop_at_end(fetched: _Droppable) -> None:
    """Has a tensor that was fetched leave the device when the backward of this thread ends, unless it was taken by then."""
    queue_callback([_Ahead(fetched)].clear)


def _quietly(tensor: torch.Tensor, function: Any, *args: Any) -> Any:
    """Calls a function without a word to anybody's modes."""
    if num_function_modes():
        with PastFunctionModes():
            return past_all_modes(tensor, function, *args)
    return past_all_modes(tensor, function, *args)


def _with_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Has a tensor be the conjugate of its memory, or the negative, if another one is.

    A copy between the two is one of memory then. Torch would conjugate what is on the host at once, before a copy lands there.
    """
    if tensor.is_conj():
        set_conj(other, True)
    if tensor.is_neg():
        set_neg(other, True)
    return other


_transfers: dict[torch.device, Transfers] = {}


def transfers_for(tensor: torch.Tensor, min_offload_size: int | None = None) -> Transfers | None:
    """Returns the way to the host for a tensor, None for one that stays where it is.

    Args:
        tensor: The tensor.
        min_offload_size: Bytes below which a tensor stays; :data:`DEFAULT_MIN_OFFLOAD_SIZE` if None.
    """
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
    """Whether a model holds a tensor anyway: a parameter, another leaf, a view (by its base), or autocast's cast of one."""
    base: Any = tensor._base if tensor._is_view() else tensor
    if not base.requires_grad or base.is_leaf:
        return bool(base.requires_grad) or type(base) is torch.nn.Parameter
    node = base.grad_fn
    return type(node).__name__ == "ToCopyBackward0" and type(node.next_functions[0][0]).__name__ == "AccumulateGrad"


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each with a place of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return expected > 0
