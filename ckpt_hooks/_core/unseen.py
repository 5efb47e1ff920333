"""Work that no operator does: custom autograd functions, whose kernels write by pointer, and such kernels by themselves."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.functions import AT_WORK, TRITON, apply, divert_functions, divert_triton
from ckpt_hooks._torch.modes import dispatch_mode_at, num_dispatch_modes

from .modes import QuietDispatchMode

#: Packages whose custom functions are made of operators.
_OF_OPERATORS = frozenset({"torch", "ckpt_hooks"})


class WatchesUnseen(QuietDispatchMode):
    """A mode which is told of custom functions called while it is active, and of kernels outside of these."""

    # While an operator runs no mode is active, so what it does is its own business; torch's own functions are made of
    # operators.
    is_in_function = False  # while a custom function runs, whose work counts as an operator

    def run_function(self, around: list[WatchesUnseen], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a call of a custom function; ``around`` are the watching modes around, outermost first."""
        return run_watched(around, function, args, kwargs)

    def run_unseen(self, writer: str, args: Any, call: Callable[[], Any]) -> Any:
        """Runs a call which may write to any tensor among some arguments."""
        return call()

    def run_sharing(self, receiver: str, args: Any, call: Callable[[], Any]) -> Any:
        """Runs a call which hands memory to another library, which may write there."""
        return self.run_unseen(receiver, args, call)

    def __enter__(self) -> Any:
        _divert()
        # Weakly: a mode that Ctrl-C keeps off the stack of modes is never told that it leaves.
        AT_WORK.add(weakref.ref(self, AT_WORK.discard))
        return super().__enter__()

    def leaves(self) -> None:
        AT_WORK.discard(weakref.ref(self))


_is_diverted = False


def _divert() -> None:
    global _is_diverted
    if not _is_diverted:
        _is_diverted = True
        divert_functions(_run_of, _run_unseen, _run_sharing, _look_at_missed)
    if TRITON in sys.modules:
        divert_triton(_run_unseen)


def _watching() -> list[WatchesUnseen]:
    modes = map(dispatch_mode_at, range(num_dispatch_modes()))
    return [mode for mode in modes if isinstance(mode, WatchesUnseen) and not (mode.paused or mode.is_in_function)]


def _run_of(function: Any) -> Callable[..., Any] | None:
    if function.__module__.partition(".")[0] in _OF_OPERATORS:
        return None
    watching = _watching()
    return partial(watching.pop().run_function, watching, function) if watching else None


def run_watched(watching: list[WatchesUnseen], function: Any, args: Any, kwargs: Any) -> Any:
    """Runs a call of a custom function, watched by modes, outermost first."""
    if watching:
        return watching.pop().run_function(watching, function, *args, **kwargs)
    return apply(function, args, kwargs)


_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def _look_at_missed(function: Any) -> None:
    """Warns of a function called in a region by a name which was bound before the first region, so that no mode was told."""
    if function.__module__.partition(".")[0] in _OF_OPERATORS or function in _warned or not _watching():
        return
    _warned.add(function)
    name = function.__qualname__
    warnings.warn(
        f"the custom function {name} was called in a region by a name bound to `{name}.apply` before the first region, which "
        "torch hides from regions. If a kernel in it writes to memory that no operator is told of, a recompute does not know. "
        f"Write `{name}.apply(...)` where the function is called.",
        stacklevel=4,
    )


@skipped
def _run_unseen(writer: str, args: Any, call: Callable[[], Any]) -> Any:
    for mode in _watching():
        call = partial(mode.run_unseen, writer, args, call)
    return call()


@skipped
def _run_sharing(receiver: str, args: Any, call: Callable[[], Any]) -> Any:
    for mode in _watching():
        call = partial(mode.run_sharing, receiver, args, call)
    return call()
