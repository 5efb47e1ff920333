"""Moving saved tensors to the host until backward, while the device computes.

Tensors go to pinned host memory, which torch pools, on a side stream; they come back on another one, in the order in which
backward will want them. Tensors that are moved together form a *batch*: what a policy keeps of one region, or a single saved
tensor. When backward comes to a batch, all of it is fetched, and the batch that was sent before it too, which backward wants
next: its way overlaps with the computing of this one.

Memory is freed and used again by the rule of torch's caching allocators: a tensor used on another stream than its own says
so (``record_stream``). So nobody waits for a copy but the stream that is about to use it.

What is not worth moving, or cannot be moved as it is, stays: tensors on the host, small ones, those whose elements share
memory, subclasses, and other layouts than strided ones.

Source: torchtune's ``OffloadActivations``, which is where the threshold and the two streams come from.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from ._mutation import AFTER_BACKWARD, advice_for, change_in_words
from ._torch import (
    counted_detach,
    is_traced,
    num_dispatch_modes,
    num_function_modes,
    sequence_number,
    set_versions,
    version_witness,
)
from ._words import describe_kind
from .errors import MutationError

__all__ = ["DEFAULT_MIN_OFFLOAD_SIZE", "Batch", "Offloaded", "Transfers", "offload_saved_tensors", "transfers_for"]

#: Bytes below which a tensor stays on its device: what it takes to start a copy is worth more.
DEFAULT_MIN_OFFLOAD_SIZE = 1024


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
        #: The batch that was sent last.
        self.latest: weakref.ref[Batch] | None = None

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialised tensor of the same shape, strides and dtype, in pinned memory, which torch pools."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)

    def mark_used(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the memory of a tensor from being used again before a stream is through with what it was told so far."""
        tensor.record_stream(stream)

    def present_stream(self) -> Any:
        """Returns the stream on which operators of this thread run."""
        return self._module.current_stream(self._device)

    def send(self, tensor: torch.Tensor, stream: Any = None) -> tuple[torch.Tensor, Any]:
        """Starts a copy to the host, once a stream is done with the tensor.

        Args:
            tensor: What to copy.
            stream: The stream that makes it; the present one if None.

        Returns:
            The copy, and the event that says that it is there.
        """
        host = self.host_like(tensor)
        self._out.wait_stream(self.present_stream() if stream is None else stream)
        with self._module.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            sent = self._out.record_event()
        self.mark_used(tensor, self._out)
        return host, sent

    def fetch(self, host: torch.Tensor, sent: Any) -> tuple[torch.Tensor, Any]:
        """Starts a copy back; returns it, and the event that says that it is there."""
        self._back.wait_event(sent)
        with self._module.stream(self._back):
            tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
            tensor.copy_(host, non_blocking=True)
            fetched = self._back.record_event()
        return tensor, fetched

    def wait(self, event: Any) -> None:
        """Lets the present stream wait for an event."""
        self.present_stream().wait_event(event)

    def use(self, tensor: torch.Tensor, fetched: Any) -> None:
        """Lets the present stream wait for a copy, and use it."""
        current = self.present_stream()
        current.wait_event(fetched)
        self.mark_used(tensor, current)


_transfers: dict[torch.device, Transfers] = {}


def transfers_for(tensor: torch.Tensor, min_offload_size: int = DEFAULT_MIN_OFFLOAD_SIZE) -> Transfers | None:
    """Returns the way to the host for a tensor, None for one that stays where it is.

    Args:
        tensor: The tensor.
        min_offload_size: Bytes below which a tensor stays.
    """
    device = tensor.device
    if device.type in ("cpu", "meta") and device not in _transfers:
        return None
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.nbytes < min_offload_size
        or not _is_dense(tensor)
    ):
        return None
    found = _transfers.get(device)
    if found is None:
        found = _transfers.setdefault(device, Transfers(device))
    return found


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each with a place of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return expected > 0


