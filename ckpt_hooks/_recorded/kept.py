"""Tensors that a tape keeps: those from outside that its operators read, and those that a policy said to keep.

While the outermost region is open, a tape sees every write, and takes a copy before one where the old values are needed. After
that versions tell of writes, as they do for what autograd itself keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.mutation import advice_for, change_in_words
from ckpt_hooks._core.paths import RegionPath, format_path
from ckpt_hooks._core.words import describe_kind
from ckpt_hooks._tensors.copies import is_plain, stand_in_for
from ckpt_hooks._tensors.fused_steps import num_fused_steps, stepped_since
from ckpt_hooks._tensors.offloaded import Batch
from ckpt_hooks._tensors.transfers import Transfers
from ckpt_hooks._torch import (
    counted_detach,
    is_freed,
    is_kept_anyway,
    neg_view,
    past_all_modes,
    storage_address,
    storage_of,
    version_witness,
)
from ckpt_hooks.errors import CheckpointError, MutationError

__all__ = [
    "Clones",
    "Hooks",
    "Kept",
    "Lost",
    "Moved",
    "Packed",
    "copy_in",
    "lost_to_exchange",
    "lost_to_write",
]

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

#: Storages and their copies, by the address of the original.
Clones = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]


def copy_in(tensor: torch.Tensor, clones: Clones) -> torch.Tensor:
    """Returns a copy of a tensor, with the same strides. Dispatch modes do not see it made.

    Args:
        tensor: The tensor.
        clones: Storages and their copies, by the address of the original, which is held so that it stays nobody else's: tensors
            that share memory do so in the copy as well.
    """
    copy: torch.Tensor = past_all_modes(tensor, _copy_in, tensor, clones)
    return copy


def _copy_in(tensor: torch.Tensor, clones: Clones) -> torch.Tensor:
    if not is_plain(tensor):
        return tensor.detach().clone()
    address = storage_address(tensor)
    found = clones.get(address)
    if found is None:
        original = tensor.untyped_storage()
        found = clones[address] = original, original.clone()  # type: ignore[no-untyped-call]
    storage = found[1]
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        # What is in memory may be the conjugate of what the tensor is, or its negative.
        copy = copy.conj() if tensor.is_conj() else copy
        return neg_view(copy) if tensor.is_neg() else copy


class Kept:
    """A tensor that is kept.

    Attributes:
        tensor: The tensor; None where it was given to somebody's hooks, or moved to the host.
        version: Its version when the outermost region ended; None before, and where nobody counts.
        reason: Why it is kept, in words.
        path: The region that it is kept for.
        is_fickle: Whether it is likely to be written to after the region, as what the region wrote to itself.
        by_policy: Whether a policy said so.
        is_packed: Whether somebody's hooks have it, who may have to do a lot to bring it back.
        steps: How many steps of fused optimizers there were when the outermost region ended; unset before.
    """

    is_packed = False
    __slots__ = ("by_policy", "is_fickle", "path", "reason", "steps", "tensor", "version")

    tensor: torch.Tensor | None
    version: int | None
    reason: str
    path: RegionPath
    is_fickle: bool
    by_policy: bool
    steps: int

    def describe(self) -> str:
        """Returns what it is, in words; nothing for parameters and the like, which are there in any case."""
        tensor = self.tensor
        return "" if tensor is None or is_kept_anyway(tensor) else describe_kind(tensor)

    def copy(self, clones: Clones) -> None:
        """Keeps a copy instead, since the tensor is about to be written to; see :func:`copy_in`."""
        assert self.tensor is not None
        self.tensor, self.version = copy_in(self.tensor, clones), None

    def sealed(self, hooks: Hooks | None) -> Kept:
        """Returns what keeps the tensor from now on, when the outermost region ends.

        Args:
            hooks: What to hand it to, if anything.
        """
        tensor = self.tensor
        assert tensor is not None
        if tensor.is_inference():
            return self
        if self.is_fickle:
            self.copy({})
            return self
        self.version, self.steps = tensor._version, num_fused_steps()
        if is_kept_anyway(tensor):
            return self
        if hooks is not None:
            return Packed(self, hooks)
        if not tensor.requires_grad:
            return self
        # The tensor itself, should it be written to later on, would own the graph that this is part of.
        self.tensor = counted_detach(tensor)
        return self

    def get(self) -> torch.Tensor:
        """Returns the tensor.

        Raises:
            MutationError: If it was modified since.
            CheckpointError: If its memory was freed.
        """
        tensor = self.tensor
        assert tensor is not None
        if self.version is not None and (
            tensor._version != self.version or (self.steps != num_fused_steps() and stepped_since(tensor, self.steps))
        ):
            raise self._modified(tensor)
        if is_freed(tensor):
            region = format_path(self.path)
            raise CheckpointError(
                f"the memory of a {describe_kind(tensor)} tensor that region {'/'.join(region)!r} needs was freed after "
                "forward and not filled again. A framework that gathers parameters does so for each of its units: make each "
                "unit a region of its own.",
                region=region,
            )
        return tensor

    def _modified(self, tensor: torch.Tensor) -> MutationError:
        region, version = format_path(self.path), self.version or 0
        return MutationError(
            f"a {describe_kind(tensor)} tensor that region {'/'.join(region)!r} needs ({self.reason}) "
            f"{change_in_words(tensor._version, version)} A replay of the region needs the values that it saw. "
            f"{advice_for(tensor, version)} Or have what was computed from it kept, by a policy or by leaving it out of the "
            "region.",
            region=region,
            tensor=describe_kind(tensor),
            expected=version,
            found=tensor._version,
        )


def _take_over(new: Kept, old: Kept) -> torch.Tensor:
    """Makes one what keeps a tensor instead of another; returns the tensor."""
    tensor = old.tensor
    assert tensor is not None
    new.tensor, new.version, new.reason, new.path = None, old.version, old.reason, old.path
    new.is_fickle, new.by_policy = old.is_fickle, old.by_policy
    return tensor


class Packed(Kept):
    """A tensor that was given to somebody's saved-tensor hooks."""

    is_packed = True
    __slots__ = ("_description", "_of_frame", "_packed", "_storage", "_strides", "_unpack")

    def __init__(self, kept: Kept, hooks: Hooks) -> None:
        tensor = _take_over(self, kept)
        if self.version is None:
            self.version = tensor._version
        self._description = describe_kind(tensor)
        self._storage = storage_of(tensor)
        self._strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_contiguous() else None
        pack, self._unpack = hooks
        self._of_frame = are_of_frame(hooks)  # which looks at versions by itself
        self._packed: Any = pack(tensor)

    def describe(self) -> str:
        """Returns what it is, in words."""
        return self._description

    def sealed(self, hooks: Hooks | None) -> Kept:
        """Returns itself."""
        return self

    def get(self) -> torch.Tensor:
        """Returns what the hooks bring back.

        Raises:
            MutationError: If the hooks bring back the tensor itself, modified since.
        """
        unpacked: torch.Tensor = self._unpack(self._packed)
        if not self._of_frame and unpacked._version > (self.version or 0) and storage_of(unpacked) == self._storage:
            raise self._modified(unpacked)
        tensor = unpacked.detach()
        if self._strides is not None and tensor.stride() != self._strides:
            tensor = stand_in_for(tensor, self._strides)
        return tensor


