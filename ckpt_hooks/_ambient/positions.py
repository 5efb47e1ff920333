"""How far the default random streams have moved, told without reading a state.

A position notices a recompute that draws other numbers than forward, as where forward made a random table and keeps it
(``functools.lru_cache``): all later draws are shifted. Of the CPU's generator it is the number of the next word with the first
word; of devices' generators, the offset, for which no device waits.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from . import streams
from .streams import CPU, HEAD, NEXT_WORD, TORCH_NAMES, device_streams

#: Equal positions of two runs are equal states, if both runs began in one state.
Position = Any

#: Two numbers: the first moves with nearly every draw, and both are the position. Of all that Python has, an item of a
#: memoryview is read soonest, and a small number sooner than a large one.
Where = Any

_NOWHERE: Where = (0, 0)
_CPU: Where = (
    memoryview((ctypes.c_char * 8).from_buffer(HEAD, NEXT_WORD)).cast("B").cast("I") if CPU.look is not None else _NOWHERE
)


class _WithDevices:
    __slots__ = ("_offsets", "generators")

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators, self._offsets = generators, [generator.get_offset for generator in generators]

    def __getitem__(self, index: int, /) -> Position:
        return (_CPU[0], *[offset() for offset in self._offsets]) if index == 0 else _CPU[1]


def where_streams_are(*, watched: bool = True, begin: Position = None) -> Where:
    """Returns what tells the position, as long as the same devices are in use; a position at rest if not watched."""
    # In a recompute, ``begin`` is the first number of the position where forward began. Forward may have been the first to use
    # a device: its positions tell of the CPU alone, and so do those of its recomputes.
    if not watched:
        return _NOWHERE
    if len(TORCH_NAMES) == streams.names_without_devices or isinstance(begin, int):
        return _CPU
    moving = [stream.generator for stream in device_streams(needed=False) if stream.look is not None]
    generators = [generator for generator in moving if generator is not None]
    return _WithDevices(generators) if generators else _CPU


def are_other_threads_alive() -> bool:
    return len(threading._active) > 1  # type: ignore[attr-defined]


def have_several_drawn() -> bool:
    """Whether the generators of several accelerators have moved: threads may train on one each."""
    generators: Sequence[torch.Generator] = getattr(where_streams_are(), "generators", ())
    return sum(generator.get_offset() > 0 for generator in generators) > 1


def devices_between(one: Position, other: Position, where: Where) -> set[torch.device]:
    """Returns the devices whose streams stand elsewhere in one position than in the other."""
    cpu = torch.device("cpu")
    devices = (cpu, *(generator.device for generator in getattr(where, "generators", ())))
    firsts = [first if isinstance(first, tuple) else (first,) for first in (one[0], other[0])]
    found = {device for device, first, second in zip(devices, *firsts, strict=False) if first != second}
    return found | {cpu} if one[1] != other[1] else found


def moves_by_itself(devices: set[torch.device]) -> bool:
    """Whether a stream of some devices moves while this thread does nothing, for a twentieth of a second at most."""
    where = where_streams_are()
    begin = where[0], where[1]
    for _ in range(50):
        time.sleep(0.001)
        if devices & devices_between(begin, (where[0], where[1]), where):
            return True
    return False
