"""Holders of tensors until backward: the tensor itself, memory that an owner refills, hooks, a copy on the host, or nothing.

:meth:`HeldTensor.sealed` decides which; :meth:`HeldTensor.get` returns the tensor of forward, or raises
:class:`MutationError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._core.descriptions import RegionPath, dtype_and_shape, format_path, kind_in_words
from ckpt_hooks._core.holdings import Cause, Holding, Reason, nbytes_of, size_of, storage_and_size
from ckpt_hooks._core.hooks import UNPACKS
from ckpt_hooks._core.modes import unrecorded
from ckpt_hooks._core.mutation import Why, fused_steps, mutated, stepped_since
from ckpt_hooks._torch.autograd import Hooks, graph_task_id
from ckpt_hooks._torch.tensors import (
    counted_detach,
    dense_parts,
    is_freed,
    is_kept_anyway,
    storage_address,
    storage_of,
    version_of,
    version_witness,
)
from ckpt_hooks.errors import MutationError

from .copies import Clones, copy_in, layout_of, stand_in_for
from .nested import outer_tensors_in
from .refilling import RefillSource
from .transfers import Batch, Moved, Transfers

_LOST = Cause(Reason.LOST)


class HeldTensor:
    # ``is_packed``: getting the tensor takes work, so a replay gets it once for all readers.
    is_on_host = is_packed = False
    __slots__ = ("cause", "faces", "is_fickle", "memory", "path", "steps", "tensor", "version")

    tensor: torch.Tensor | None  # None where hooks or the host have it
    memory: torch.Tensor | None  # an alias in forward's memory with its own version, if the tensor may get other memory
    version: int | None  # the tensor's, at sealing or at the read of a leaf; None before, and if torch counts no writes
    cause: Cause
    path: RegionPath
    is_fickle: bool  # whether later writes are likely, since the region wrote to the memory
    steps: int  # the count of fused optimizer steps at the time of ``version``; unset before
    # Tensors in this memory with other version counters, and their versions: results of ``_unsafe_view`` in ``matmul``, say.
    faces: Sequence[tuple[torch.Tensor, int]]

    def __init__(self, tensor: torch.Tensor | None, path: RegionPath, cause: Cause) -> None:
        self.tensor, self.path, self.cause, self.faces = tensor, path, cause, ()
        self.memory = self.version = None
        self.is_fickle = False

    @property
    def by_policy(self) -> bool:
        return self.cause.reason in (Reason.POLICY, Reason.NAME)

    def is_in(self, address: int) -> bool:
        tensor = self.tensor if self.memory is None else self.memory
        return tensor is not None and (storage_of(tensor) or 0) == address

    def find(self) -> torch.Tensor:
        """Returns the tensor, or an alias in the memory of forward if the tensor was given other memory since."""
        tensor, memory = self.tensor, self.memory
        assert tensor is not None
        if memory is None:
            return tensor
        if storage_address(tensor) != storage_address(memory):
            self.leave(memory)
        return memory

    def is_elsewhere(self) -> bool:
        tensor, memory = self.tensor, self.memory
        return tensor is not None and memory is not None and storage_address(tensor) != storage_address(memory)

    def leave(self, memory: torch.Tensor) -> None:
        """Holds the memory of forward in place of the tensor, which has other memory now."""
        self.tensor, self.memory = memory, None
        self.version = None if self.version is None else memory._version

    def copy(self, clones: Clones) -> None:
        """Holds a copy instead, before a write to the tensor."""
        self.tensor, self.memory, self.version, self.faces = copy_in(self.find(), clones), None, None, ()

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        """Returns the holder to use after the outermost region; from now on a changed version is an error."""
        alias, tensor = self.find(), self.tensor
        assert tensor is not None
        if tensor is not alias and not is_kept_anyway(tensor) and layout_of(tensor) != layout_of(alias):
            self.leave(alias)
            tensor = alias
        if version_of(tensor) < 0:
            return self
        if self.is_fickle and not is_freed(tensor):
            self.copy({})
            return self
        self.version, self.steps = tensor._version, fused_steps.count
        if is_kept_anyway(tensor):
            return self
        if hooks is not None:
            if self.memory is not None and not (tensor.requires_grad or recomputes(hooks[1])):
                tensor = counted_detach(tensor)  # hooks may keep the tensor itself, which may get other memory
            return HeldByHooks(tensor, hooks, self.path, self.cause, self.faces)
        if not tensor.requires_grad:
            return self
        # After a later write in place the tensor itself would own this graph, which would own the tensor.
        self.tensor, self.memory = counted_detach(tensor), None
        return self

    def get(self) -> torch.Tensor:
        """Returns the tensor; raises if it was modified since forward, or its memory was freed."""
        if self.faces:
            self._check_faces()
        tensor = self.tensor
        assert tensor is not None
        # The version is checked first: a write may have come before the tensor was given other memory.
        if self.version is not None and (
            tensor._version != self.version or (fused_steps.count > self.steps and stepped_since(tensor, self.steps))
        ):
            raise self._mutated(tensor, self.version)
        memory = self.memory
        # A fast path for most tensors, with the result of the lines below: it saves 1% of a small block's step.
        is_there = type(memory) is torch.Tensor and storage_address(tensor) == storage_address(memory) and memory.data_ptr()
        if memory is not None and is_there:
            return memory
        alias = self.find()
        if is_freed(alias):
            raise self._mutated(alias, None)
        return alias

    def _check_faces(self) -> None:
        for face, version in self.faces:
            if face._version != version:
                raise self._mutated(face, version)

    def _mutated(self, tensor: torch.Tensor, version: int | None, why: Why = Why.HELD, kind: str = "") -> MutationError:
        return mutated(why, format_path(self.path), tensor, version, detail=self.cause.in_words(), kind=kind)


class HeldRefilled(HeldTensor):
    """A tensor in memory which its owner frees, and fills again with the same contents; never copied, never given to hooks."""

    __slots__ = ("owner", "source", "source_steps", "source_version")

    def __init__(self, tensor: torch.Tensor, origin: RefillSource, path: RegionPath, cause: Cause) -> None:
        super().__init__(tensor, path, cause)
        self.version, (self.owner, self.source) = _version_of(tensor), origin
        self.steps = self.source_steps = fused_steps.count
        self.source_version = _version_of(origin.source)

    def holding(self, cause: Cause) -> None:
        """Returns no report: the memory is the owner's."""

    def copy(self, clones: Clones) -> None:
        """Does nothing: the owner fills the memory with the same contents, and any other write shows in the version."""

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        tensor = self.tensor
        assert tensor is not None
        if self.version is None:
            self.version = _version_of(tensor)
        if tensor.requires_grad and not is_kept_anyway(tensor):
            self.tensor = counted_detach(tensor)
        return self

    def unmodified(self) -> torch.Tensor:
        """Returns the tensor, whose memory has to be borrowed if it is freed; raises if tensor or source was modified."""
        tensor, source = self.tensor, self.source
        assert tensor is not None
        if self.version is not None and tensor._version != self.version:
            raise self._mutated(tensor, self.version)
        if self.source_version is not None and (
            source._version != self.source_version or stepped_since(source, self.source_steps)
        ):
            raise self._mutated(source, self.source_version, Why.NEEDED)
        return tensor

    def get(self) -> torch.Tensor:
        tensor = self.unmodified()
        if is_freed(tensor):
            raise self._mutated(tensor, None)
        return tensor


