"""Tensors that a tape keeps: those from outside that its operators read, and those that a policy said to keep.

While the outermost region is open, a tape sees every write, and takes a copy before one where the old values are needed. After
that versions tell of writes, as they do for what autograd itself keeps.
"""

from __future__ import annotations

import torch

from ckpt_hooks._refit import copy_of
from ckpt_hooks._runtime.frame import RegionPath, format_path
from ckpt_hooks._torch import SavedTensor, counted_detach, is_freed, save_tensor, storage_of, version_witness
from ckpt_hooks.errors import CheckpointError, MutationError
from ckpt_hooks.offload import Batch, Offloaded, Transfers

__all__ = ["Kept", "Overwritten", "describe_tensor"]


def describe_tensor(tensor: torch.Tensor) -> str:
    """Returns a tensor in words, as in ``"float32[4, 8]"``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class Kept:
    """A tensor that is kept.

    Attributes:
        tensor: The tensor; None where it was given to somebody's hooks, or moved to the host.
        reason: Why it is kept, in words.
        path: The region that it is kept for.
        is_fickle: Whether it is likely to be written to after the region, as what the region wrote to itself.
    """

    __slots__ = (
        "_moved",
        "_saved",
        "_storage",
        "_strides",
        "_version",
        "_witness",
        "_shape",
        "is_fickle",
        "path",
        "reason",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, reason: str, path: RegionPath) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.reason = reason
        self.path = path
        self.is_fickle = False
        self._shape = None if tensor.is_leaf and tensor.requires_grad else (tensor.dtype, tensor.shape)
        self._witness: torch.Tensor | None = None
        self._version = -1  # not known yet
        self._saved: SavedTensor | None = None
        self._moved: Offloaded | None = None
        self._storage: int | None = None
        self._strides: tuple[int, ...] | None = None

    def move(self, batch: Batch, transfers: Transfers) -> None:
        """Sends the tensor to the host, and lets go of it."""
        tensor = self.tensor
        assert tensor is not None
        self._witness = version_witness(tensor)
        self._moved = batch.send(tensor, transfers)
        self.tensor = None

    def copy(self) -> None:
        """Keeps a copy instead, since the tensor is about to be written to."""
        if self._moved is not None:
            self._moved.finish_sending()
            self._witness = None
            return
        assert self.tensor is not None
        plain = type(self.tensor) in (torch.Tensor, torch.nn.Parameter) and self.tensor.layout is torch.strided
        self.tensor = copy_of(self.tensor) if plain else self.tensor.detach().clone()

    @property
    def description(self) -> str:
        """What it is, in words; empty for parameters and the like, which are there in any case."""
        if self._shape is None:
            return ""
        dtype, shape = self._shape
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"

    def seal(self, *, with_hooks: bool) -> None:
        """Hands the tensor to the hooks that are active, now that the outermost region ends; notes its version."""
        tensor = self._witness if self.tensor is None else self.tensor
        if tensor is None or self._version >= 0 or tensor.is_inference():
            return
        if self.is_fickle:
            self.copy()
            return
        self._version = tensor._version
        if self.tensor is None:
            return
        if with_hooks and not (tensor.is_leaf and tensor.requires_grad):
            self._storage = storage_of(tensor)
            self._strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_contiguous() else None
            self._saved = save_tensor(tensor)
            self.tensor = None
        elif not tensor.is_leaf:
            # What is kept is part of the graph; the tensor itself, should it be written to later on, would own that graph.
            self.tensor = counted_detach(tensor)

    def get(self) -> torch.Tensor:
        """Returns the tensor.

        Raises:
            MutationError: If it was modified since.
            CheckpointError: If its memory was freed.
        """
        tensor = self.tensor
        if tensor is not None:
            if self._version >= 0 and tensor._version != self._version:
                self._raise_modified(tensor)
        elif self._moved is not None:
            if self._witness is not None and 0 <= self._version != self._witness._version:
                self._raise_modified(self._witness)
            self._moved.batch.fetch_with_next()
            return self._moved.get()
        else:
            assert self._saved is not None
            unpacked = self._saved.unpack()
            if unpacked._version > self._version and storage_of(unpacked) == self._storage:
                self._raise_modified(unpacked)
            tensor = unpacked.detach()
            if self._strides is not None and tensor.stride() != self._strides:
                tensor = copy_of(tensor, self._strides)
        if is_freed(tensor):
            raise CheckpointError(
                f"the memory of a {describe_tensor(tensor)} tensor that region {'/'.join(format_path(self.path))!r} needs was "
                "freed after forward and not filled again. A framework that gathers parameters does so for each of its units: "
                "make each unit a region of its own.",
                region=format_path(self.path),
            )
        return tensor

    def _raise_modified(self, tensor: torch.Tensor) -> None:
        region = format_path(self.path)
        raise MutationError(
            f"a {describe_tensor(tensor)} tensor that region {'/'.join(region)!r} needs ({self.reason}) has been modified by an "
            f"inplace operation: it is at version {tensor._version}; expected version {self._version} instead. A replay of the "
            "region needs the values that it saw: modify a clone, or have what was computed from the tensor kept, by a policy "
            "or by leaving it out of the region.",
            region=region,
            tensor=describe_tensor(tensor),
            expected=self._version,
            found=tensor._version,
        )


class Overwritten(Kept):
    """Stands for a saved tensor that was modified in place in the region, for which plain autograd raises as well."""

    __slots__ = ("_name",)

    def __init__(self, name: str, path: RegionPath) -> None:
        self.tensor, self.reason, self.path, self._name, self._shape = None, "", path, name, None

    def seal(self, *, with_hooks: bool) -> None:
        """There is nothing to seal."""

    def get(self) -> torch.Tensor:
        """Raises.

        Raises:
            MutationError: Always.
        """
        region = format_path(self.path)
        raise MutationError(
            f"a tensor that region {'/'.join(region)!r} saved has been modified by an inplace operation ({self._name}) later in "
            "the region, so it is at another version than expected. Backward needs the values from before: modify a clone, or "
            "use the out-of-place form.",
            region=region,
            tensor="a saved tensor",
            expected=0,
            found=1,
        )
