"""The contexts of a region: those of a ``context_fn``, of dispatch modes around forward, and of a policy in torch's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import Frame, stack
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.misuse import check_callable, described_as
from ckpt_hooks._core.modes import QuietDispatchMode, reusable
from ckpt_hooks._torch.autograd import top_saved_tensors_hooks
from ckpt_hooks._torch.modes import active_fake_mode

if TYPE_CHECKING:
    from ckpt_hooks.policies.base import Policy


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
            f"{described_as(contexts)}. Return contextlib.nullcontext() where there is nothing to enter."
        )
    return contexts[0], contexts[1]


def check_context_fn(context_fn: Any) -> None:
    advice = "Leave it out, or pass noop_context_fn, where there is nothing to enter."
    if isinstance(context_fn, tuple):  # of what was called
        advice = "Pass the function, not what it returns: noop_context_fn, say, or a policy as `policy=...`."
    check_callable(context_fn, "context_fn", "", "a function that returns two context managers", advice)


def both(outer: ContextPair, inner: ContextPair) -> ContextPair:
    return _Both(outer[0], inner[0]), _Both(outer[1], inner[1])


def under_modes(contexts: ContextPair | None) -> ContextPair:
    """Returns the contexts of a region inside dispatch modes: operators take other paths there, so a rerun needs a mode."""
    under_mode = nullcontext(), QuietDispatchMode()
    contexts = under_mode if contexts is None else both(under_mode, contexts)
    # The user's modes are not entered again, for they may count. A fake mode is: it counts nothing, and without it a tensor
    # made from nothing would be a real tensor.
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
    # An ``ExitStack`` keeps an exception raised on exit in a cycle, and with the exception a region's inputs.
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
    """Enters a frame, and the user's context of forward inside of it."""
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
        del error  # which has this call in its traceback


class PolicyContext(AbstractContextManager[None]):
    """One of the two contexts of a policy: a region takes the policy, and enters nothing; for anyone else it is torch's."""

    def __init__(self, policy: Policy, of_torch: list[AbstractContextManager[Any]], *, is_forward: bool) -> None:
        self.policy, self.is_forward = policy, is_forward
        self._of_torch = of_torch  # of both, empty until a context is entered

    def is_before(self, other: object) -> bool:
        """Whether this is the first of a pair, and another context the second."""
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
            f"context_fn of region {'/'.join(format_path(frame.path))!r} returned a context of "
            "create_selective_checkpoint_contexts within another context, where the region does not find it. Return the two as "
            "they are. For other contexts around them, write checkpoint(policy=policy, context_fn=others)(function)."
        )
