"""Whether and how far the default random streams have moved, told without reading a state.

``torch.default_generator.get_state()`` fills a tensor of 5 KB, and each region asks three times. Nearly always nothing was
drawn. So an *image* is compared, a few bytes of the generator's object, in 0.2 us. The place of the state in the object is
found on import, with a generator made for the purpose: the 624 words of the Mersenne twister, as told by ``get_state()``, with
seed and position before and left-over normal numbers behind. If some kind of draw leaves these bytes unchanged, there is no
image, and states are read and compared as usual.

Equal images are equal states. Every draw moves the position or a left-over number, and when the position wraps around, all
words are new: the first eight words are read, 256 bits. (A handmade state which agrees with a state of a region in all of these
bytes, and differs in a later word, is not seen.) Images may differ for equal states, since there is padding, and a draw of
another thread may be under way. Then the state is read in full, under the generator's lock.

A *position* notices a recompute that draws other numbers than forward, as where forward made a random table and keeps it
(``functools.lru_cache``): all later draws are shifted. It is noted with each saved tensor before which it has moved. A
recompute which has drawn as well must stand where forward stood. Of the CPU's generator a position is the number of the next
word with the first word, eight bytes; of devices' generators, the offset. To read it makes no device wait. (A draw that only
uses up a normal number left over by another moves no position.)
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ckpt_hooks._torch.modes import address_of_generator, made_apart

from . import streams
from .streams import TORCH_NAMES, device_streams, find_devices

_WORDS = 624
_ARRAY_BYTES = 4 * _WORDS
#: Seed and position, before the words; left-over normal numbers of either dtype, behind them.
_BEFORE, _BEHIND = 24, 40
# Where the number of the next word is in the first of the views, right before the words.
_NEXT = _BEFORE - 4
#: The bytes of an image: offset from the seed, and size.
_LOOKED_AT = ((0, _BEFORE + 4 * 8), (_BEFORE + _ARRAY_BYTES, _BEHIND))
_SEARCHED = 256  # bytes of the object in which the words have to begin

#: The bytes at some moment.
Image = tuple[bytes, bytes]


def _find(generator: torch.Generator) -> int | None:
    """Returns the offset of a generator's state in its object, None if the state is not found."""
    words = struct.unpack_from(f"<{_WORDS}Q", bytes(generator.get_state().tolist()), 24)
    array = struct.pack(f"={_WORDS}I", *(word & 0xFFFFFFFF for word in words))
    offset = ctypes.string_at(address_of_generator(generator), _SEARCHED).find(array[:32])
    if offset < _BEFORE or ctypes.string_at(address_of_generator(generator) + offset, _ARRAY_BYTES) != array:
        return None
    return offset - _BEFORE


class _Bytes:
    """Stands for bytes which cannot be read."""

    raw = b""


def _views(address: int) -> list[Any]:
    """Returns the views of a generator's state at an address: ``raw`` has the present bytes."""
    return [(ctypes.c_char * size).from_address(address + offset) for offset, size in _LOOKED_AT]


def _find_views() -> list[Any] | None:
    """Returns the views of the default generator, None if its object is not laid out as expected."""
    try:
        generator = torch.Generator().manual_seed(1)
        offset = _find(generator)
        if offset is None or _find(torch.default_generator) != offset:
            return None
        head, tail = _views(address_of_generator(generator) + offset)
        images = [(head.raw, tail.raw)]
        # A number of 32 bits; a normal number, which leaves another over; the left-over number, which moves nothing else; the
        # same in double precision; and another seed for an otherwise equal state.
        for draw in (
            lambda: torch.rand(1, generator=generator),
            lambda: torch.randn(1, generator=generator, dtype=torch.float32),
            lambda: torch.randn(1, generator=generator, dtype=torch.float32),
            lambda: torch.randn(1, generator=generator, dtype=torch.float64),
            lambda: torch.randn(1, generator=generator, dtype=torch.float64),
            lambda: torch.rand(_WORDS, generator=generator),
            lambda: generator.manual_seed(2),
        ):
            draw()
            images.append((head.raw, tail.raw))
        return _views(address_of_generator(torch.default_generator) + offset) if len(set(images)) == len(images) else None
    except (AttributeError, OSError, RuntimeError, TypeError, struct.error):
        return None


_found = made_apart(_find_views)
#: The views of the default generator: ``(HEAD.raw, TAIL.raw)`` is its present image, if there is an image.
HEAD, TAIL = _found or (_Bytes, _Bytes)


def take_image() -> Image | None:
    """Returns the present image of the default generator, None if there is no image."""
    return None if _found is None else (HEAD.raw, TAIL.raw)


#: As in the module's docstring; equal positions of two runs are equal states, if both runs began in one state.
Position = Any


class Where(Protocol):
    """Two numbers: the first moves with nearly every draw, and both are the position."""

    # Of all that Python has, an item of a memoryview is read soonest, and a small number sooner than a large one.

    def __getitem__(self, index: int, /) -> Position: ...


_NOWHERE: Where = (0, 0)
_CPU: Where = (
    memoryview((ctypes.c_char * 8).from_buffer(HEAD, _NEXT)).cast("B").cast("I") if isinstance(HEAD, ctypes.Array) else _NOWHERE
)


class _WithDevices:
    """The position where devices are in use."""

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
    moving = [stream for stream in (device_streams(needed=False) if find_devices() else ()) if stream.has_offset()]
    generators = [stream.generator for stream in moving if stream.generator is not None]
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
