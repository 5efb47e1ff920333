"""How far the default random streams have moved, in a few bytes, to notice a recompute that draws other numbers than forward.

A table which forward makes once from random numbers, and keeps where a recompute finds it (``functools.lru_cache``, a global
dict), shifts all later draws of a recompute: other dropout masks, of the same shapes. So the position is noted with each saved
tensor before which it has moved. A recompute which has drawn as well must stand where forward stood.

Of the CPU's generator a position is the next word's number, the first word, and whether a normal number is left over; of
devices' generators, the offset. To read it makes no device wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from . import streams
from .engine_image import HEAD, TAIL
from .streams import TORCH_NAMES, device_streams, find_devices

__all__ = ["Position", "read_position"]

#: See above; equal positions of one run and another are equal states, if both runs began in one state.
Position = Any


def _views() -> tuple[Any, Any]:
    """Returns the views of number and first word, and of the flag; see :mod:`.engine_image` for how they were found."""
    if not isinstance(HEAD, ctypes.Array) or not isinstance(TAIL, ctypes.Array):
        return ctypes.c_uint64(), ctypes.c_uint8()  # there is no image
    return ctypes.c_uint64.from_buffer(HEAD, 20), ctypes.c_uint8.from_buffer(TAIL, 20)


_word, _left_over = _views()


def _of_cpu() -> Position:
    return _word.value * 2 + _left_over.value


def _nowhere() -> Position:
    return 0


def read_position(*, watched: bool = True) -> Callable[[], Position]:
    """Returns the function which reads the position, for as long as the same devices are in use.

    Args:
        watched: Whether draws matter; if not, the position never moves.
    """
    if not watched:
        return _nowhere
    if len(TORCH_NAMES) == streams.names_without_devices:
        return _of_cpu
    moving = [stream for stream in (device_streams(needed=False) if find_devices() else ()) if stream.has_offset()]
    if not moving:
        return _of_cpu
    offsets = [stream.generator.get_offset for stream in moving if stream.generator is not None]
    return lambda: (_of_cpu(), *[offset() for offset in offsets])
