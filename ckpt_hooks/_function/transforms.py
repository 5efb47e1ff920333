"""Regions without checkpointing: under transforms of functions, and where operators are traced into a graph.

A transform hides saved tensors from hooks. A tracer would write down the work of a recompute: the values returned by a replay
come from below the tracer, as constants, and a rerun draws random numbers anew. So a region keeps everything there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ckpt_hooks._torch.modes import is_any_transform_active

from .contexts import ContextPair, call_context_fn, noop_context_fn, without_selection

__all__ = ["run_plainly", "warn_of_transform"]

_warned = False


def run_plainly(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context_fn: Callable[[], ContextPair]
) -> Any:
    """Calls the function of a region which keeps everything, in the user's context for forward.

    Args:
        function: The region's function.
        args: The positional arguments.
        kwargs: The keyword arguments.
        context_fn: Returns the context; a selective policy there has nothing to do.
    """
    if is_any_transform_active():
        warn_of_transform(stacklevel=5)
    if context_fn is noop_context_fn:
        return function(*args, **kwargs)
    with without_selection(call_context_fn(context_fn)[0]):
        return function(*args, **kwargs)


def warn_of_transform(*, stacklevel: int) -> None:
    """Warns, once, of a region which runs plainly.

    Args:
        stacklevel: The number of calls from here up to the region.
    """
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "checkpoint was called under a torch.func transform (grad, vjp, vmap, ...), which saved-tensor hooks cannot see "
            "through. Regions run un-checkpointed there: results are right, memory is as without checkpointing.",
            stacklevel=stacklevel,
        )
