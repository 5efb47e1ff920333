"""The contexts of a region: from a ``context_fn``, for dispatch modes around forward, and of a policy in torch's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from ckpt_hooks._core.descriptions import format_path, region_in_words
from ckpt_hooks._core.frame import Frame, stack
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.misuse import check_callable, described_as
from ckpt_hooks._core.modes import QuietDispatchMode, reusable
from ckpt_hooks._torch.autograd import top_saved_tensors_hooks
from ckpt_hooks._torch.modes import active_fake_mode

if TYPE_CHECKING:
    from ckpt_hooks.policies.base import Policy


#: A context manager for forward, and a context manager for recomputes.
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
            f"{described_as(contexts)}. For a run that needs no context, return contextlib.nullcontext()."
        )
    return contexts[0], contexts[1]


def check_context_fn(context_fn: Any) -> None:
    advice = "If you need no contexts, leave it out or pass noop_context_fn."
    if isinstance(context_fn, tuple):  # the result of calling the function
        advice = "Pass the function, not its result, as in context_fn=noop_context_fn. Pass a policy as `policy=...`."
    check_callable(context_fn, "context_fn", "", "a function that returns two context managers", advice)


def both(outer: ContextPair, inner: ContextPair) -> ContextPair:
    return _Both(outer[0], inner[0]), _Both(outer[1], inner[1])


def under_modes(contexts: ContextPair | None) -> ContextPair:
    """Adds a dispatch mode for reruns of a region inside dispatch modes, since torch takes other paths under a mode."""
    under_mode = nullcontext(), QuietDispatchMode()
    contexts = under_mode if contexts is None else both(under_mode, contexts)
    # Reruns do not enter the user's modes, which may count operators. They enter a fake mode, which counts nothing and without
    # which factories would make real tensors.
    fake = active_fake_mode()
    return contexts if fake is None else both((nullcontext(), fake), contexts)


def telling_operators(contexts: ContextPair | None, parent: Frame | None) -> ContextPair:
    from ckpt_hooks._operators.operator_log import OperatorWatch, wants_operators

    watches = nullcontext() if wants_operators(parent) else OperatorWatch(), OperatorWatch()
    return watches if contexts is None else both(watches, contexts)


class _Both(AbstractContextManager[None]):
    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        entered = _one_in_the_other(reusable(self.outer), reusable(self.inner))
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._entered.pop().__exit__(*exc_info)


@contextmanager
def _one_in_the_other(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    # No ``ExitStack``: it would keep an exception raised on exit, and with it the region's inputs, in a cycle.
    with outer, inner:
        yield


def suppressed_error(error: BaseException) -> RuntimeError:
    return RuntimeError(
        "the forward context provided by context_fn suppressed an exception raised during the checkpointed forward "
        f"({error!r}). There is no value to return for a forward that failed: let the exception pass, and handle it "
        "around the call of checkpoint."
    )


@contextmanager
def within(frame: Any, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enters a frame, and inside it the user's context manager for forward."""
    error: BaseException | None = None
    try:
        with frame:
            with context:
                try:
                    yield
                except BaseException as raised:
                    error = raised
                    raise
            if error is not None:
                raise suppressed_error(error) from error
    finally:
        del error  # or a cycle stays: the traceback of ``error`` refers to this call


class PolicyContext(AbstractContextManager[None]):
    """A context manager made from a policy: a region reads the policy and never enters; other code enters torch's context."""

    def __init__(self, policy: Policy, of_torch: list[AbstractContextManager[Any]], *, is_forward: bool) -> None:
        self.policy, self.is_forward = policy, is_forward
        self._of_torch = of_torch  # torch's pair, shared by the two contexts; empty until either is entered

    def is_before(self, other: object) -> bool:
        """Whether this context is the first of a pair, and ``other`` is the second of the same pair."""
        return isinstance(other, PolicyContext) and self.is_forward > other.is_forward and self._of_torch is other._of_torch

    def __enter__(self) -> None:
        _refuse_hidden()
        if not self._of_torch:
            from ckpt_hooks.policies.decisions import asks_for_torch

            create: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
            self._of_torch += create(asks_for_torch(self.policy))
        self._of_torch[not self.is_forward].__enter__()

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._of_torch[not self.is_forward].__exit__(*exc_info)


def _refuse_hidden() -> None:
    frame, hooks = stack.innermost, top_saved_tensors_hooks(False)
    if frame is not None and hooks is not None and are_of_frame(hooks):
        raise TypeError(
            f"context_fn of {region_in_words(format_path(frame.path))} returned a context of "
            "create_selective_checkpoint_contexts within another context, where the region does not see it. Return the pair "
            "itself. To add other contexts, write checkpoint(policy=policy, context_fn=other_contexts)(function)."
        )
