"""The state a function sees besides its arguments: captured at forward, restored around each recompute (Rule 7).

Each module knows one kind of state, and all follow one scheme. ``capture`` returns a value which is cheap to hold (None in the
ordinary case). ``enter`` restores such a value and returns the state before (None where nothing had to change). ``leave``
undoes ``enter``. The checks for the ordinary case are here, in their cheapest form, ahead of any of these calls.

Most regions see the state of the region before, and most recomputes find the state they need: no autocast, no modes, torch's
default streams only, no switch moved. For these, :func:`capture` and :func:`enter` check this in one function each; other cases
go the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._torch.modes import GLOBAL_DEVICE, global_device_mode, is_any_autocast_enabled, num_function_modes

from . import autocast, flags, function_modes, rng, streams
from .engine_image import HEAD, TAIL, Image, take_image
from .flags import read_fast
from .named_random_sources import TRACKED
from .rng import read_cpu, write_cpu
from .streams import TORCH_NAMES
from .threaded_draws import ReplayDraws

__all__ = ["Ambient", "Undo", "capture", "enter", "leave", "replay_draws"]

_NO_MODES: function_modes.Snapshot = ()


class Ambient:
    """The state seen by a forward.

    Attributes:
        streams: Random streams.
        flags: Switches of the process.
        casts: Autocast, None where it is off.
        modes: Function modes.
        has_streams: Whether a recompute will restore random streams other than torch's default streams.
        is_simple: Whether the state is only flags and states of torch's default generators.
        image: The image of the CPU's generator in its state, if known.
    """

    __slots__ = ("casts", "flags", "has_streams", "image", "is_simple", "modes", "streams")

    def __init__(
        self, streams: rng.Snapshot, switches: flags.Snapshot, casts: autocast.Snapshot | None, modes: function_modes.Snapshot
    ) -> None:
        self.streams = streams
        self.flags = switches
        self.casts = casts
        self.modes = modes
        state, _, others = streams
        self.is_simple = state is not None and not (others or casts or modes)
        self.image: Image | None = None
        self.has_streams = bool(others)


#: The state of the CPU's generator, its image if the recompute also began there, and the switches.
_SimpleUndo = tuple[torch.Tensor, Image | None, flags.Snapshot]
#: The undo of a simple state, with the states of devices if any; else the results of each module's ``enter``.
Undo = _SimpleUndo | tuple[_SimpleUndo, rng.States] | list[Any]

#: The latest simple state with a known image.
_latest: Ambient | None = None


def capture(*, preserve_rng_state: bool, generators: Sequence[torch.Generator] = ()) -> Ambient:
    """Returns the state of this thread.

    Args:
        preserve_rng_state: Whether random streams are part of the state. If not, a recompute draws the next numbers, but still
            leaves the streams outside where it found them.
        generators: Random generators reachable by the function, besides the default generators.
    """
    global _latest
    latest = _latest
    if latest is not None and preserve_rng_state and not (generators or TRACKED):
        try:
            if (
                latest.image == (HEAD.raw, TAIL.raw)
                and latest.flags.guard.check()
                and read_fast() == latest.flags.unguarded
                and not num_function_modes()
            ):
                if len(TORCH_NAMES) == streams.names_without_devices:
                    return latest
                found = _with_devices(latest)
                if found is not None:
                    return found
        except RuntimeError:  # from a switch which cannot be read this way, or from a device, which will raise again
            pass
    image = take_image()
    ambient = Ambient(
        rng.capture(generators, preserve=preserve_rng_state),
        flags.capture(),
        autocast.capture() if is_any_autocast_enabled() else None,
        function_modes.capture() if num_function_modes() else _NO_MODES,
    )
    if ambient.is_simple and image is not None and image == take_image():  # unchanged since before the read of the state
        ambient.image = image
        _latest = ambient
    return ambient


def _with_devices(latest: Ambient) -> Ambient | None:
    """Returns the latest state, with the present states of devices; None if switches of devices have moved."""
    global _latest
    if latest.flags.devices != flags.read_devices():
        return None
    devices = rng.read_devices()
    if devices is latest.streams[1]:
        return latest
    ambient = Ambient((latest.streams[0], devices, ()), latest.flags, None, _NO_MODES)
    ambient.image = latest.image
    _latest = ambient
    return ambient


def enter(ambient: Ambient, *, default_generators: bool = True) -> Undo:
    """Restores a captured state on this thread; returns the undo for :func:`leave`. Gradients are enabled already.

    Args:
        ambient: The captured state.
        default_generators: Whether to restore the default generators; if not, these are not touched at all.
    """
    if ambient.is_simple and default_generators and not TRACKED:
        try:
            switches = ambient.flags
            if (
                switches.guard.check()
                and read_fast() == switches.unguarded
                and not num_function_modes()
                # The default device, which torch's backward may hide from the stack. Read by this thread's dict, since a
                # missing attribute costs an exception.
                and GLOBAL_DEVICE.__dict__.get("device_context") is None
            ):
                if len(TORCH_NAMES) != streams.names_without_devices:
                    entered = _enter_devices(ambient)
                    if entered is not None:
                        return entered
                else:
                    captured, image = ambient.streams[0], ambient.image
                    assert captured is not None
                    if image == (HEAD.raw, TAIL.raw):
                        return captured, image, switches
                    return _enter_cpu(captured, switches)
        except RuntimeError:
            pass
    undo: list[Any] = [None, None, None, None]
    try:
        undo[0] = rng.enter(ambient.streams, defaults=default_generators)
        undo[1] = flags.enter(ambient.flags)
        if ambient.casts is not None or is_any_autocast_enabled():
            undo[2] = autocast.enter(ambient.casts)
        if ambient.modes or num_function_modes() or global_device_mode() is not None:
            undo[3] = function_modes.enter(ambient.modes)
    except BaseException:
        leave(undo)
        raise
    return undo


def _enter_cpu(captured: torch.Tensor, switches: flags.Snapshot) -> _SimpleUndo:
    state = read_cpu()
    try:
        write_cpu(captured)
        return state, None, switches
    except BaseException:  # Ctrl-C
        write_cpu(state)
        raise


def _enter_devices(ambient: Ambient) -> Undo | None:
    """Sets torch's default generators to captured states; None, with nothing set, where more has to be restored."""
    captured, image = ambient.streams[0], ambient.image
    assert captured is not None
    if ambient.flags.devices != flags.read_devices():
        return None
    devices = rng.enter_devices(ambient.streams[1])
    if devices is None:
        return None
    try:
        if image == (HEAD.raw, TAIL.raw):
            return (captured, image, ambient.flags), devices
        return _enter_cpu(captured, ambient.flags), devices
    except BaseException:  # Ctrl-C
        rng.leave_streams(devices)
        raise


def leave(undo: Undo) -> None:
    """Restores the state of this thread before :func:`enter`, whatever happened since."""
    if len(undo) == 3:
        state, image, switches = undo
        if image != (HEAD.raw, TAIL.raw):
            write_cpu(state)
        if not switches.guard.check():
            switches.write()
        return
    if isinstance(undo, tuple):
        simple, devices = undo
        rng.leave_streams(devices)
        leave(simple)
        return
    for position, leave_one in zip((3, 2, 1, 0), _LEAVE, strict=True):
        value = undo[position]
        if leave_one is autocast.leave:
            undo[position] = None  # it counts levels, and is undone once, though an exception may repeat the call
        if value is not None:
            leave_one(value)
            undo[position] = None


_LEAVE: list[Callable[[Any], None]] = [function_modes.leave, autocast.leave, flags.leave, rng.leave]


def replay_draws(ambient: Ambient, states: list[torch.Tensor] | None) -> ReplayDraws:
    """Returns the dispatch mode for a recompute which touches no default generator.

    Args:
        ambient: The captured state, where draws start if forward noted no states.
        states: The states noted by forward, one a draw.
    """
    replay = ReplayDraws(states)
    for generator, state in rng.default_states(ambient.streams):
        replay.start(generator, state)
    return replay
