"""A hundred small operators in a row, under something that watches them: what it costs to note or record each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ckpt_hooks._core.modes import QuietDispatchMode

from .interleave import interleave
from .programs import in_a_row

_OPS = 100
_run = in_a_row(_OPS)


class PassThrough(QuietDispatchMode):
    """Does nothing, and knows how to stay out of the compiler's way: the least that a dispatch mode costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def run_under(make: Callable[[], AbstractContextManager[object]], x: Tensor) -> Callable[[], Tensor]:
    """Makes a forward of the operators in a new context each time."""

    def forward() -> Tensor:
        with make():
            return _run(x)

    return forward


def microseconds_an_operator(
    contexts: Mapping[str, Callable[[], AbstractContextManager[object]]], x: Tensor
) -> dict[str, float]:
    """Times forward in each context, and besides under the least of a mode ("pass-through") and under none ("plain")."""
    steps: dict[str, Callable[[], object]] = {"plain": lambda: _run(x), "pass-through": run_under(PassThrough, x)}
    steps.update((name, run_under(make, x)) for name, make in contexts.items())
    return {name: seconds / _OPS * 1e6 for name, seconds in interleave(steps).items()}
