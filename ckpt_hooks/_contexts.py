"""The two context managers around a region: one for its forward, one for its recomputes.

The second is entered once a recompute, from whichever thread runs it, and may be entered again while it is still entered (a
function whose rerun runs backward over the same region). So nothing here keeps the state of an entry on an object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

__all__ = ["ContextPair", "both", "call_context_fn", "noop_context_fn", "reusable"]

#: Wraps a forward, and each of its recomputes.
ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def noop_context_fn() -> ContextPair:
    """Returns two context managers that do nothing: the default ``context_fn`` of :func:`ckpt_hooks.checkpoint`."""
    return nullcontext(), nullcontext()


def call_context_fn(context_fn: Callable[[], ContextPair]) -> ContextPair:
    """Returns what a ``context_fn`` returns.

    Raises:
        TypeError: If that is not two context managers.
    """
    contexts = context_fn()
    if not (isinstance(contexts, tuple | list) and len(contexts) == 2):
        raise TypeError(
            f"context_fn should return two context managers, one for forward and one for recomputes, but returned {contexts!r}."
        )
    return contexts[0], contexts[1]


def reusable(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Returns a context manager that can be entered although this one may have been entered before.

    One made by ``contextlib.contextmanager`` works once; like every ``ContextDecorator`` it knows how to make another.
    """
    recreate: Callable[[], AbstractContextManager[Any]] | None = getattr(context, "_recreate_cm", None)
    return context if recreate is None else recreate()


def both(outer: ContextPair, inner: ContextPair) -> ContextPair:
    """Returns two pairs as one."""
    return _one_in_the_other(outer[0], inner[0]), _one_in_the_other(outer[1], inner[1])


@contextmanager
def _one_in_the_other(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with reusable(outer), reusable(inner):
        yield
