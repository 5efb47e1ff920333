"""The budget ``"auto"``: what a device has room for."""

from __future__ import annotations

import gc

import torch
from torch.nn import Module

from ckpt_hooks._core.misuse import wrong

#: The part of the room that is left: to other programs on the device, and to what a driver allocates for kernels.
_LEFT = 0.05


def accelerator_of(model: Module) -> torch.device | None:
    """Returns the accelerator where a model is; None for the host."""
    found = torch.accelerator.current_accelerator()
    return next((one.device for one in model.parameters() if found is not None and one.device.type == found.type), None)


class Room:
    """The memory of an accelerator, as its caching allocator shares it out."""

    def __init__(self, device: torch.device | None) -> None:
        if device is None:
            advice = "'auto' asks an accelerator, and the model is on none: on a host pass bytes, as in '20GiB'."
            raise wrong("auto", "memory_budget", "bytes, or a part from 0.0 to 1.0", advice, ValueError)
        self._device, self._before = device, 0

    def nbytes(self) -> int:
        """Returns the bytes which a step may take: free ones, and those that are reserved without use, but for a part."""
        gc.collect()
        free, _ = torch.accelerator.get_memory_info(self._device)
        unused = torch.accelerator.memory_reserved(self._device) - torch.accelerator.memory_allocated(self._device)
        return int((free + unused) * (1 - _LEFT))

    def begin(self) -> None:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._before = torch.accelerator.memory_allocated(self._device)

    def taken(self) -> int:
        """Returns the most bytes reserved since, above those that were allocated then: what fragments are in the way counts."""
        return torch.accelerator.max_memory_reserved(self._device) - self._before