class Offloaded:
    """A tensor that is on the host, or on its way there or back.

    Attributes:
        batch: What it was sent as part of.
    """

    __slots__ = ("__weakref__", "_fetched", "_host", "_sent", "_transfers", "_version", "batch")

    def __init__(self, tensor: torch.Tensor, transfers: Transfers, batch: Batch, stream: Any = None) -> None:
        """Sends a tensor.

        Args:
            tensor: What nobody will write to any more, or whoever does will see to it that this is not used.
            transfers: The way to go.
            batch: What it is part of.
            stream: The stream that makes the tensor; the present one if None.
        """
        self.batch = batch
        self._transfers = transfers
        self._version = tensor._version
        self._host, self._sent = transfers.send(tensor, stream)
        self._fetched: tuple[torch.Tensor, Any] | None = None

    def finish_sending(self) -> None:
        """Has the present stream wait until the copy is there, so that what was sent may be written to."""
        self._transfers.wait(self._sent)

    def fetch(self) -> None:
        """Starts the way back."""
        if self._fetched is None:
            self._fetched = self._transfers.fetch(self._host, self._sent)

    def get(self) -> torch.Tensor:
        """Returns the tensor on its device, in an object that nobody else has."""
        self.fetch()
        assert self._fetched is not None
        (tensor, fetched), self._fetched = self._fetched, None
        self._transfers.use(tensor, fetched)
        set_versions((tensor,), (self._version,))
        return tensor


class Batch:
    """Tensors that are sent one after the other, and wanted together.

    Attributes:
        tensors: What was sent.
        before: The batch that was sent before this one, to the same device, as long as it is alive.
    """

    __slots__ = ("__weakref__", "before", "tensors")

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[Offloaded]] = []
        self.before: weakref.ref[Batch] | None = None

    def send(self, tensor: torch.Tensor, transfers: Transfers, stream: Any = None) -> Offloaded:
        """Sends a tensor as part of this batch, when a stream is done with it; returns what keeps it."""
        if not self.tensors:
            self.before, transfers.latest = transfers.latest, weakref.ref(self)
        sent = Offloaded(tensor, transfers, self, stream)
        self.tensors.append(weakref.ref(sent))
        return sent

    def fetch(self) -> None:
        """Starts the way back of all that is still wanted, in the order of sending."""
        for reference in self.tensors:
            sent = reference()
            if sent is not None:
                sent.fetch()

    def fetch_with_next(self) -> None:
        """Fetches this batch, and the one that backward will want after it."""
        self.fetch()
        before = None if self.before is None else self.before()
        if before is not None:
            before.fetch()


