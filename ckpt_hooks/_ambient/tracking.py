"""Random sources named by the user: Python's, NumPy's, other generators."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from typing_extensions import Self

from ckpt_hooks._core.misuse import wrong

from .random import CPU, TRACKED, RandomSource, device_sources, source_of_generator

#: Modules with a random source, by the names that users give, with the functions that read and set the state. To support a new
#: source, add a row.
MODULES = {"python": ("random", "getstate", "setstate"), "numpy": ("numpy.random", "get_state", "set_state")}

#: Held by a recompute that sets back explicit generators and tracked sources. Threads may share these sources, so another such
#: recompute waits.
shared_sources_lock = threading.RLock()


class TrackedSource:
    """A random source rewound by regions: the result of :func:`track_rng`, and a context manager which ends the tracking."""

    def __init__(self, source: RandomSource) -> None:
        self._source = source
        TRACKED.append(source)

    def remove(self) -> None:
        """Stops tracking, for regions whose forward is yet to run. A second call does nothing."""
        with suppress(ValueError):
            TRACKED.remove(self._source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


@contextmanager
def hold_sources(sources: Iterable[RandomSource]) -> Iterator[None]:
    """Tracks the sources of a forward while its recompute runs, so that regions inside capture them again."""
    with ExitStack() as stack:
        for source in sources:
            if source not in TRACKED:
                stack.enter_context(TrackedSource(source))
        yield


def track_rng(source: Any) -> TrackedSource:
    """Makes recomputes draw the same numbers from a random source as forward, from now on and in the whole process.

    Torch's default generators, and generators among a function's arguments and closed-over variables, need no tracking.
    Python's ``random``, NumPy and other sources do: without it a recompute draws other numbers. Each region keeps the source's
    state from the start of its forward. The source is put back after a recompute while it is tracked.

    A thread that draws from torch's default generator while a region on another thread draws from it, as some data loaders do,
    makes the recompute raise. Give such threads a generator of their own.

    Args:
        source: ``"python"`` for the module ``random``, ``"numpy"`` for NumPy's global state, or an object: a
            ``torch.Generator``, a ``random.Random``, a ``numpy.random.Generator``, or anything with ``get_state()`` and
            ``set_state(state)``.

    Returns:
        The tracking, a context manager. ``remove()`` or the end of the block ends it.

    Raises:
        ValueError: If ``source`` is another string.
        TypeError: If ``source`` has no state to read and set.
        ImportError: If ``source`` is ``"numpy"`` and NumPy is not installed.

    Example:
        >>> import random
        >>> import torch
        >>> from ckpt_hooks import checkpoint, track_rng
        >>> x = torch.ones(2, requires_grad=True)
        >>> with track_rng("python"):
        ...     y = checkpoint(lambda x: (x * random.random()).sin(), x)
        >>> y.sum().backward()  # multiplies with the same number
    """
    return TrackedSource(_source_of(source))


def _source_of(source: Any) -> RandomSource:
    if isinstance(source, str) and source in MODULES:
        module, read, write = MODULES[source]
        return RandomSource(*(getattr(importlib.import_module(module), name) for name in (read, write)))
    if isinstance(source, torch.Generator):
        return source_of_generator(source)
    for read, write in () if isinstance(source, type) else (("get_state", "set_state"), ("getstate", "setstate")):
        if callable(getattr(source, read, None)) and callable(getattr(source, write, None)):
            return RandomSource(getattr(source, read), getattr(source, write))
    bits = getattr(source, "bit_generator", source)
    if isinstance(getattr(bits, "state", None), dict):
        return RandomSource(lambda: bits.state, lambda state: setattr(bits, "state", state))
    wanted = f"{', '.join(map(repr, MODULES))}, a generator, or an object with get_state() and set_state(state)"
    kind, advice = ValueError if isinstance(source, str) else TypeError, "Pass the object that draws or has the state."
    raise wrong(source, "source", wanted, advice, kind)


def all_sources() -> list[RandomSource]:
    """Returns the default sources, the tracked sources, and the sources of loaded ``MODULES``."""
    loaded = [_source_of(name) for name, (module, *_) in MODULES.items() if module in sys.modules]
    return [CPU, *device_sources(needed=False), *TRACKED, *loaded]
