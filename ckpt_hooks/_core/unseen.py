"""Work that no dispatch mode sees: kernels that write by pointer, inside custom autograd functions or outside."""

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

#: Packages whose custom functions are made of operators, which modes see.
_OF_OPERATORS = frozenset({"torch", "ckpt_hooks"})


class WatchesUnseen(QuietDispatchMode):
    """A dispatch mode that is told of calls of custom functions, and of kernels that no operator calls."""

    # The mode is not told of kernels that an operator calls: no mode is active while an operator runs. A mode to which a custom
    # function counts as one operator pauses itself while the function runs, and so is not told of kernels inside it.

    def run_function(self, around: list[WatchesUnseen], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a call of a custom function; ``around`` are the modes that watch outside of this mode, outermost first."""
        return run_watched(around, function, args, kwargs)

    def run_unseen(self, writer: str, args: Any, call: Callable[[], Any]) -> Any:
        """Runs a call which may write to any tensor among its arguments."""
        return call()

    def run_sharing(self, receiver: str, args: Any, call: Callable[[], Any]) -> Any:
        """Runs a call which hands memory to another library, which may write there."""
        return self.run_unseen(receiver, args, call)

    def __enter__(self) -> Any:
        _divert()
        # A weak reference: if Ctrl-C comes before the mode is on the stack, ``leaves`` is never called.
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
    return [mode for mode in modes if isinstance(mode, WatchesUnseen) and not mode.paused]


def _run_of(function: Any) -> Callable[..., Any] | None:
    if function.__module__.partition(".")[0] in _OF_OPERATORS:
        return None
    watching = _watching()
    return partial(watching.pop().run_function, watching, function) if watching else None


def run_watched(watching: list[WatchesUnseen], function: Any, args: Any, kwargs: Any) -> Any:
    if watching:
        return watching.pop().run_function(watching, function, *args, **kwargs)
    return apply(function, args, kwargs)


_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def _look_at_missed(function: Any) -> None:
    """Warns once of a function called in a region by a name bound before the first region: no mode is told of the call."""
    if function.__module__.partition(".")[0] in _OF_OPERATORS or function in _warned or not _watching():
        return
    _warned.add(function)
    name = function.__qualname__
    warnings.warn(
        f"the custom function {name} was called in a region by a name bound to `{name}.apply` before the first region, so the "
        "region did not see the call. If a kernel in the function writes to memory by pointer, a recompute misses the write. "
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
