"""Whether the CPU's generator has moved, without reading its state.

``torch.default_generator.get_state()`` allocates and fills a tensor of 5 KB, and each region asks three times: in forward,
before its recompute and after it. Nearly always the answer is that nothing was drawn. So this looks at a few bytes of the
generator's object instead, at 0.2 us; to look at all 2.5 KB of its state costs as much by itself, and 5 us more for what that
drives out of the processor's caches.

Where in the object the state lies is not known but found out, when this is imported, with a generator made for it: the 624
words of the Mersenne twister as ``get_state()`` tells them, with the seed and the position before and the left-over normal
numbers behind. If what is looked at does not change with every kind of draw, then there is no image, and states are read and
compared as they come.

Equal images are equal states. Every draw moves the position or a left-over number, and when the position comes round again, all
the words are new: of these the first eight are looked at, 256 bits. (A state made by hand that agrees in all of that with one
that a region found, and differs in a later word, is not seen.) Images that differ may be of equal states (there is padding in
them, and a draw of another thread may be under way), and then the state is read the long way, under the generator's lock.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from ckpt_hooks._torch import address_of_generator

__all__ = ["HEAD", "TAIL", "Image", "take_image"]

_WORDS = 624
_ARRAY_BYTES = 4 * _WORDS
#: Seed and position, before the words; left-over normal numbers of either dtype, behind them.
_BEFORE, _BEHIND = 24, 40
#: What is looked at: how far from where the seed is, and how much.
_LOOKED_AT = ((0, _BEFORE + 4 * 8), (_BEFORE + _ARRAY_BYTES, _BEHIND))
#: In how much of the object the words have to begin.
_SEARCHED = 256

#: What the bytes were at some moment.
Image = tuple[bytes, bytes]


def _find(generator: torch.Generator) -> int | None:
    """Returns how far into a generator's object its state begins, None if it is not where it is looked for."""
    words = struct.unpack_from(f"<{_WORDS}Q", bytes(generator.get_state().tolist()), 24)
    array = struct.pack(f"={_WORDS}I", *(word & 0xFFFFFFFF for word in words))
    offset = ctypes.string_at(address_of_generator(generator), _SEARCHED).find(array[:32])
    if offset < _BEFORE or ctypes.string_at(address_of_generator(generator) + offset, _ARRAY_BYTES) != array:
        return None
    return offset - _BEFORE


class _Bytes:
    """Where the bytes are not to be had."""

    raw = b""


def _views(address: int) -> list[Any]:
    """Returns what is looked at of a generator whose state is at an address: ``raw`` has the bytes as they are now."""
    return [(ctypes.c_char * size).from_address(address + offset) for offset, size in _LOOKED_AT]


def _find_views() -> list[Any] | None:
    """Returns what to look at of the default generator, None if its object is not laid out as expected."""
    try:
        generator = torch.Generator().manual_seed(1)
        offset = _find(generator)
        if offset is None or _find(torch.default_generator) != offset:
            return None
        head, tail = _views(address_of_generator(generator) + offset)
        images = [(head.raw, tail.raw)]
        # One number of 32 bits; a normal one, which leaves another over; that one, which moves nothing else; the same in
        # double precision; another seed for a state that is the same otherwise.
        for draw in (
            lambda: torch.rand(1, generator=generator),
            lambda: torch.randn(1, generator=generator),
            lambda: torch.randn(1, generator=generator),
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


_found = _find_views()
#: What is looked at of the default generator: ``(HEAD.raw, TAIL.raw)`` is its image now, if there is one.
HEAD, TAIL = _found or (_Bytes, _Bytes)


def take_image() -> Image | None:
    """Returns the image of the default generator now, None where it cannot be looked at."""
    return None if _found is None else (HEAD.raw, TAIL.raw)
