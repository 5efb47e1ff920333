"""Tensors held until backward: as they are, in memory filled again, through saved-tensor hooks, on the host, or lost.

Frames of both kinds hold tensors besides their handles: a selective function frame the outputs kept by its policy, a recorded
frame also the tensors from outside which its operators read. :meth:`HeldTensor.sealed` decides between the kinds when versions
begin to tell of writes: for a selective frame at once, for a recorded frame when its outermost region ends.
:meth:`HeldTensor.get` returns the tensor of forward or raises :class:`MutationError`. A recorded frame passes the error on. A
selective frame runs the operator again instead, since a held output is only a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.descriptions import RegionPath, dtype_and_shape, kind_in_words
from ckpt_hooks._core.holdings import Cause, Holding, Reason, nbytes_of, size_of
from ckpt_hooks._core.hooks import UNPACKS
from ckpt_hooks._core.modes import unseen
from ckpt_hooks._core.mutation import changed_held, freed
from ckpt_hooks._core.tensor_numbers import storage_and_size
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.tensors import counted_detach, dense_parts, is_freed, is_kept_anyway, storage_of, version_witness
from ckpt_hooks.errors import MutationError

from .copies import Clones, copy_in, stand_in_for
from .fused_steps import num_fused_steps, stepped_since
from .nested_values import instances_in
from .offloaded import Batch
from .refilling import Origin
from .shared_host_copies import Moved
from .transfers import Transfers

__all__ = ["HeldByHooks", "HeldOnHost", "HeldRefilled", "HeldTensor", "Hooks", "Lost", "hold_tensor", "recomputes"]

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_LOST = Cause(Reason.LOST)


class HeldTensor:
    """A tensor held as it is.

    Attributes:
        tensor: The tensor; None where hooks or the host have it.
        version: The version when sealed; None before, and where writes are not counted.
        cause: The reason for holding.
        path: The region which needs the tensor.
        is_fickle: Whether later writes are likely, as for a tensor written to by the region.
        is_on_host: Whether the tensor was moved to the host.
        is_packed: Whether getting the tensor takes work, which a replay does once for all readers.
        steps: The number of steps of fused optimizers when sealed; unset before.
    """

    is_on_host = is_packed = False
    __slots__ = ("cause", "is_fickle", "path", "steps", "tensor", "version")

    tensor: torch.Tensor | None
    version: int | None
    cause: Cause
    path: RegionPath
    is_fickle: bool
    steps: int

    @property
    def by_policy(self) -> bool:
        """Whether a policy asked for the tensor."""
        return self.cause.reason in (Reason.POLICY, Reason.NAME)

    def copy(self, clones: Clones) -> None:
        """Holds a copy instead, before a write to the tensor; see :func:`copy_in`."""
        assert self.tensor is not None
        self.tensor, self.version = copy_in(self.tensor, clones), None

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        """Returns the holder of the tensor from now on, when versions begin to tell of writes.

        Args:
            hooks: Saved-tensor hooks for the tensor, if any.
        """
        tensor = self.tensor
        assert tensor is not None
        if tensor.is_inference():
            return self
        if self.is_fickle and not is_freed(tensor):
            self.copy({})
            return self
        self.version, self.steps = tensor._version, num_fused_steps()
        if is_kept_anyway(tensor):
            return self
        if hooks is not None:
            return HeldByHooks(tensor, hooks, self.path, self.cause)
        if not tensor.requires_grad:
            return self
        # The tensor itself would own this graph after a later write in place.
        self.tensor = counted_detach(tensor)
        return self

    def get(self) -> torch.Tensor:
        """Returns the tensor.

        Raises:
            MutationError: If the tensor was modified since forward, or its memory was freed.
        """
        tensor = self.tensor
        assert tensor is not None
        if self.version is not None and (
            tensor._version != self.version or (self.steps != num_fused_steps() and stepped_since(tensor, self.steps))
        ):
            raise self._modified(tensor)
        if is_freed(tensor):
            raise freed(tensor, self.path)
        return tensor

    def _modified(self, tensor: torch.Tensor, kind: str = "") -> MutationError:
        return changed_held(tensor, self.version or 0, self.path, self.cause, kind=kind)


def hold_tensor(tensor: torch.Tensor, path: RegionPath, cause: Cause) -> HeldTensor:
    """Returns the holder of a tensor, as it is, for a policy; not sealed yet."""
    held = HeldTensor()
    held.tensor, held.version, held.cause, held.path = tensor, None, cause, path
    held.is_fickle = False
    return held


class HeldRefilled(HeldTensor):
    """A tensor in memory which its owner frees, and fills again with the same contents; never copied, never given to hooks.

    Attributes:
        owner: The owner of the memory.
        source: The tensor from which the owner fills the memory.
        source_version: The version of the source in forward.
        source_steps: The number of steps of fused optimizers in forward.
    """

    __slots__ = ("owner", "source", "source_steps", "source_version")

    def __init__(self, tensor: torch.Tensor, origin: Origin) -> None:
        self.tensor, self.version, self.steps = tensor, _version_of(tensor), num_fused_steps()
        self.owner, self.source = origin
        self.source_steps = self.steps
        self.source_version = _version_of(origin.source)

    def holding(self, cause: Cause) -> None:
        """Returns no report: the memory is the owner's."""

    def copy(self, clones: Clones) -> None:
        """Does nothing: the owner writes to the memory what was there. Another write shows in the version."""

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        """Returns itself, with an alias for a tensor which has a history."""
        tensor = self.tensor
        assert tensor is not None
        if self.version is None:
            self.version = _version_of(tensor)
        if tensor.requires_grad and not is_kept_anyway(tensor):
            self.tensor = counted_detach(tensor)
        return self

    def unmodified(self) -> torch.Tensor:
        """Returns the tensor, whose memory may be freed, to be borrowed before a read.

        Raises:
            MutationError: If the tensor, or the tensor from which it is filled, was modified since forward.
        """
        tensor, source = self.tensor, self.source
        assert tensor is not None
        if self.version is not None and tensor._version != self.version:
            raise self._modified(tensor)
        if self.source_version is not None and (
            source._version != self.source_version
            or (self.source_steps != num_fused_steps() and stepped_since(source, self.source_steps))
        ):
            raise changed_held(source, self.source_version, self.path, self.cause, by_policy=False)
        return tensor

    def get(self) -> torch.Tensor:
        """Returns the tensor.

        Raises:
            MutationError: If the tensor or its source was modified since forward, or its memory is freed.
        """
        tensor = self.unmodified()
        if is_freed(tensor):
            raise freed(tensor, self.path)
        return tensor


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class HeldByHooks(HeldTensor):
    """A tensor packed by saved-tensor hooks."""

    is_packed = True
    __slots__ = ("_kind", "_packed", "_storage", "_strides", "_unpack")

    @unseen
    def __init__(self, tensor: torch.Tensor, hooks: Hooks, path: RegionPath, cause: Cause) -> None:
        self.tensor, self.version, self.cause, self.path = None, tensor._version, cause, path
        self.is_fickle = False
        self._kind = dtype_and_shape(tensor)
        self._storage = storage_of(tensor)
        self._strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_contiguous() else None
        pack, self._unpack = hooks
        with torch.no_grad():  # as autograd calls the hooks
            self._packed: Any = pack(tensor)

    def holding(self, cause: Cause) -> Holding | None:
        """Returns a report of the held tensor; None for hooks of a frame, which lists the tensor itself.

        Of other hooks the report has the memory of the tensors in their result, or the size of the held tensor if none show.
        """
        if recomputes(self._unpack):
            return None
        if type(self._packed) is Moved:
            return self._packed.holding(cause)
        found = _holding(Reason.HOOKS, cause, self._kind, None)
        packed = instances_in(self._packed, torch.Tensor)
        if not packed:
            return found
        sizes = tuple(storage_and_size(part) for one in packed for part in dense_parts(one))
        nbytes = sum(map(size_of, packed))
        if len(sizes) == 1:
            return found._replace(nbytes=nbytes, storage=sizes[0][0], storage_nbytes=sizes[0][1])
        return found._replace(nbytes=nbytes, parts=sizes)

    @property
    def is_on_host(self) -> bool:  # type: ignore[override]
        """Whether the tensor was moved to the host, as an input of a region."""
        return type(self._packed) is Moved

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        """Returns itself."""
        return self

    @unseen
    def get(self) -> torch.Tensor:
        """Returns the tensor unpacked by the hooks, with its strides in forward. Hooks of a frame check versions themselves.

        Raises:
            MutationError: If the hooks bring back the tensor itself, modified or freed since.
        """
        tensor: torch.Tensor = self._unpack(self._packed)
        if not recomputes(self._unpack):
            if is_freed(tensor):
                raise freed(tensor, self.path)
            if storage_of(tensor) == self._storage and tensor._version > (self.version or 0):
                raise self._modified(tensor)
        tensor = tensor.detach()
        return tensor if self._strides is None or tensor.stride() == self._strides else stand_in_for(tensor, self._strides)


