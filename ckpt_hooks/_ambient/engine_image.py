"""Whether the CPU's generator has moved, without reading its state.

``torch.default_generator.get_state()`` allocates and fills a tensor of 5 KB, which with cold caches takes 4 us, and each region
asks three times: in forward, before its recompute and after it. Nearly always the answer is that nothing was drawn. So this
compares the bytes of the generator's object with those of an earlier moment, in 0.1 us.

Where in the object the state lies is not known but found out, when this is imported, with a generator made for it: the 624
words of the Mersenne twister as ``get_state()`` tells them, with the position before and the left-over normal numbers behind.
If the bytes do not change with every kind of draw, then there is no image, and states are read and compared as they come.

Equal bytes are equal states. Bytes that differ may not be (there is padding among them, and a draw of another thread may be
under way), and then the state is read the long way, under the generator's lock.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from ckpt_hooks._torch import address_of_generator

__all__ = ["UNSEEN", "Image", "engine"]

_WORDS = 624
_ARRAY_BYTES = 4 * _WORDS
#: Seed and position, before the words; left-over normal numbers of either dtype, behind them.
_BEFORE, _BEHIND = 24, 40
#: In how much of the object the words have to begin.
_SEARCHED = 256

_SIZE = _BEFORE + _ARRAY_BYTES + _BEHIND

#: Bytes of the generator at some moment; None where they are not to be had.
Image = bytes | None


def _find(generator: torch.Generator) -> int | None:
    """Returns how far into a generator's object its state begins, None if it is not where it is looked for."""
    words = struct.unpack_from(f"<{_WORDS}Q", bytes(generator.get_state().tolist()), 24)
    array = struct.pack(f"={_WORDS}I", *(word & 0xFFFFFFFF for word in words))
    offset = ctypes.string_at(address_of_generator(generator), _SEARCHED).find(array[:32])
    if offset < _BEFORE or ctypes.string_at(address_of_generator(generator) + offset, _ARRAY_BYTES) != array:
        return None
    return offset - _BEFORE


def _locate() -> int:
    """Returns the address of the default generator's state, 0 if its object is not laid out as expected."""
    try:
        generator = torch.Generator().manual_seed(1)
        offset = _find(generator)
        if offset is None or _find(torch.default_generator) != offset:
            return 0
        images = [ctypes.string_at(address_of_generator(generator) + offset, _SIZE)]
        # One number of 32 bits; a normal one, which leaves another over; that one, which moves nothing else; the same in
        # double precision; another seed for a state that is the same otherwise.
        for draw in (
            lambda: torch.rand(1, generator=generator),
            lambda: torch.randn(1, generator=generator),
            lambda: torch.randn(1, generator=generator),
            lambda: torch.randn(1, generator=generator, dtype=torch.float64),
            lambda: torch.randn(1, generator=generator, dtype=torch.float64),
            lambda: generator.manual_seed(2),
        ):
            draw()
            images.append(ctypes.string_at(address_of_generator(generator) + offset, _SIZE))
        address: int = address_of_generator(torch.default_generator) + offset
        return address if len(set(images)) == len(images) else 0
    except (AttributeError, OSError, RuntimeError, TypeError, struct.error):
        return 0


class _Unseen:
    """Stands for the memory of a generator that is not laid out as expected."""

    raw: Image = None


UNSEEN = _Unseen()


def _view() -> Any:
    address = _locate()
    return (ctypes.c_char * _SIZE).from_address(address) if address else UNSEEN


#: The memory of the default generator's state: ``engine.raw`` is an image of it now.
engine: Any = _view()
