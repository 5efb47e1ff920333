"""Random streams: the CPU's default generator, and whatever else a region may draw from.

A recompute starts from the state that forward started from and leaves every stream where it found it. Reading touches no
stream.

The state of the CPU's generator is 5 KB. Regions between which nothing was drawn start from the same state and share one copy
of it, so that a model without randomness keeps one, however many regions it has. The road not taken: to compare the state
before and after forward, and to keep none where they are equal. A function that draws inside ``torch.random.fork_rng`` leaves
the generator as it was, and still needs to know from where to draw again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._bytes import same_bytes

from .streams import Stream, device_streams, find_devices, stream_of_generator
from .tracking import TRACKED

__all__ = ["Snapshot", "Undo", "capture", "default_generators_lock", "default_states", "enter", "leave"]

#: Held by the recompute that borrows the default generators; others that run meanwhile do without.
default_generators_lock = threading.RLock()

_States = tuple[tuple[Stream, Any], ...]
#: State of the CPU's generator, of those of devices, and of other streams; None for the first where nothing is to be restored.
Snapshot = tuple["torch.Tensor | None", _States, _States]
#: State of the CPU's generator and of other streams before a recompute; None for the first where it is not touched.
Undo = tuple["torch.Tensor | None", _States]

_NONE: _States = ()
read_cpu, write_cpu = torch.default_generator.get_state, torch.default_generator.set_state
_latest = read_cpu()


def capture(generators: Sequence[torch.Generator] = (), *, preserve: bool = True) -> Snapshot:
    """Returns the state of every stream.

    Args:
        generators: Streams besides those of devices and those that are tracked.
        preserve: Whether a recompute is to draw what forward draws.
    """
    global _latest
    if not preserve:
        return None, _NONE, tuple((stream_of_generator(generator), None) for generator in generators)
    devices = tuple([(stream, stream.read()) for stream in device_streams(needed=True)]) if find_devices() else _NONE
    others = _NONE
    if generators or TRACKED:
        streams = (*TRACKED, *map(stream_of_generator, generators))
        others = tuple((stream, stream.read()) for stream in streams)
    state, latest = read_cpu(), _latest  # read once: another thread may put its own there
    if same_bytes(state, latest):
        state = latest
    else:
        _latest = state
    return state, devices, others


def enter(captured: Snapshot, *, defaults: bool = True) -> Undo:
    """Sets every stream of a snapshot back; returns the state of all streams before that.

    Args:
        captured: The snapshot.
        defaults: Whether the default generators are among them.
    """
    state, _, others = captured
    before = read_cpu() if defaults else None
    undo = _NONE
    if others or TRACKED or (defaults and find_devices()):
        undo = _enter_others(captured, defaults=defaults)
    if state is not None and defaults:
        write_cpu(state)
    return before, undo


def _enter_others(captured: Snapshot, *, defaults: bool) -> _States:
    cpu, devices, others = captured
    states, present = dict(others), tuple(TRACKED)
    if defaults:
        states.update(devices)
        present += tuple(device_streams(needed=False))
    # All are read before any is set: a generator may be there twice, explicit and as a device's default.
    undo = tuple([(stream, stream.read()) for stream in dict.fromkeys([*states, *present])])
    try:
        for stream, _ in undo:
            state = states.get(stream)
            if state is not None:
                stream.write(state)
            elif cpu is not None and stream.restart is not None:
                # A device that was not in use yet when forward began: should forward have been the one to draw from it first,
                # it drew from the start.
                stream.restart()
    except BaseException:
        leave((None, undo))
        raise
    return undo


def leave(before: Undo) -> None:
    """Sets every stream back to where it was."""
    cpu, others = before
    if cpu is not None:
        write_cpu(cpu)
    for stream, state in others:
        stream.write(state)


def default_states(captured: Snapshot) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Returns default generators and their states in a snapshot, of the devices whose generators are to be had."""
    cpu, devices, _ = captured
    found = [] if cpu is None else [(torch.default_generator, cpu)]
    return found + [(stream.generator, state) for stream, state in devices if stream.generator is not None]
