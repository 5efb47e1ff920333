"""Inputs of regions on the host until backward (``offload_inputs=True``): a pair of saved-tensor hooks for each region.

A region saves its inputs by way of the hooks around (Rule 2); where none are active, it may bring these. The inputs of one
region are one batch: a backward which reaches the region fetches them, and those of the region before.

Results of operators move which require grad. Others stay: leaves, parameters and their views, tensors on the host, small ones,
and tensors without gradients, such as masks, of which models hand one to all their regions. An input of several regions is sent
once. Whoever saves the inputs compares the versions of those that stay.
"""

from __future__ import annotations

import weakref

import torch

from ckpt_hooks._core.holdings import Holding
from ckpt_hooks._core.paths import RegionPath
from ckpt_hooks._core.watch import Watch
from ckpt_hooks._torch import counted_detach, is_kept_anyway

from .held import Hooks
from .moved import Moved, Shared
from .offloaded import Batch
from .transfers import transfers_for

__all__ = ["OffloadedInputs"]

_shared = Shared()


class OffloadedInputs:
    """The inputs of one region on the host.

    Attributes:
        hooks: The pair of saved-tensor hooks which moves them.
        moved: The moved tensors, as long as they are wanted.
    """

    __slots__ = ("hooks", "moved")

    def __init__(self, path: RegionPath, watch: Watch | None) -> None:
        """Makes the hooks.

        Args:
            path: The region.
            watch: Hears of the copies.
        """
        batch = Batch(watch)
        all_moved = self.moved = weakref.WeakSet[Moved]()

        def pack(tensor: torch.Tensor) -> Moved | torch.Tensor:
            if not tensor.requires_grad or is_kept_anyway(tensor):
                return tensor
            transfers = transfers_for(tensor)
            if transfers is None:
                return counted_detach(tensor)
            moved = _shared.find(tensor, batch, path)
            if moved is None:
                moved = Moved(tensor, transfers, batch=batch, path=path)
                moved.send(_shared)
            all_moved.add(moved)
            return moved

        self.hooks: Hooks = pack, _unpack

    def holdings(self) -> list[Holding]:
        """Returns a report of each copy on the host."""
        return [found for moved in self.moved if (found := moved.holding("argument")) is not None]


def _unpack(packed: Moved | torch.Tensor) -> torch.Tensor:
    return packed.get() if type(packed) is Moved else packed  # type: ignore[return-value]
