"""Settings of blocks, for all regions inside; a region reads them once, when its forward begins.

One context variable: unlike a module's global, a setting belongs to one thread and context.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .events import Observer


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the blocks around a region; None leaves a setting to the region."""

    early_stop: bool | None = None
    debug: bool | None = None
    observers: tuple[Observer, ...] = ()  # the outermost first


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


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Makes an observer watch every region whose forward begins in this block, on this thread; backward included."""
    # Without observers the price is one look-up a region and one attribute test a restored tensor. Packing pays nothing: a
    # watched region has pack hooks of its own.
    with override(observers=(*_current.get().observers, observer)):
        yield