class Moved(Kept):
    """A tensor that is on the host."""

    __slots__ = ("_description", "_moved", "_witness")

    def __init__(self, kept: Kept, batch: Batch, transfers: Transfers) -> None:
        tensor = _take_over(self, kept)
        self._description = describe_kind(tensor)
        self._witness: torch.Tensor | None = version_witness(tensor)
        self._moved = batch.send(tensor, transfers)

    def describe(self) -> str:
        """Returns what it is, in words."""
        return f"{self._description} on the host"

    def copy(self, clones: Clones) -> None:
        """Has the write wait until the copy on the host is complete."""
        self._moved.finish_sending()
        self._witness = None

    def sealed(self, hooks: Hooks | None) -> Kept:
        """Notes the version."""
        if self._witness is not None:
            self.version = self._witness._version
        return self

    def get(self) -> torch.Tensor:
        """Returns the tensor on its device.

        Raises:
            MutationError: If it was modified since, maybe while it was copied.
        """
        if self._witness is not None and self.version is not None and self._witness._version != self.version:
            raise self._modified(self._witness)
        self._moved.batch.fetch_with_next()
        return self._moved.get()


class Lost(Kept):
    """Stands for a tensor whose content is not there any more.

    Attributes:
        what: Which tensor.
        why: What has become of it, after its name and the region's.
    """

    __slots__ = ("what", "why")

    def __init__(self, what: str, why: str, path: RegionPath) -> None:
        self.tensor, self.version, self.reason, self.path = None, None, "", path
        self.is_fickle = self.by_policy = False
        self.what, self.why = what, why

    def describe(self) -> str:
        """Returns nothing: nothing is kept."""
        return ""

    def copy(self, clones: Clones) -> None:
        """Does nothing: it is too late."""

    def sealed(self, hooks: Hooks | None) -> Kept:
        """Returns itself."""
        return self

    def get(self) -> torch.Tensor:
        """Raises.

        Raises:
            MutationError: Always.
        """
        region = format_path(self.path)
        message = self.why.format(region=repr("/".join(region)))
        raise MutationError(message, region=region, tensor=self.what, expected=None, found=None)


def lost_to_exchange(path: RegionPath) -> Lost:
    """Returns what stands for a tensor from outside that a region read, and that was then given another storage in it."""
    return Lost(
        "a tensor from outside",
        "a tensor from outside of region {region} was given another storage (`tensor.data = ...`) between two operators of the "
        "region that read it. A replay needs the storage from before. Use two tensors, or leave the first operator out of the "
        "region.",
        path,
    )


def lost_to_write(name: str, path: RegionPath) -> Lost:
    """Returns what stands for a saved tensor that an operator of that name modified in place in the region.

    Plain autograd raises for it as well.
    """
    return Lost(
        "a saved tensor",
        f"a tensor that region {{region}} saved has been modified by an inplace operation ({name}) later in the region. "
        "Backward needs the values from before. Modify a clone, or use the out-of-place form.",
        path,
    )
