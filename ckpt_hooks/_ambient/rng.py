"""Random streams: the CPU's default generator, and the other streams of a region.

A recompute starts from forward's starting state and leaves every stream where it found it. Reading touches no stream.

A state is set only where it differs from the stream's present state. A CUDA generator, once set, makes cuDNN seed its dropout
masks of recurrent layers anew, and a recompute without draws must not change the next masks.

The state of the CPU's generator is 5 KB. Regions without draws in between start from the same state and share one copy, so that
a model without randomness keeps one copy for any number of regions. States of devices are shared in the same way. The road not
taken: to compare the state before and after forward, and to keep no state where the two are equal. A function which draws
inside ``torch.random.fork_rng`` leaves the generator as it was, and still needs its starting state.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .named_random_sources import TRACKED
from .streams import Stream, device_streams, find_devices, is_same_state, stream_of_generator

__all__ = [
    "Snapshot",
    "States",
    "Undo",
    "capture",
    "default_generators_lock",
    "enter",
    "enter_devices",
    "leave",
    "leave_streams",
    "read_devices",
]

#: Held by the recompute which sets the default generators back. Another one waits if its forward drew.
default_generators_lock = threading.RLock()

#: Streams, each with a state.
States = tuple[tuple[Stream, Any], ...]
#: States of the CPU's generator, of devices, and of other streams; None for the first where nothing is to be restored.
Snapshot = tuple["torch.Tensor | None", States, States]
#: State of the CPU's generator and of other streams before a recompute; None for the first if untouched.
Undo = tuple["torch.Tensor | None", States]

_NONE: States = ()
read_cpu, write_cpu = torch.default_generator.get_state, torch.default_generator.set_state
_latest = read_cpu()
_latest_devices: States = _NONE


def read_devices() -> States:
    """Returns the state of each initialised device's default stream, as the same tuple while no state has moved.

    Raises:
        RuntimeError: If a CUDA graph is being captured.
    """
    global _latest_devices
    if not find_devices():
        return _NONE
    known = _latest_devices
    found, moved = [(stream, stream.state()) for stream in device_streams(needed=True)], True
    if len(found) == len(known):
        moved = False
        for index, (stream, state) in enumerate(found):
            if stream is known[index][0] and is_same_state(state, known[index][1]):
                found[index] = known[index]
            else:
                moved = True
    if moved:
        known = _latest_devices = tuple(found)
    return known


def enter_devices(captured: States) -> States | None:
    """Sets the devices' default streams to states of :func:`read_devices`.

    Returns:
        The states before. None, with nothing set, where other devices are initialised by now.

    Raises:
        RuntimeError: If a CUDA graph is being captured, and there are states to set.
    """
    streams = device_streams(needed=bool(captured)) if find_devices() else []
    if len(streams) != len(captured) or any(one is not two for one, (two, _) in zip(streams, captured, strict=True)):
        return None
    before = tuple([(stream, stream.state()) for stream in streams])
    try:
        for (stream, present), (_, state) in zip(before, captured, strict=True):
            if not is_same_state(present, state):
                stream.write(state)
    except BaseException:
        leave_streams(before)
        raise
    return before


def leave_streams(before: States) -> None:
    """Sets each stream back to its earlier state, unless already there."""
    for stream, state in before:
        if type(state) is not torch.Tensor or not stream.holds(state):
            stream.write(state)


def capture(generators: Sequence[torch.Generator] = (), *, preserve: bool = True) -> Snapshot:
    """Returns the state of every stream.

    Args:
        generators: Streams besides devices' and tracked streams.
        preserve: Whether a recompute is to draw the numbers of forward.
    """
    global _latest
    if not preserve:
        return None, _NONE, tuple((stream_of_generator(generator), None) for generator in generators)
    devices = read_devices()
    others = _NONE
    if generators or TRACKED:
        streams = (*TRACKED, *map(stream_of_generator, generators))
        others = tuple((stream, stream.read()) for stream in streams)
    state, latest = read_cpu(), _latest  # read once: another thread may replace it
    if is_same_state(state, latest):
        state = latest
    else:
        _latest = state
    return state, devices, others


def enter(captured: Snapshot, *, defaults: bool = True) -> Undo:
    """Sets every stream of a snapshot back; returns the states before.

    Args:
        captured: The snapshot.
        defaults: Whether to set the default generators too.
    """
    state, _, others = captured
    before = read_cpu() if defaults else None
    undo = _NONE
    if others or TRACKED or (defaults and find_devices()):
        undo = _enter_others(captured, defaults=defaults)
    if state is not None and defaults:
        write_cpu(state)
    return before, undo


def _enter_others(captured: Snapshot, *, defaults: bool) -> States:
    cpu, devices, others = captured
    states, present = dict(others), tuple(TRACKED)
    if defaults:
        states.update(devices)
        present += tuple(device_streams(needed=bool(devices)))
    # All are read before any is set: a generator may occur twice, explicit and as a device's default.
    undo = tuple(
        [
            (stream, stream.state())
            for stream in dict.fromkeys([*states, *present])
            if states.get(stream) is not None or stream.is_readable()
        ]
    )
    try:
        for stream, present_state in undo:
            state = states.get(stream)
            if state is not None:
                if not is_same_state(present_state, state):
                    stream.write(state)
            elif cpu is not None and stream.restart is not None:
                # A device not yet in use when forward began: if forward was the first to draw, it drew from the start.
                stream.restart()
        return undo  # here, since Ctrl-C may come between the last step and a line behind
    except BaseException:
        leave((None, undo))
        raise


def leave(before: Undo) -> None:
    """Sets every stream back to its state before."""
    cpu, others = before
    if cpu is not None:
        write_cpu(cpu)
    leave_streams(others)