class offload_saved_tensors(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801 -- a function to those who use it
    """Moves what autograd saves in a block to the host, and back when backward comes to it; no checkpointing needed.

    Parameters stay, since the model holds them anyway, and so do small tensors and those on the host. The memory of a tensor is
    free when its copy is there and nobody else holds it; one that requires no gradient is sent when another operator saves
    something, or the block ends. In backward, each tensor that is asked for has the one before it fetched as well. Where
    operators are traced into a graph (``make_fx``), nothing is moved.

    Args:
        min_offload_size: Bytes below which a tensor stays on its device.

    Raises:
        ValueError: If ``min_offload_size`` is not a number of bytes.
        MutationError: In backward, for a tensor that was modified in place since it was saved, moved or not; plain autograd
            raises as well.

    Example:
        >>> import torch
        >>> from ckpt_hooks.offload import offload_saved_tensors
        >>> x = torch.ones(2, requires_grad=True)
        >>> with offload_saved_tensors():
        ...     y = x.sin().cos()
        >>> y.sum().backward()
    """

    def __init__(self, min_offload_size: int = DEFAULT_MIN_OFFLOAD_SIZE) -> None:
        if isinstance(min_offload_size, bool) or not isinstance(min_offload_size, int) or min_offload_size < 0:
            raise ValueError(
                f"min_offload_size should be a number of bytes, but got {min_offload_size!r}. Pass 0 to move tensors of "
                "every size."
            )

        waiting = self._waiting = _Waiting()

        def pack(tensor: torch.Tensor) -> Any:
            if (num_dispatch_modes() or num_function_modes()) and is_traced():
                # Tracing began in the block. The tracer knows the tensor; an alias or a copy would be a constant of its graph.
                return [tensor, tensor._version]
            if waiting.saved and waiting.sequence != sequence_number():
                waiting.send()
            if tensor.is_leaf and tensor.requires_grad:
                return [tensor, tensor._version]
            transfers = transfers_for(tensor, min_offload_size)
            if transfers is None:
                # Without its history: it may be a result of the very operator that saves it, which would own itself.
                return [counted_detach(tensor) if tensor.requires_grad else tensor, tensor._version]
            saved = _Saved(tensor, transfers)
            if tensor.requires_grad:
                saved.send()
            else:
                waiting.add(saved)
            return saved

        super().__init__(pack, _bring_back)

    def __enter__(self) -> None:
        traced = bool(num_dispatch_modes() or num_function_modes()) and is_traced()
        self._waiting.traced.append(traced)
        if not traced:
            super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        if not self._waiting.traced.pop():
            super().__exit__(*exc_info)
            self._waiting.send()


class _Saved:
    """A tensor that autograd saved, on its device until it is sent to the host."""

    __slots__ = ("__weakref__", "_sent", "_stream", "_tensor", "_transfers", "_version")

    def __init__(self, tensor: torch.Tensor, transfers: Transfers) -> None:
        self._tensor, self._transfers, self._version = tensor, transfers, tensor._version
        self._stream = transfers.present_stream()
        self._sent: Offloaded | None = None

    def send(self) -> None:
        """Sends it; what is left here tells of its version."""
        self._sent = Batch().send(self._tensor, self._transfers, self._stream)
        self._tensor = version_witness(self._tensor)

    def get(self) -> torch.Tensor:
        """Returns it, on its device."""
        version = self._tensor._version
        if version != self._version:
            raise MutationError(
                "a tensor that was moved to the host "
                f"{change_in_words(version, self._version, ' since it was saved, maybe while it was copied')} {AFTER_BACKWARD}",
                region=(),
                tensor="a saved tensor",
                expected=self._version,
                found=version,
            )
        if self._sent is None:
            return self._tensor
        self._sent.batch.fetch_with_next()
        return self._sent.get()


class _Waiting(threading.local):
    """What one operator of this thread has saved and may yet write to: ``rrelu`` saves its noise before it makes it.

    Such tensors require no gradient, and are complete when another operator saves, or the block ends. They go with their graph.
    """

    def __init__(self) -> None:
        self.saved: list[weakref.ref[_Saved]] = []
        self.sequence = -1
        #: Of each block that this thread is in, whether it was entered where operators are traced, and does nothing.
        self.traced: list[bool] = []

    def add(self, saved: _Saved) -> None:
        """Has a tensor wait."""
        self.saved.append(weakref.ref(saved))
        self.sequence = sequence_number()

    def send(self) -> None:
        """Sends those that wait, now that they are complete."""
        waiting, self.saved = self.saved, []
        for reference in waiting:
            saved = reference()
            if saved is not None:
                saved.send()


def _bring_back(packed: Any) -> torch.Tensor:
    """Unpacks what was saved: a tensor that was moved, or one that stayed with its version then."""
    if type(packed) is not list:
        moved: torch.Tensor = packed.get()
        return moved
    tensor: torch.Tensor
    tensor, version = packed
    if tensor._version != version:
        what = f"a {describe_kind(tensor)} {'leaf' if tensor.requires_grad else 'tensor'}"
        raise MutationError(
            f"{what} that was saved in a block of offload_saved_tensors, and stayed where it was, "
            f"{change_in_words(tensor._version, version)} Backward needs the values that forward saw. "
            f"{advice_for(tensor, version)}",
            region=(),
            tensor=what,
            expected=version,
            found=tensor._version,
        )
    return tensor
