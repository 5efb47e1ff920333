"""The settings of the blocks around a region: early stop, debug mode, observers."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the blocks around a region; None leaves a setting to the region."""

    early_stop: bool | None = None
    debug: bool | None = None
    observers: tuple[Any, ...] = ()  # the outermost first


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
