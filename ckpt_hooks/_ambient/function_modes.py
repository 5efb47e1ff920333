"""Function modes (``torch.overrides.TorchFunctionMode``), of which the default device is one.

Torch keeps them on a stack that each thread has for itself. A recompute exchanges the whole stack for that of its forward, by
pushing the same objects: to *enter* a mode again would change its state, and it may be in use.
"""

from __future__ import annotations

from ckpt_hooks._torch import function_mode_at, num_function_modes, pop_function_mode, push_function_mode

__all__ = ["Snapshot", "capture", "enter", "leave"]

#: The modes, outermost first.
Snapshot = tuple[object, ...]


def capture() -> Snapshot:
    """Returns the modes that are active on this thread."""
    return tuple(map(function_mode_at, range(num_function_modes())))


def enter(captured: Snapshot) -> Snapshot | None:
    """Makes the stack what it was at :func:`capture`; returns what it was before, None if that was it."""
    before = capture()
    if len(before) == len(captured) and all(mode is other for mode, other in zip(before, captured, strict=True)):
        return None
    _exchange(captured)
    return before


def leave(before: Snapshot) -> None:
    """Makes the stack what it was before :func:`enter`."""
    _exchange(before)


def _exchange(modes: Snapshot) -> None:
    while num_function_modes():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
