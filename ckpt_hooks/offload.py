"""Moving saved tensors to the host between forward and backward, by :mod:`ckpt_hooks._tensors.transfers`."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import torch

from ._core.holdings import Holding, size_of
from ._core.mutation import mutated
from ._core.numbers import storage_and_size
from ._core.words import describe_kind
from ._tensors.offloaded import Batch, Offloaded
from ._tensors.transfers import DEFAULT_MIN_OFFLOAD_SIZE, MAX_STASH_SIZE, Transfers, transfers_for
from ._torch import (
    counted_detach,
    is_kept_anyway,
    is_traced,
    num_dispatch_modes,
    num_function_modes,
    sequence_number,
    storage_address,
    version_witness,
)

__all__ = ["DEFAULT_MIN_OFFLOAD_SIZE", "offload_saved_tensors"]


class offload_saved_tensors(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801 -- a function to those who use it
    """Moves tensors saved by autograd in a block to the host, and back for backward; no checkpointing needed.

    Parameters stay, since the model holds parameters anyway, and so do their views, autocast's casts, small tensors, and
    tensors on the host. A tensor saved by several operators is sent once, and fetched once in a backward. A tensor without
    gradient is sent when another operator saves something, or the block ends. Under ``make_fx`` nothing is moved.

    Memory is freed by count. The device holds the last ``max_fwd_stash_size`` sent tensors. To send another tensor, the
    computing stream waits for the oldest copy. In backward as many are fetched ahead of their use. On the host each tensor lies
    in pinned memory, which torch hands out in blocks of 2, 4, 8, ... bytes: up to twice the size of the tensor.

    Args:
        min_offload_size: Bytes below which a tensor stays on its device. At the default, 256 KiB, two copies take about as
            long as their start.
        max_fwd_stash_size: The number of tensors on their way to the host, and of tensors fetched ahead of their use. A larger
            number lets copies and computing overlap better, and takes more memory.

    Raises:
        ValueError: If ``min_offload_size`` is no number of bytes, or ``max_fwd_stash_size`` no number from 1.
        MutationError: In backward, for a tensor modified in place since it was saved, moved or not. Plain autograd raises too.

    Example:
        >>> import torch
        >>> from ckpt_hooks.offload import offload_saved_tensors
        >>> x = torch.ones(2, requires_grad=True)
        >>> with offload_saved_tensors():
        ...     y = x.sin().cos()
        >>> y.sum().backward()
    """

    def __init__(self, min_offload_size: int = DEFAULT_MIN_OFFLOAD_SIZE, max_fwd_stash_size: int = MAX_STASH_SIZE) -> None:
        if isinstance(min_offload_size, bool) or not isinstance(min_offload_size, int) or min_offload_size < 0:
            raise ValueError(
                f"min_offload_size should be a number of bytes, but got {min_offload_size!r}. Pass 0 to move tensors of "
                "every size."
            )
        if isinstance(max_fwd_stash_size, bool) or not isinstance(max_fwd_stash_size, int) or max_fwd_stash_size < 1:
            raise ValueError(
                f"max_fwd_stash_size should be a number of tensors from 1, but got {max_fwd_stash_size!r}. Pass 1 to hold as "
                f"little memory as can be, or leave it out for {MAX_STASH_SIZE}."
            )

        waiting = self._waiting = _Waiting()
        shared = self._shared = _Shared()

        def pack(tensor: torch.Tensor) -> Any:
            if (num_dispatch_modes() or num_function_modes()) and is_traced():
                # Tracing began in the block. The tracer knows the tensor; an alias or a copy would be a constant of its graph.
                return [tensor, tensor._version]
            if waiting.saved and waiting.sequence != sequence_number():
                waiting.send(shared)
            if is_kept_anyway(tensor):
                return [tensor, tensor._version]
            transfers = transfers_for(tensor, min_offload_size)
            if transfers is None:
                # Without its history: it may be a result of the very operator that saves it, which would own itself.
                return [counted_detach(tensor) if tensor.requires_grad else tensor, tensor._version]
            if not tensor.requires_grad:
                saved = _Saved(tensor, transfers, max_fwd_stash_size)
                waiting.add(saved)
                return saved
            found = shared.find(tensor)
            if found is None:
                found = _Saved(tensor, transfers, max_fwd_stash_size)
                found.send(shared)
            return found

        super().__init__(pack, _bring_back)

    def __enter__(self) -> None:
        traced = bool(num_dispatch_modes() or num_function_modes()) and is_traced()
        self._waiting.traced.append(traced)
        if not traced:
            super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        if not self._waiting.traced.pop():
            super().__exit__(*exc_info)
            self._waiting.send(self._shared)


class _Saved:
    """A saved tensor, on its device until the copy to the host begins.

    Attributes:
        storage: Refers to the storage on the device, weakly.
        task: The graph task of the latest use, where several operators saved the tensor.
    """

    __slots__ = ("__weakref__", "_max_stash_size", "_sent", "_stream", "_tensor", "_transfers", "_version", "storage", "task")

    def __init__(self, tensor: torch.Tensor, transfers: Transfers, max_stash_size: int) -> None:
        self._tensor, self._transfers, self._version = tensor, transfers, tensor._version
        self._stream, self._max_stash_size = transfers.present_stream(), max_stash_size
        self._sent: Offloaded | None = None
        self.task = -1
        self.storage = weakref.ref(tensor.untyped_storage())

    def send(self, shared: _Shared) -> None:
        """Sends the tensor; keeps a witness of its version."""
        if self._tensor._version == self._version:
            shared.add(self._tensor, self)
        self._sent = Batch().send(self._tensor, self._transfers, self._stream, self._max_stash_size)
        self._tensor = version_witness(self._tensor)

    def again(self) -> _Saved:
        """Returns a copy for another operator."""
        saved, sent = copy.copy(self), self._sent
        assert sent is not None
        sent.takers = [*(sent.takers or [weakref.ref(self)]), weakref.ref(saved)]
        return saved

    def holding(self, reason: str) -> Holding:
        """Returns a report of the tensor, or of the copy on the host."""
        tensor, place = (self._tensor, "") if self._sent is None else (self._sent.on_host(), " on the host")
        words, storage = describe_kind(tensor) + place, storage_and_size(tensor)
        return Holding(words, reason, size_of(tensor), *storage, tensor.shape, tensor.dtype, tensor.device)

    def get(self) -> torch.Tensor:
        """Returns the tensor on its device."""
        if self._tensor._version != self._version:
            since = " since it was saved, maybe while it was copied"
            raise mutated(self._tensor, self._version, None, "that was moved to the host", kind="saved", since=since)
        if self._sent is None:
            return self._tensor
        self._sent.batch.fetch_with_next(self._max_stash_size)
        return self._sent.get(self if self._sent.takers else None)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key, equal for two tensors of one storage only if the tensors are the same."""
    return (
        storage_address(tensor),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor._version,
    )


