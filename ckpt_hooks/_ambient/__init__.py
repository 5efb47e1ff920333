"""What a function sees besides its arguments: captured at forward, restored around each recompute (Rule 7).

Each module knows one kind of state. All of them follow one scheme: ``capture`` answers a value that is cheap to hold (None
where there is nothing out of the ordinary), ``enter`` makes the present equal to such a value and answers what is needed to
undo that (None where nothing had to be touched), ``leave`` undoes it. Whether there is anything out of the ordinary is asked
here, in the cheapest way there is, before any of them is called.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt_hooks._torch import is_any_autocast_enabled, num_function_modes

from . import autocast, flags, function_modes, rng

__all__ = ["Ambient", "Undo", "capture", "enter", "leave"]

#: Random streams, flags, autocast, function modes: what each module's ``capture`` answered.
Ambient = tuple["rng.Snapshot", flags.Snapshot, "autocast.Snapshot | None", function_modes.Snapshot]
#: What each module's ``enter`` answered.
Undo = tuple[rng.Undo, flags.Snapshot, "autocast.Snapshot | None", "function_modes.Snapshot | None"]

_NO_MODES: function_modes.Snapshot = ()


def capture(*, preserve_rng_state: bool, generators: Sequence[torch.Generator] = ()) -> Ambient:
    """Returns the state of this thread.

    Args:
        preserve_rng_state: Whether random streams are part of it. If not, a recompute draws what comes next, but still
            leaves the streams outside where it found them.
        generators: Random generators that the function reaches, besides the default ones.
    """
    return (
        rng.capture(generators, preserve=preserve_rng_state),
        flags.capture(),
        autocast.capture() if is_any_autocast_enabled() else None,
        function_modes.capture() if num_function_modes() else _NO_MODES,
    )


def enter(ambient: Ambient) -> Undo:
    """Makes this thread's state equal to a captured one; the answer goes to :func:`leave`."""
    streams, switches, casts, modes = ambient
    return (
        rng.enter(streams),
        flags.enter(switches),  # before autocast, which goes by its dtypes
        autocast.enter(casts) if casts is not None or is_any_autocast_enabled() else None,
        function_modes.enter(modes) if modes or num_function_modes() else None,
    )


def leave(undo: Undo) -> None:
    """Makes this thread's state what it was before :func:`enter`, whatever happened since."""
    streams, switches, casts, modes = undo
    if modes is not None:
        function_modes.leave(modes)
    if casts is not None:
        autocast.leave(casts)
    flags.leave(switches)
    rng.leave(streams)
