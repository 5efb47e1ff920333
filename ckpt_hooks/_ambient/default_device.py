"""The default device, whether set by ``torch.set_default_device`` or by ``with torch.device(...)``.

Torch keeps it as a function mode on a stack that each thread has for itself. A recompute enters a mode of its own for the
same device: entering the captured object again would change that object, which may be in use.
"""

from __future__ import annotations

import torch
from torch.utils._device import DeviceContext

from ckpt_hooks._torch import function_mode_at, num_function_modes

__all__ = ["Undo", "capture", "enter", "leave"]

Undo = DeviceContext


def capture() -> torch.device | None:
    """Returns the default device that is in force on this thread, or None where none was set."""
    for position in range(num_function_modes() - 1, -1, -1):
        mode = function_mode_at(position)
        if isinstance(mode, DeviceContext):
            device: torch.device = mode.device
            return device
    return None


def enter(captured: torch.device | None) -> Undo | None:
    """Makes the default device what it was at :func:`capture`; returns what to :func:`leave`, or None if it was that."""
    if capture() == captured:
        return None
    # Without any default device, factory functions use the CPU.
    context: DeviceContext = DeviceContext(torch.device("cpu") if captured is None else captured)
    context.__enter__()  # type: ignore[no-untyped-call]
    return context


def leave(context: Undo) -> None:
    """Makes the default device what it was before :func:`enter`."""
    context.__exit__(None, None, None)  # type: ignore[no-untyped-call]
