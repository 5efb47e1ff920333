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
from .draws import ReplayDraws

__all__ = ["Ambient", "Undo", "capture", "enter", "has_streams", "leave", "replay_draws"]

#: Random streams, flags, autocast, function modes: what each module's ``capture`` answered.
Ambient = tuple["rng.Snapshot", flags.Snapshot, "autocast.Snapshot | None", function_modes.Snapshot]
#: What each module's ``enter`` answered.
Undo = tuple[rng.Undo, flags.Undo, "autocast.Snapshot | None", "function_modes.Snapshot | None"]

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


def enter(ambient: Ambient, *, default_generators: bool = True) -> Undo:
    """Makes this thread's state equal to a captured one; the answer goes to :func:`leave`. Gradients are enabled already.

    Args:
        ambient: What was captured.
        default_generators: Whether the default generators are set back; if not, they are not touched at all.
    """
    streams, switches, casts, modes = ambient
    return (
        rng.enter(streams, defaults=default_generators),
        flags.enter(switches),
        autocast.enter(casts) if casts is not None or is_any_autocast_enabled() else None,
        function_modes.enter(modes) if modes or num_function_modes() else None,
    )


def has_streams(ambient: Ambient) -> bool:
    """Whether a recompute will set random streams back that are not torch's default ones."""
    return bool(ambient[0][2])


def replay_draws(ambient: Ambient, states: list[torch.Tensor] | None) -> ReplayDraws:
    """Returns the dispatch mode for a recompute that touches no default generator.

    Args:
        ambient: What was captured; draws start from its states where forward noted none.
        states: What forward noted at each draw.
    """
    replay = ReplayDraws(states)
    for generator, state in rng.default_states(ambient[0]):
        replay.start(generator, state)
    return replay


def leave(undo: Undo) -> None:
    """Makes this thread's state what it was before :func:`enter`, whatever happened since."""
    streams, switches, casts, modes = undo
    if modes is not None:
        function_modes.leave(modes)
    if casts is not None:
        autocast.leave(casts)
    flags.leave(switches)
    rng.leave(streams)