class _Shared:
    """Tensors sent from a block, as long as their graph lives, to be found when another operator saves the same tensor.

    A tensor without gradient is not looked for: an operator may write to such a tensor without counting the version.
    """

    def __init__(self) -> None:
        self._sent: weakref.WeakValueDictionary[Any, _Saved] = weakref.WeakValueDictionary()

    def find(self, tensor: torch.Tensor) -> _Saved | None:
        """Returns the holder of a sent tensor, for another operator; None if the tensor was not sent."""
        identity = _identity(tensor)
        found = self._sent.get(identity)
        if found is None or found.storage() is not tensor.untyped_storage():  # the address may be somebody else's by now
            return None
        again = self._sent[identity] = found.again()
        return again

    def add(self, tensor: torch.Tensor, saved: _Saved) -> None:
        """Notes a sent tensor."""
        self._sent[_identity(tensor)] = saved


class _Waiting(threading.local):
    """Tensors saved by an operator of this thread which may yet write to the tensors: ``rrelu`` saves its noise unfilled.

    Such tensors require no gradient, and are complete when another operator saves, or the block ends.
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

    def send(self, shared: _Shared) -> None:
        """Sends the waiting tensors, which are complete."""
        waiting, self.saved = self.saved, []
        for reference in waiting:
            saved = reference()
            if saved is not None:
                saved.send(shared)


def _bring_back(packed: Any) -> torch.Tensor:
    """Unpacks a moved tensor, or a tensor which stayed, with its version."""
    if type(packed) is not list:
        moved: torch.Tensor = packed.get()
        return moved
    tensor: torch.Tensor
    tensor, version = packed
    if tensor._version != version:
        raise mutated(tensor, version, None, "that was saved in a block of offload_saved_tensors, and stayed where it was,")
    return tensor