def _version_of(tensor: torch.Tensor) -> int | None:
    version = version_of(tensor)
    return None if version < 0 else version


class HeldByHooks(HeldTensor):
    is_packed = True
    __slots__ = ("_kind", "_packed", "_storage", "_strides", "_unpack")

    @unrecorded
    def __init__(self, tensor: torch.Tensor, hooks: Hooks, path: RegionPath, cause: Cause, faces: Any = ()) -> None:
        super().__init__(None, path, cause)
        self.version, self.faces = tensor._version, faces
        self._kind = dtype_and_shape(tensor)
        self._storage = storage_of(tensor)
        self._strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_contiguous() else None
        pack, self._unpack = hooks
        with torch.no_grad():  # as autograd calls the hooks
            self._packed: Any = pack(tensor)

    def holding(self, cause: Cause) -> Holding | None:
        """Returns a report of the held tensor; None for hooks of a frame, which lists the tensor itself."""
        if recomputes(self._unpack):
            return None
        if type(self._packed) is Moved:
            return self._packed.holding(cause)
        holding = _holding(Reason.HOOKS, cause, self._kind, None)
        packed = outer_tensors_in(self._packed)
        if not packed:  # falls back to the size of the held tensor
            return holding
        sizes = tuple(storage_and_size(part) for tensor in packed for part in dense_parts(tensor))
        nbytes = sum(map(size_of, packed))
        if len(sizes) == 1:
            return holding._replace(nbytes=nbytes, storage=sizes[0][0], storage_nbytes=sizes[0][1])
        return holding._replace(nbytes=nbytes, parts=sizes)

    @property
    def is_on_host(self) -> bool:  # type: ignore[override]
        return type(self._packed) is Moved

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        return self

    @unrecorded
    def get(self) -> torch.Tensor:
        tensor: torch.Tensor = self._unpack(self._packed)
        if not recomputes(self._unpack):  # hooks of a frame check versions themselves
            if is_freed(tensor):
                raise self._mutated(tensor, None)
            if storage_of(tensor) == self._storage:
                if tensor._version > (self.version or 0):
                    raise self._mutated(tensor, self.version or 0)
                self._check_faces()
        tensor = tensor.detach()
        return tensor if self._strides is None or tensor.stride() == self._strides else stand_in_for(tensor, self._strides)


