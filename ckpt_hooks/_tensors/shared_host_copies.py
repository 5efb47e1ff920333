"""Saved tensors moved to the host: one copy for all that saved the tensor, operators or regions."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

from ckpt_hooks._core.descriptions import RegionPath, describe_kind
from ckpt_hooks._core.holdings import Cause, Holding, Reason, size_of
from ckpt_hooks._core.mutation import changed_moved
from ckpt_hooks._core.tensor_numbers import storage_and_size
from ckpt_hooks._torch.tensors import storage_address, version_witness

from .offloaded import Batch, Offloaded
from .transfers import MAX_STASH_SIZE, Transfers

__all__ = ["Moved", "Shared"]


class Moved:
    """A saved tensor, on its device until the copy to the host begins.

    Attributes:
        batch: The batch to fetch with this tensor; None for a batch of its own.
        path: The region which saved the tensor; None outside of regions.
        storage: Refers to the storage on the device, weakly.
        task: The graph task of the latest use, where several saved the tensor.
    """

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
        batch: Batch | None = None,
        path: RegionPath | None = None,
    ) -> None:
        """Notes the tensor, its version, and the stream which makes it.

        Args:
            tensor: The tensor.
            transfers: The copies of its device.
            max_stash_size: The largest number of tensors on their way to the host.
            batch: See :attr:`batch`. A backward fetches one batch ahead of this; else as many as may be on their way.
            path: See :attr:`path`.
        """
        self._tensor, self._transfers, self._version = tensor, transfers, tensor._version
        self._stream, self._max_stash_size = transfers.present_stream(), max_stash_size
        self._ahead = max_stash_size if batch is None else 1
        self._sent: Offloaded | None = None
        self.batch, self.path = batch, path
        self.task = -1
        self.storage = weakref.ref(tensor.untyped_storage())

    def send(self, shared: Shared) -> None:
        """Sends the tensor; keeps a witness of its version."""
        tensor, is_unchanged = self._tensor, self._tensor._version == self._version
        if self.batch is None:
            self.batch = Batch()
        self._sent = self.batch.send(tensor, self._transfers, self._stream, self._max_stash_size)
        self._tensor = version_witness(tensor)
        if is_unchanged:  # only now, since another thread may ask for the copy
            shared.add(tensor, self)

    def again(self, batch: Batch | None, path: RegionPath | None) -> Moved:
        """Returns a copy for another operator, or another region.

        Args:
            batch: The batch to fetch with the tensor; None for that of the first.
            path: The other region, if any.
        """
        saved, sent = copy.copy(self), self._sent
        assert sent is not None
        sent.takers = [*(sent.takers or [weakref.ref(self)]), weakref.ref(saved)]
        saved.path = path
        if batch is not None:
            batch.join(sent, self._transfers)
            saved.batch = batch
        return saved

    def holding(self, cause: Cause) -> Holding:
        """Returns a report of the tensor, or of the copy on the host."""
        sent, why = self._sent, cause.in_words()
        tensor, reason = (self._tensor, cause.reason) if sent is None else (sent.host, Reason.OFFLOADED)
        return Holding(reason, why, size_of(tensor), *storage_and_size(tensor), tensor.shape, tensor.dtype, tensor.device)

    def get(self) -> torch.Tensor:
        """Returns the tensor on its device.

        Raises:
            MutationError: If the tensor was modified since.
        """
        if self._tensor._version != self._version:
            of_region = self.path is not None and self._sent is not None
            kind = describe_kind(self._sent.host) if of_region and self._sent is not None else "saved"
            raise changed_moved(self._tensor, self._version, self.path if of_region else None, kind)
        if self._sent is None:
            return self._tensor
        assert self.batch is not None
        self.batch.fetch_with_next(self._ahead)
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


class Shared:
    """Sent tensors, as long as their graph lives, to be found when another operator or region saves the same tensor.

    A tensor without gradient is not looked for: an operator may write to such a tensor without counting the version.
    """

    def __init__(self) -> None:
        self._sent: weakref.WeakValueDictionary[Any, Moved] = weakref.WeakValueDictionary()

    def find(self, tensor: torch.Tensor, batch: Batch | None = None, path: RegionPath | None = None) -> Moved | None:
        """Returns the holder of a sent tensor, for another operator or region; None if the tensor was not sent.

        Args:
            tensor: The tensor.
            batch: See :meth:`Moved.again`.
            path: Likewise.
        """
        identity = _identity(tensor)
        found = self._sent.get(identity)
        if found is None or found.storage() is not tensor.untyped_storage():  # the address may be somebody else's by now
            return None
        again = self._sent[identity] = found.again(batch, path)
        return again

    def add(self, tensor: torch.Tensor, saved: Moved) -> None:
        """Notes a sent tensor."""
        self._sent[_identity(tensor)] = saved
