"""Settings that reach every region of a block, whoever made the region: one context variable for all of them.

They are read once a region, when its forward begins, and are of one thread and context, unlike a module's global: a region
that another thread makes meanwhile does not see them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

from .events import Observer

__all__ = ["DEFAULTS", "Settings", "current_settings", "override"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What blocks around a region say; None where they leave it to the region.

    Attributes:
        early_stop: Whether recomputes stop early.
        debug: Whether operators are logged.
        observers: Who watches, the outermost first.
    """

    early_stop: bool | None = None
    debug: bool | None = None
    observers: tuple[Observer, ...] = ()


#: The settings outside of any block.
DEFAULTS = Settings()

_current = contextvars.ContextVar("ckpt_hooks.settings", default=DEFAULTS)

#: Returns the settings in force.
current_settings = _current.get


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[None]:
    """Changes settings for a block; the innermost block wins."""
    token = _current.set(dataclasses.replace(_current.get(), **changes))
    try:
        yield
    finally:
        _current.reset(token)
