"""Random streams of the process which recomputes set back only if tracked: the streams of Python and of NumPy.

To ask a generator for its state takes 20 us in Python and 80 in NumPy, since each word becomes a Python number. To compare the
memory of its object, after the object's head, takes 1 us. All of this memory is compared, wherever the words are. NumPy has the
words in one object and a left-over normal number in another, next to figures for binomial numbers; the place of the left-over
number is found with a generator made for the purpose.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
import threading
from typing import Any

__all__ = ["Images", "is_only_thread", "moved_since", "take_images"]

#: The memory of generators, by their names in :func:`ckpt_hooks.track_rng`.
Images = dict[str, tuple[Any, ...]]

_HEAD = object.__basicsize__
_PYTHON: Any = random.getstate.__self__  # type: ignore[attr-defined]


def _memory_of(value: Any) -> bytes:
    return ctypes.string_at(id(value) + _HEAD, type(value).__basicsize__ - _HEAD)


@functools.cache
def _left_over() -> slice:
    """Returns the place of a left-over normal number, and of its flag, in the memory of NumPy's generator."""
    generator: Any = sys.modules["numpy.random"].RandomState(0)
    kind, key, *_ = generator.get_state()
    images = []
    for state in ((kind, key, 0, 0, 0.0), (kind, key, 0, 1, 1 / 3)):
        generator.set_state(state)
        images.append(_memory_of(generator))
    differing = [place for place, (one, other) in enumerate(zip(*images, strict=True)) if one != other]
    return slice(differing[0], differing[-1] + 1)


def take_images() -> Images:
    """Returns the present memory of these generators; NumPy's only if NumPy was imported."""
    images: Images = {"python": (_memory_of(_PYTHON), _PYTHON.gauss_next)}
    get_state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    if get_state is not None:
        state = get_state.__self__
        images["numpy"] = _memory_of(state)[_left_over()], _memory_of(state._bit_generator)
    return images


def moved_since(images: Images) -> list[str]:
    """Returns the names of the generators which have moved since :func:`take_images`."""
    now = take_images()
    return [name for name, image in images.items() if now[name] != image]


def is_only_thread() -> bool:
    """Whether Python runs a single thread. Threads of autograd's engine do not count: none of these moves a stream."""
    return sum(not isinstance(thread, threading._DummyThread) for thread in threading.enumerate()) == 1
