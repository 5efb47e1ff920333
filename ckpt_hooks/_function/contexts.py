"""The two context managers of ``context_fn``: one around the forward of a region, the other around each recompute.

Each recompute enters the second, from any thread, perhaps inside another recompute. So each entry has a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.modes import QuietDispatchMode
from ckpt_hooks._operators.operator_events import OperatorWatch, wants_operators
from ckpt_hooks._torch.modes import active_fake_mode
from ckpt_hooks.errors import DeterminismError

#: The context of a forward, and the context of each of its recomputes.
ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def noop_context_fn() -> ContextPair:
    """Returns two context managers without effect: the default ``context_fn`` of :func:`ckpt_hooks.checkpoint`."""
    return nullcontext(), nullcontext()


def call_context_fn(context_fn: Callable[[], ContextPair]) -> ContextPair:
    try:
        contexts = context_fn()
    except TypeError:
        check_context_fn(context_fn)
        raise
    if not (isinstance(contexts, (tuple, list)) and len(contexts) == 2):
        raise TypeError(
            "context_fn should return two context managers, one for forward and one for recomputes, but returned "
            f"{contexts!r}. Return contextlib.nullcontext() where there is nothing to enter."
        )
    return contexts[0], contexts[1]


def check_context_fn(context_fn: Any) -> None:
    """Checks a ``context_fn`` without calling it."""
    if not callable(context_fn):
        raise TypeError(
            "context_fn should be a function that returns two context managers, but got "
            f"{context_fn!r} of type {type(context_fn).__name__}. Leave it out, or pass noop_context_fn, where there is "
            "nothing to enter."
        )


def reusable(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Returns a context manager to enter in place of a used one."""
    # A context manager of ``contextlib.contextmanager`` works once. Like every ``ContextDecorator`` it can make another.
    recreate: Callable[[], AbstractContextManager[Any]] | None = getattr(context, "_recreate_cm", None)
    return context if recreate is None else recreate()


def both(outer: ContextPair, inner: ContextPair) -> ContextPair:
    return _Both(outer[0], inner[0]), _Both(outer[1], inner[1])


def under_modes(contexts: ContextPair | None) -> ContextPair | None:
    """Returns the contexts of a region inside dispatch modes, with the region's own contexts in them."""
    # Operators take other paths under a mode, so a rerun needs one. The modes of a selective policy are enough.
    if contexts is None or selection_of(contexts[0]) is None:
        under_mode = nullcontext(), QuietDispatchMode()
        contexts = under_mode if contexts is None else both(under_mode, contexts)
    # The user's modes are not entered again, for they may count. A fake mode is: it counts nothing, and without it a tensor
    # made from nothing would be a real one.
    fake = active_fake_mode()
    return contexts if fake is None else both((nullcontext(), fake), contexts)


def telling_operators(contexts: ContextPair | None, parent: Frame | None) -> ContextPair:
    """Returns the contexts of a region with observers of operators, which the mode of an outer frame may serve."""
    in_forward = nullcontext() if wants_operators(parent) else OperatorWatch()
    if contexts is None:
        return in_forward, OperatorWatch()
    return both((in_forward, OperatorWatch()), contexts)


class _Both(AbstractContextManager[None]):
    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner
        self._entered: list[AbstractContextManager[None]] = []
        self.selection = selection_of(outer) or selection_of(inner)

    def without_selection(self) -> _Both:
        return _Both(without_selection(self._outer), without_selection(self._inner))

    def __enter__(self) -> None:
        entered = _one_in_the_other(reusable(self._outer), reusable(self._inner))
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._entered.pop().__exit__(*exc_info)


@contextmanager
def _one_in_the_other(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    # An ``ExitStack`` keeps an exception raised on exit in a cycle, and with the exception a region's inputs.
    with outer, inner:
        yield


def suppressed_error(error: BaseException) -> RuntimeError:
    return RuntimeError(
        "the forward context provided by context_fn suppressed an exception raised during the checkpointed forward "
        f"({error!r}). There is no value to return for a forward that failed: let the exception pass, and handle it "
        "around the call of checkpoint."
    )


def without_selection(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Returns a forward's context without selective policies, for a forward that keeps everything."""
    if isinstance(context, _Both):
        return context.without_selection()
    return context if selection_of(context) is None else nullcontext()


class Selects(Protocol):
    """The interface of a selective policy's memory (:class:`ckpt_hooks._function.selective.selection.Selection`)."""

    # ``attach`` and ``close`` begin and end forward, ``prepare`` and ``settle`` a recompute. ``recompute`` reruns the region,
    # twice if need be; ``check`` looks at an ended or failed one up to an index, before its values are handed out.
    policy_in_words: Callable[[], str] | None

    def attach(self, numbers: list[int], path: Any, hooks: Any, *, respect_hooks: bool) -> None: ...

    def close(self, parent: Any, *, early_stop: bool) -> None: ...

    def prepare(self, values: list[torch.Tensor], *, last: bool, has_stopped: Callable[[], bool]) -> None: ...

    def settle(self) -> None: ...

    def note_saved(self, index: int, tensor: torch.Tensor) -> None: ...

    def fate_at(self, index: int) -> Reason: ...

    def kept_operators(self) -> Collection[Any]: ...

    def recompute(self, rerun: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]: ...

    def check(self, index: int, explain: Callable[[DeterminismError], None], cause: Exception | None = None) -> None: ...


def selection_of(context: AbstractContextManager[Any]) -> Selects | None:
    selection: Selects | None = getattr(context, "selection", None)
    return selection if hasattr(selection, "attach") else None
