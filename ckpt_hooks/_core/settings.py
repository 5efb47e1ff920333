"""The settings of the blocks around a region: early stop, debug mode, observers; and what the self-check does, anywhere."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import types
from collections.abc import Iterator
from typing import Any, Literal

from .misuse import wrong


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


Level = Literal["error", "warn", False]

_LEVELS: dict[str, Level] = {"error": "error", "warn": "warn", "0": False}


def _from_environment() -> Level:
    value = os.environ.get("CKPT_HOOKS_SELF_CHECK", "error")
    if value not in _LEVELS:
        raise ValueError(f"CKPT_HOOKS_SELF_CHECK is {value!r}. Set it to error, warn, or 0 for no check.")
    return _LEVELS[value]


class _SelfCheck:
    level: Level = _from_environment()


#: What a difference does, for all threads; an object, as each region reads it.
self_check = _SelfCheck()


class set_self_check:  # noqa: N801 -- used like a function
    """Sets what happens when a recompute computes other values than forward did: an error, a warning, or nothing.

    A region compares the values that backward brings back with those of forward in passes 1, 2, 4, 8, ... of each module or
    function. Modules whose regions are opened by the same ``with`` statement, and objects of a class, count together: their
    first 16 passes are compared, then fewer and fewer. A compared pass takes some hundred microseconds more for each saved
    tensor on a CPU. Forwards without a backward take that too, but fewer and fewer of them. The setting holds for all threads,
    from the call on, or for a ``with`` block. The environment variable ``CKPT_HOOKS_SELF_CHECK`` (``error``, ``warn`` or
    ``0``) gives the initial setting.

    Args:
        level: ``"error"``, the default, raises a :class:`ckpt_hooks.DeterminismError` before pass 64 of a module or function
            and warns from then on. ``"warn"`` only warns. Each module or function warns once. Passes count anew after a change
            of a module's flags, such as by ``train()``. False switches these comparisons off, not those of
            ``determinism_check="values"`` and of dispatch modes.

    Raises:
        ValueError: If ``level`` is something else.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, set_self_check
        >>> x = torch.ones(2, requires_grad=True)
        >>> with set_self_check("warn"):
        ...     checkpoint(torch.sin, x).sum().backward()
    """

    def __init__(self, level: Level) -> None:
        if not (level is False or (isinstance(level, str) and level in ("error", "warn"))):
            raise wrong(level, "level", "'error', 'warn' or False", "Leave the call out for 'error', the default.", ValueError)
        self._before, self_check.level = self_check.level, level

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self_check.level = self._before
