"""Inputs of regions on the host until backward (``offload_inputs=True``): a pair of saved-tensor hooks for each region.

A region saves its inputs by way of the hooks around (Rule 2); where none are active, it may bring these. The inputs of one
region are one batch: a backward which reaches the region fetches them, and those of the region before.

Results of operators move which require grad. Others stay: leaves, parameters and their views, tensors on the host, small ones,
and tensors without gradients, such as masks, of which models hand one to all their regions. An input of several regions is sent
once. Whoever saves the inputs compares the versions of those that stay.
"""

from __future__ import annotations

import torch

from ckpt_hooks._core.descriptions import RegionPath
from ckpt_hooks._core.events import Watch
from ckpt_hooks._torch.tensors import counted_detach, is_kept_anyway

from .held_tensors import Hooks
from .offloaded import Batch
from .shared_host_copies import Moved, Shared
from .transfers import transfers_for

__all__ = ["hooks_for_inputs"]

_shared = Shared()


def hooks_for_inputs(path: RegionPath, watch: Watch | None, min_size: int) -> Hooks:
    """Returns the hooks for the inputs of one region.

    Args:
        path: The region.
        watch: Hears of the copies.
        min_size: The bytes from which an input moves.
    """
    batch = Batch(watch)

    def pack(tensor: torch.Tensor) -> Moved | torch.Tensor:
        if not tensor.requires_grad or is_kept_anyway(tensor):
            return tensor
        transfers = transfers_for(tensor, min_size)
        if transfers is None:
            return counted_detach(tensor)
        moved = _shared.find(tensor, batch, path)
        if moved is None:
            moved = Moved(tensor, transfers, batch=batch, path=path)
            moved.send(_shared)
        return moved

    return pack, _unpack


def _unpack(packed: Moved | torch.Tensor) -> torch.Tensor:
    return packed.get() if type(packed) is Moved else packed  # type: ignore[return-value]
