"""How far the default random streams have moved, in a few bytes, to notice a recompute that draws other numbers than forward.

A table which forward makes once from random numbers, and keeps where a recompute finds it (``functools.lru_cache``, a global
dict), shifts all later draws of a recompute: other dropout masks, of the same shapes. So the position is noted with each saved
tensor before which it has moved. A recompute which has drawn as well must stand where forward stood.

Of the CPU's generator a position is the number of the next word with the first word, eight bytes; of devices' generators, the
offset. To read it makes no device wait. (A draw that only uses up a normal number left over by another moves no position.)
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from . import streams
from .engine_image import HEAD, NEXT
from .streams import TORCH_NAMES, device_streams, find_devices

__all__ = ["Position", "Where", "where_streams_are"]

#: See above; equal positions of one run and another are equal states, if both runs began in one state.
Position = Any


class Where(Protocol):
    """Two numbers: the first moves with nearly every draw, and both are the position.

    Of all that Python has, an item of a memoryview is read soonest, and a small number sooner than a large one.
    """

    def __getitem__(self, index: int, /) -> Position: ...


_NOWHERE: Where = (0, 0)
#: See :mod:`.engine_image` for how the bytes were found.
_CPU: Where = (
    memoryview((ctypes.c_char * 8).from_buffer(HEAD, NEXT)).cast("B").cast("I") if isinstance(HEAD, ctypes.Array) else _NOWHERE
)


class _WithDevices:
    """The position where devices are in use."""

    __slots__ = ("_offsets",)

    def __init__(self, offsets: list[Any]) -> None:
        self._offsets = offsets

    def __getitem__(self, index: int, /) -> Position:
        return (_CPU[0], *[offset() for offset in self._offsets]) if index == 0 else _CPU[1]


def where_streams_are(*, watched: bool = True, begin: Position = None) -> Where:
    """Returns what tells the position, for as long as the same devices are in use.

    Args:
        watched: Whether draws matter; if not, the position never moves.
        begin: In a recompute, the first number of the position where forward began. Forward may have been the first to use a
            device: its positions tell of the CPU alone, and so do those of its recomputes.
    """
    if not watched:
        return _NOWHERE
    if len(TORCH_NAMES) == streams.names_without_devices or isinstance(begin, int):
        return _CPU
    moving = [stream for stream in (device_streams(needed=False) if find_devices() else ()) if stream.has_offset()]
    offsets = [stream.generator.get_offset for stream in moving if stream.generator is not None]
    return _WithDevices(offsets) if offsets else _CPU
