"""What a function sees besides its arguments: captured at forward, restored around each recompute (Rule 7).

Each module knows one kind of state. All of them follow one scheme: ``capture`` answers a value that is cheap to hold (None
where there is nothing out of the ordinary), ``enter`` makes the present equal to such a value and answers what is needed to
undo that (None where nothing had to be touched), ``leave`` undoes it. Whether there is anything out of the ordinary is asked
here, in the cheapest way there is, before any of them is called.
"""

from __future__ import annotations

import torch

from ckpt_hooks._torch import is_any_autocast_enabled, num_function_modes

from . import autocast, default_device, rng

__all__ = ["Ambient", "Undo", "capture", "enter", "leave"]

#: Random generators, autocast, default device: what each module's ``capture`` answered.
Ambient = tuple["rng.Snapshot | None", "autocast.Snapshot | None", "torch.device | None"]
#: What each module's ``enter`` answered.
Undo = tuple[rng.Snapshot, "autocast.Snapshot | None", "default_device.Undo | None"]


def capture(*, preserve_rng_state: bool) -> Ambient:
    """Returns the state of this thread.

    Args:
        preserve_rng_state: Whether random generators are part of it. If not, a recompute draws what comes next, but still
            leaves the streams outside where it found them.
    """
    return (
        rng.capture() if preserve_rng_state else None,
        autocast.capture() if is_any_autocast_enabled() else None,
        default_device.capture() if num_function_modes() else None,
    )


def enter(ambient: Ambient) -> Undo:
    """Makes this thread's state equal to a captured one; the answer goes to :func:`leave`."""
    generators, casts, device = ambient
    return (
        rng.enter(generators),
        autocast.enter(casts) if casts is not None or is_any_autocast_enabled() else None,
        default_device.enter(device) if device is not None or num_function_modes() else None,
    )


def leave(undo: Undo) -> None:
    """Makes this thread's state what it was before :func:`enter`, whatever happened since."""
    generators, casts, device = undo
    if device is not None:
        default_device.leave(device)
    if casts is not None:
        autocast.leave(casts)
    rng.leave(generators)
