"""Work that no operator does: custom autograd functions, whose kernels write by pointer, and such kernels by themselves.

A dispatch mode sees operators alone. A mode of this kind is told of every custom function called while the mode is active, and
of Triton kernels and ``Tensor.apply_`` outside of these. While an operator runs, no mode is active, so what an operator does
is the operator's own business. Torch's own functions are made of operators.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import Any

from ckpt_hooks._torch import dispatch_mode_at, num_dispatch_modes
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.functions import apply, divert_functions, divert_triton

from .modes import PausableDispatchMode

__all__ = ["WatchesUnseen"]

_OF_OPERATORS = frozenset({"torch", "ckpt_hooks"})


class WatchesUnseen(PausableDispatchMode):
    """A mode which is told of work that no operator does.

    Attributes:
        is_in_function: Whether a custom function is running, whose work counts as one.
    """

    is_in_function = False

    @abc.abstractmethod
    def run_function(self, function: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
        """Runs a call of a custom function.

        Args:
            function: The function's class.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            call: Runs the call.
        """

    @abc.abstractmethod
    def run_unseen(self, writer: str, args: Any, call: Callable[[], Any]) -> Any:
        """Runs a call which may write to any tensor among some arguments.

        Args:
            writer: The writer, in words.
            args: The arguments.
            call: Runs the call.
        """

    def __enter__(self) -> Any:
        _divert()
        return super().__enter__()


_is_diverted = False


def _divert() -> None:
    global _is_diverted
    if not _is_diverted:
        _is_diverted = True
        divert_functions(_run_of, _run_unseen)
    divert_triton(_run_unseen)


def _watching() -> list[WatchesUnseen]:
    """Returns the watching modes of this thread, outermost first."""
    modes = map(dispatch_mode_at, range(num_dispatch_modes()))
    return [mode for mode in modes if isinstance(mode, WatchesUnseen) and not (mode.paused or mode.is_in_function)]


def _run_of(function: Any) -> Callable[..., Any] | None:
    if function.__module__.partition(".")[0] in _OF_OPERATORS:
        return None
    watching = _watching()
    return partial(_run, watching, function) if watching else None


@skipped
def _run(watching: list[WatchesUnseen], function: Any, *args: Any, **kwargs: Any) -> Any:
    call: Callable[[], Any] = partial(apply, function, args, kwargs)
    for mode in watching:
        call = partial(mode.run_function, function, args, kwargs, call)
    return call()


@skipped
def _run_unseen(writer: str, args: Any, call: Callable[[], Any]) -> Any:
    for mode in _watching():
        call = partial(mode.run_unseen, writer, args, call)
    return call()