class HeldOnHost(HeldTensor):
    """A tensor on the host."""

    is_on_host = is_packed = True
    __slots__ = ("_kind", "_sent", "_witness")

    @unseen
    def __init__(self, tensor: torch.Tensor, batch: Batch, transfers: Transfers, path: RegionPath, cause: Cause) -> None:
        self.tensor, self.version, self.cause, self.path = None, None, cause, path
        self.is_fickle = False
        self._kind = dtype_and_shape(tensor)
        self._witness: torch.Tensor | None = version_witness(tensor)
        self._sent = batch.send(tensor, transfers)

    def holding(self, cause: Cause) -> Holding:
        """Returns a report of the copy on the host."""
        return _holding(Reason.OFFLOADED, cause, self._kind, torch.device("cpu"))

    def copy(self, clones: Clones) -> None:
        """Makes the write wait until the copy on the host is complete."""
        self._sent.finish_sending()
        self._witness = None

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        """Notes the version; hooks are not asked."""
        if self._witness is not None:
            self.version = self._witness._version
        return self

    @unseen
    def get(self) -> torch.Tensor:
        """Returns the tensor on its device, in an object of the caller's own.

        Raises:
            MutationError: If the tensor was modified since, maybe during the copy.
        """
        if self._witness is not None and self.version is not None and self._witness._version != self.version:
            raise self._modified(self._witness, kind_in_words(self._kind))
        self._sent.batch.fetch_in(graph_task_id())
        return self._sent.get()