class HeldOnHost(HeldTensor):
    is_on_host = is_packed = True
    __slots__ = ("_kind", "_sent", "_witness")

    @unrecorded
    def __init__(self, tensor: torch.Tensor, batch: Batch, transfers: Transfers, path: RegionPath, cause: Cause) -> None:
        super().__init__(None, path, cause)
        self._kind = dtype_and_shape(tensor)
        self._witness: torch.Tensor | None = version_witness(tensor)
        self._sent = batch.send(tensor, transfers)

    def holding(self, cause: Cause) -> Holding:
        return _holding(Reason.OFFLOADED, cause, self._kind, torch.device("cpu"))

    def copy(self, clones: Clones) -> None:
        """Makes the write wait until the copy on the host is complete."""
        self._sent.finish_sending()
        self._witness = None

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        if self._witness is not None:
            self.version = self._witness._version
        return self

    @unrecorded
    def get(self) -> torch.Tensor:
        """Returns the tensor on its device, in an object of the caller's own."""
        # A write may have come during the copy, too.
        if self._witness is not None and self.version is not None and self._witness._version != self.version:
            raise self._mutated(self._witness, self.version, kind=kind_in_words(self._kind))
        if self._sent.batch.task != graph_task_id():
            self._sent.batch.fetch_with_next()
        return self._sent.get()


class Lost(HeldTensor):
    """Stands for a tensor whose content is gone."""

    __slots__ = ("_detail", "_why")

    def __init__(self, why: Why, path: RegionPath, detail: str = "") -> None:
        super().__init__(None, path, _LOST)
        self._why, self._detail = why, detail

    def copy(self, clones: Clones) -> None:
        """Does nothing: the content is already gone."""

    def sealed(self, hooks: Hooks | None) -> HeldTensor:
        return self

    def get(self) -> torch.Tensor:
        raise mutated(self._why, format_path(self.path), detail=self._detail)


def _holding(reason: Reason, cause: Cause, kind: tuple[torch.dtype, torch.Size | None], device: torch.device | None) -> Holding:
    dtype, shape = kind
    nbytes = None if shape is None else nbytes_of(shape, dtype)
    return Holding(reason, cause.in_words(), nbytes or 0, None, 0, shape, dtype, device)


def recomputes(unpack: Callable[[Any], Any]) -> bool:
    """Whether an unpack hook belongs to a region, of this package or torch's, which runs operators again."""
    # Torch makes a new hook in each call, so only its module shows that it is torch's.
    return unpack in UNPACKS or getattr(unpack, "__module__", None) == "torch.utils.checkpoint"
