"""The state a function sees besides its arguments: captured at forward, restored around each recompute (Rule 7).

Random streams, switches, and each state of the thread, which is None in the ordinary case, have a ``capture``, an ``enter``,
which returns the undo, and a ``leave``.

Most regions see the state of the region before, and most recomputes find the state they need: no autocast, no modes, torch's
default streams only, no switch moved. For these, :func:`capture` and :func:`enter` check this in one function each; other cases
go the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_hooks._torch.modes import GLOBAL_DEVICE, num_function_modes

from . import streams, switches
from .positions import HEAD, TAIL, Image, take_image
from .streams import TORCH_NAMES, TRACKED, read_cpu, write_cpu
from .switches import AUTOCAST, THREAD_STATES, read_fast


class Ambient:
    """The state seen by a forward."""

    __slots__ = ("has_streams", "image", "is_simple", "streams", "switches", "thread")

    def __init__(self, states: streams.Snapshot, found: switches.Snapshot, thread: tuple[Any, ...]) -> None:
        self.streams, self.switches, self.thread = states, found, thread
        state, _, others = states
        #: Whether a recompute will restore random streams other than torch's default streams.
        self.has_streams = bool(others)
        #: Whether the state is only switches of the process and states of torch's default generators.
        self.is_simple = state is not None and not others and thread == _NO_STATES
        #: The image of the CPU's generator in its state, if known.
        self.image: Image | None = None


_NO_STATES = (None,) * len(THREAD_STATES)

#: The state of the CPU's generator, its image if the recompute also began there, and the switches.
_SimpleUndo = tuple[torch.Tensor, Image | None, switches.Snapshot]
#: The undo of a simple state, with the states of devices if any; else the results of each module's ``enter``.
Undo = _SimpleUndo | tuple[_SimpleUndo, streams.States] | list[Any]

#: The latest simple state with a known image.
_latest: Ambient | None = None


def capture(*, preserve_rng_state: bool, generators: Sequence[torch.Generator] = ()) -> Ambient:
    """Returns the state of this thread, with the generators that the function reaches.

    If random streams are not preserved, a recompute draws the next numbers, but still leaves the streams where it found them.
    """
    global _latest
    latest = _latest
    if latest is not None and preserve_rng_state and not (generators or TRACKED):
        try:
            if (
                latest.image == (HEAD.raw, TAIL.raw)
                and latest.switches.guard.check()
                and read_fast() == latest.switches.unguarded
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
    thread = tuple([state.capture() for state in THREAD_STATES])
    ambient = Ambient(streams.capture(generators, preserve=preserve_rng_state), switches.capture(), thread)
    if ambient.is_simple and image is not None and image == take_image():  # unchanged since before the read of the state
        ambient.image = image
        _latest = ambient
    return ambient


def _with_devices(latest: Ambient) -> Ambient | None:
    """Returns the latest state, with the present states of devices; None if switches of devices have moved."""
    global _latest
    if latest.switches.devices != switches.read_devices():
        return None
    devices = streams.read_devices()
    if devices is latest.streams[1]:
        return latest
    ambient = Ambient((latest.streams[0], devices, ()), latest.switches, _NO_STATES)
    ambient.image = latest.image
    _latest = ambient
    return ambient


def enter(ambient: Ambient, *, default_generators: bool = True) -> Undo:
    """Restores a captured state on this thread; returns the undo for :func:`leave`. Gradients are enabled already."""
    if ambient.is_simple and default_generators and not TRACKED:
        try:
            found = ambient.switches
            if (
                found.guard.check()
                and read_fast() == found.unguarded
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
                        return captured, image, found
                    return _enter_cpu(captured, found)
        except RuntimeError:
            pass
    undo: list[Any] = []
    try:
        undo.append(streams.enter(ambient.streams, defaults=default_generators))
        undo.append(switches.enter(ambient.switches))
        for state, captured_state in zip(THREAD_STATES, ambient.thread, strict=True):
            undo.append(state.enter(captured_state) if captured_state is not None or state.is_there() else None)
    except BaseException:
        leave(undo)
        raise
    return undo


def _enter_cpu(captured: torch.Tensor, found: switches.Snapshot) -> _SimpleUndo:
    state = read_cpu()
    try:
        write_cpu(captured)
        return state, None, found
    except BaseException:  # Ctrl-C
        write_cpu(state)
        raise


def _enter_devices(ambient: Ambient) -> Undo | None:
    """Sets torch's default generators to captured states; None, with nothing set, where more has to be restored."""
    captured, image = ambient.streams[0], ambient.image
    assert captured is not None
    if ambient.switches.devices != switches.read_devices():
        return None
    devices = streams.enter_devices(ambient.streams[1])
    if devices is None:
        return None
    try:
        if image == (HEAD.raw, TAIL.raw):
            return (captured, image, ambient.switches), devices
        return _enter_cpu(captured, ambient.switches), devices
    except BaseException:  # Ctrl-C
        streams.leave_streams(devices)
        raise


def leave(undo: Undo) -> None:
    """Restores the state of this thread before :func:`enter`, whatever happened since."""
    if isinstance(undo, list):
        for position in reversed(range(len(undo))):
            value, leave_one = undo[position], _LEAVE[position]
            if leave_one is AUTOCAST.leave:
                undo[position] = None  # it counts levels, and is undone once, though an exception may repeat the call
            if value is not None:
                leave_one(value)
                undo[position] = None
    elif len(undo) == 3:
        state, image, found = undo
        if image != (HEAD.raw, TAIL.raw):
            write_cpu(state)
        if not found.guard.check():
            found.write()
    else:
        simple, devices = undo
        streams.leave_streams(devices)
        leave(simple)


_LEAVE: list[Callable[[Any], None]] = [streams.leave, switches.leave, *(state.leave for state in THREAD_STATES)]
