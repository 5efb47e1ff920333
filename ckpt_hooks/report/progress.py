"""Progress of the steps of a plan or an estimate: a line on a terminal once they take long, and lines of the logger."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from time import monotonic
from typing import Any

import torch

from ckpt_hooks._core.misuse import checked_flag

from .printing import cut, format_bytes

_logger = logging.getLogger("ckpt_hooks")

_AFTER = 2.0  # seconds until the first line
_EVERY = 0.1  # seconds between two updates of the line

_present: ContextVar[_Progress | None] = ContextVar("progress", default=None)


def is_first_rank() -> bool:
    """Returns whether this process is the first rank of its program, the only rank that prints."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"  # set by torchrun, for processes without a group


class _Plain:
    # Overwrites with spaces, since some terminals know no escape sequences.
    def __init__(self) -> None:
        self._width = 0

    def write(self, text: str) -> None:
        text = cut(text, shutil.get_terminal_size().columns - 1)
        sys.stderr.write(f"\r{text.ljust(self._width)}")
        sys.stderr.flush()
        self._width = len(text)

    def close(self) -> None:
        self.write("")
        self.write("")


def _new_line() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Returns functions that overwrite the line, and that clear it."""
    try:
        from tqdm import tqdm  # places the line among the program's bars
    except ImportError:
        plain = _Plain()
        return plain.write, plain.close
    # No monitor thread of tqdm: the garbage collector may run there, where the profiler of a step does not see frees.
    quiet = type("Line", (tqdm,), {"monitor_interval": 0})
    bar = quiet(bar_format="{desc}", leave=False, file=sys.stderr, dynamic_ncols=True)
    return bar.set_description_str, bar.close


class _Progress:
    def __init__(self, what: str, is_on: bool) -> None:
        self.peak = 0
        self._what, self._number, self._most = what, 0, 0
        self._begun = self._shown = monotonic()
        self._thread = threading.get_ident()
        self._is_on = is_on and is_first_rank() and getattr(sys.stderr, "isatty", bool)()
        self._write: Callable[[str], Any] | None = None
        self._clear: Callable[[], Any] = bool

    def __str__(self) -> str:
        peak = f", peak so far {format_bytes(self.peak)}" if self.peak else ""
        return f"{self._what}: step {self._number} of at most {self._most}{peak}"

    def begin_step(self, most: int) -> None:
        self._number, self._most = self._number + 1, most
        _logger.info(str(self))
        self._shown = self._begun
        self.show()

    def show(self) -> None:
        if not self._is_on or threading.get_ident() != self._thread:
            return
        time = monotonic()
        if time - self._begun >= _AFTER and time - self._shown >= _EVERY:
            self._shown = time
            with contextlib.suppress(OSError, ValueError):  # raised if the terminal is gone
                if self._write is None:
                    self._write, self._clear = _new_line()
                self._write(str(self))

    def end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._clear()


@contextlib.contextmanager
def shown(what: str, progress: Any) -> Iterator[None]:
    """Shows the steps in a ``with`` statement, unless a statement around shows its steps."""
    is_on = checked_flag(progress, "progress")
    if _present.get() is not None:
        yield
        return
    display = _Progress(what, is_on)
    token = _present.set(display)
    try:
        yield
    finally:
        _present.reset(token)
        display.end()


def begin_step(most: int) -> None:
    """Shows that a step begins, out of at most ``most`` steps."""
    if (display := _present.get()) is not None:
        display.begin_step(most)


def has_peak(nbytes: int) -> None:
    """Shows the peak of a step, if no earlier step had a higher peak."""
    if (display := _present.get()) is not None:
        display.peak = max(display.peak, nbytes)


def ticker() -> Callable[[], None] | None:
    """Returns a function to call often while a step runs; None if nothing is shown."""
    display = _present.get()
    return None if display is None else display.show
