"""Watching the runtime without its knowing: traces, reports and tests hang here.

Each frame picks its observers up when its forward begins. Where there are none, that is one look-up a region and one attribute
test a tensor that is handed back; packing uses hooks that know nothing of observers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .events import Observer
from .settings import current_settings, override

__all__ = ["observe"]


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Lets an observer watch every region whose forward begins in this block, its backward included, on this thread.

    Blocks nest; the outer observers go on watching.
    """
    with override(observers=(*current_settings().observers, observer)):
        yield
