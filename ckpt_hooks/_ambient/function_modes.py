"""Function modes (``torch.overrides.TorchFunctionMode``), of which the default device is one.

Torch keeps them on a stack that each thread has for itself. A recompute exchanges the whole stack for that of its forward, by
pushing the same objects: to *enter* a mode again would change its state, and it may be in use. The mode that
``torch.set_default_device`` has pushed is noted in another place besides, which goes along.
"""

from __future__ import annotations

import operator

from ckpt_hooks._torch import (
    function_mode_at,
    global_device_mode,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
    set_global_device_mode,
)

__all__ = ["Snapshot", "capture", "enter", "leave"]

#: The modes, outermost first, and last which of them ``torch.set_default_device`` has pushed, or None.
Snapshot = tuple[object, ...]


def capture() -> Snapshot:
    """Returns the modes that are active on this thread; there is at least one."""
    return (*map(function_mode_at, range(num_function_modes())), global_device_mode())


def enter(captured: Snapshot) -> Snapshot | None:
    """Makes the stack what it was at :func:`capture`, empty if that was not called; returns what it was before.

    None if it was the same.
    """
    before, captured = capture(), captured or (None,)
    if len(before) == len(captured) and all(map(operator.is_, before, captured)):
        return None
    _exchange(captured)
    return before


def leave(before: Snapshot) -> None:
    """Makes the stack what it was before :func:`enter`."""
    _exchange(before)


def _exchange(snapshot: Snapshot) -> None:
    *modes, device_mode = snapshot
    while num_function_modes():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
    set_global_device_mode(device_mode)
