"""Random streams: the CPU's default generator, and whatever else a region may draw from.

A recompute starts from the state that forward started from and leaves every stream where it found it. Reading touches no
stream.

The state of the CPU's generator is 5 KB. Regions between which nothing was drawn start from the same state and share one copy
of it, so that a model without randomness keeps one, however many regions it has. The road not taken: to compare the state
before and after forward, and to keep none where they are equal. A function that draws inside ``torch.random.fork_rng`` leaves
the generator as it was, and still needs to know from where to draw again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._bytes import same_bytes

from .streams import Stream, device_streams, has_devices, stream_of_generator
from .tracking import tracked_streams

__all__ = ["Snapshot", "Undo", "capture", "enter", "leave"]

_Others = tuple[tuple[Stream, Any], ...]
#: State of the CPU's generator, and of other streams; None for the former where no state is to be restored.
Snapshot = tuple["torch.Tensor | None", _Others]
#: The same, of the streams as they were before a recompute.
Undo = tuple[torch.Tensor, _Others]

_NO_OTHERS: _Others = ()
_read_cpu, _write_cpu = torch.default_generator.get_state, torch.default_generator.set_state


_latest = _read_cpu()


def capture(generators: Sequence[torch.Generator] = (), *, preserve: bool = True) -> Snapshot:
    """Returns the state of every stream.

    Args:
        generators: Streams besides those of devices and those that are tracked.
        preserve: Whether a recompute is to draw what forward draws.
    """
    global _latest
    if not preserve:
        return None, tuple((stream_of_generator(generator), None) for generator in generators)
    others = _NO_OTHERS
    if has_devices() or generators or tracked_streams():
        streams = [*device_streams(while_capturing=False), *tracked_streams(), *map(stream_of_generator, generators)]
        others = tuple((stream, stream.read()) for stream in streams)
    state, latest = _read_cpu(), _latest  # read once: another thread may put its own there
    if same_bytes(state, latest):
        state = latest
    else:
        _latest = state
    return state, others


def enter(captured: Snapshot) -> Undo:
    """Sets every stream of a snapshot back; returns the state of all streams before that."""
    state, others = captured
    before = _read_cpu()
    undo = _NO_OTHERS
    if others or has_devices() or tracked_streams():
        undo = _enter_others(others, preserve=state is not None)
    if state is not None:
        _write_cpu(state)
    return before, undo


def _enter_others(others: _Others, *, preserve: bool) -> _Others:
    states = dict(others)
    present = [*device_streams(while_capturing=True), *tracked_streams()]
    undo = tuple((stream, stream.read()) for stream in dict.fromkeys([*states, *present]))
    for stream, _ in undo if preserve else ():
        if stream in states:
            stream.write(states[stream])
        elif stream.restart is not None:
            # A device that was not in use yet when forward began: should forward have been the one to draw from it first, it
            # drew from the start.
            stream.restart()
    return undo


def leave(before: Undo) -> None:
    """Sets every stream back to where it was."""
    cpu, others = before
    _write_cpu(cpu)
    for stream, state in others:
        stream.write(state)