class Lost(HeldTensor):
    """Stands for a tensor whose content is gone.

    Attributes:
        error: Returns the error for a region.
    """

    __slots__ = ("error",)

    def __init__(self, error: Callable[[RegionPath], MutationError], path: RegionPath) -> None:
        self.tensor, self.version, self.cause, self.path = None, None, _LOST, path
        self.is_fickle = False
        self.error = error

    def copy(self, clones: Clones) -> None:
        """Does nothing: it is too late."""

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        """Returns itself."""
        return self

    def get(self) -> torch.Tensor:
        """Raises.

        Raises:
            MutationError: Always.
        """
        raise self.error(self.path)


def _holding(reason: Reason, cause: Cause, kind: tuple[torch.dtype, torch.Size | None], device: torch.device | None) -> Holding:
    dtype, shape = kind
    nbytes = None if shape is None else nbytes_of(shape, dtype)
    return Holding(reason, cause.in_words(), nbytes or 0, None, 0, shape, dtype, device)


def recomputes(unpack: Callable[[Any], Any]) -> bool:
    """Whether an unpack hook belongs to a region, torch's included, which runs operators again."""
    # Torch makes its hook anew in each call: only the module tells whose it is.
    return unpack in UNPACKS or getattr(unpack, "__module__", None) == "torch.utils.checkpoint"
