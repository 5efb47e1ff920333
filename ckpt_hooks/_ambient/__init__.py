"""What a function sees besides its arguments: captured at forward, restored around each recompute (Rule 7).

Each module knows one kind of state. All of them follow one scheme: ``capture`` answers a value that is cheap to hold (None
where there is nothing out of the ordinary), ``enter`` makes the present equal to such a value and answers what is needed to
undo that (None where nothing had to be touched), ``leave`` undoes it. Whether there is anything out of the ordinary is asked
here, in the cheapest way there is, before any of them is called.

Most regions see what the one before them saw, and most recomputes find what they need: no autocast, no modes, no streams but
torch's default ones, no switch moved. To find that out is all that :func:`capture` and :func:`enter` do for them, in one
function each; whatever is not as simple goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._torch import GLOBAL_DEVICE, global_device_mode, is_any_autocast_enabled, num_function_modes

from . import autocast, flags, function_modes, rng, streams
from .draws import ReplayDraws
from .engine_image import HEAD, TAIL, Image, take_image
from .flags import read_fast
from .rng import read_cpu, write_cpu
from .streams import TORCH_NAMES
from .tracking import TRACKED

__all__ = ["Ambient", "Undo", "capture", "enter", "leave", "replay_draws"]

_NO_MODES: function_modes.Snapshot = ()


class Ambient:
    """What a forward saw.

    Attributes:
        streams: Random streams.
        flags: Switches of the process.
        casts: Autocast, None where it is off.
        modes: Function modes.
        has_streams: Whether a recompute will set random streams back that are not torch's default ones.
        is_simple: Whether there is nothing but flags and states of torch's default generators.
        image: How the CPU's generator looked in its state, if that is known.
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


#: The state of the CPU's generator, how it looked if that is also where the recompute began, and the switches.
_SimpleUndo = tuple[torch.Tensor, Image | None, flags.Snapshot]
#: Of a simple one, that, and the states of devices where there are some; else what each module's ``enter`` answered.
Undo = _SimpleUndo | tuple[_SimpleUndo, rng.States] | list[Any]

#: The latest simple one whose image is known.
_latest: Ambient | None = None


def capture(*, preserve_rng_state: bool, generators: Sequence[torch.Generator] = ()) -> Ambient:
    """Returns the state of this thread.

    Args:
        preserve_rng_state: Whether random streams are part of it. If not, a recompute draws what comes next, but still
            leaves the streams outside where it found them.
        generators: Random generators that the function reaches, besides the default ones.
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
        except (
            RuntimeError
        ):  # from a switch, which says that it cannot be read this way; from a device, which will say it again
            pass
    image = take_image()
    ambient = Ambient(
        rng.capture(generators, preserve=preserve_rng_state),
        flags.capture(),
        autocast.capture() if is_any_autocast_enabled() else None,
        function_modes.capture() if num_function_modes() else _NO_MODES,
    )
    if ambient.is_simple and image is not None and image == take_image():  # so it was when the state was read
        ambient.image = image
        _latest = ambient
    return ambient


def _with_devices(latest: Ambient) -> Ambient | None:
    """Returns the latest one, or the same with the states that devices have now; None where their switches have moved."""
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
    """Makes this thread's state equal to a captured one; the answer goes to :func:`leave`. Gradients are enabled already.

    Args:
        ambient: What was captured.
        default_generators: Whether the default generators are set back; if not, they are not touched at all.
    """
    if ambient.is_simple and default_generators and not TRACKED:
        try:
            switches = ambient.flags
            if (
                switches.guard.check()
                and read_fast() == switches.unguarded
                and not num_function_modes()
                # Which torch's backward may hide from the stack. Of this thread, by its dict: an attribute that is not there is
                # an exception, if only for a moment.
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
    """Sets torch's default generators to states; None, with nothing set, where there is more to set."""
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
    """Makes this thread's state what it was before :func:`enter`, whatever happened since."""
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
        value, undo[position] = undo[position], None  # each is undone once, though an exception may have this called again
        if value is not None:
            leave_one(value)


_LEAVE: list[Callable[[Any], None]] = [function_modes.leave, autocast.leave, flags.leave, rng.leave]


def replay_draws(ambient: Ambient, states: list[torch.Tensor] | None) -> ReplayDraws:
    """Returns the dispatch mode for a recompute that touches no default generator.

    Args:
        ambient: What was captured; draws start from its states where forward noted none.
        states: What forward noted at each draw.
    """
    replay = ReplayDraws(states)
    for generator, state in rng.default_states(ambient.streams):
        replay.start(generator, state)
    return replay
