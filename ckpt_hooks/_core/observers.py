"""Watching regions, for traces, reports and tests.

Each frame picks up its observers when its forward begins. Without observers the price is one look-up a region and one attribute
test a restored tensor; packing uses hooks without observers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .events import Observer
from .settings import current_settings, override

__all__ = ["observe"]


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Makes an observer watch every region whose forward begins in this block, on this thread; backward included.

    Blocks nest; outer observers go on watching.
    """
    with override(observers=(*current_settings().observers, observer)):
        yield
