"""Function modes (``torch.overrides.TorchFunctionMode``), of which the default device is one.

Torch keeps these modes on a stack, one a thread. A recompute replaces the stack by forward's, and pushes the same objects: to
*enter* a mode again would change its state, and the mode may be in use. The mode of ``torch.set_default_device`` is noted in a
second place besides, which is replaced too.
"""

from __future__ import annotations

import operator

from ckpt_hooks._torch.modes import (
    function_mode_at,
    global_device_mode,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
    set_global_device_mode,
)

__all__ = ["Snapshot", "capture", "enter", "leave"]

#: The modes, outermost first, and last the mode of ``torch.set_default_device``, or None.
Snapshot = tuple[object, ...]


def capture() -> Snapshot:
    """Returns the active modes of this thread, of which there is at least one."""
    return (*map(function_mode_at, range(num_function_modes())), global_device_mode())


def enter(captured: Snapshot) -> Snapshot | None:
    """Restores the stack of :func:`capture`, empty if not captured; returns the stack before.

    None if the two are the same.
    """
    before, captured = capture(), captured or (None,)
    if len(before) == len(captured) and all(map(operator.is_, before, captured)):
        return None
    _exchange(captured)
    return before


def leave(before: Snapshot) -> None:
    """Restores the stack before :func:`enter`."""
    _exchange(before)


def _exchange(snapshot: Snapshot) -> None:
    *modes, device_mode = snapshot
    while num_function_modes():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
    set_global_device_mode(device_mode)
