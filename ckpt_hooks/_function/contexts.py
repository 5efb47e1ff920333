"""The two context managers of ``context_fn``: one around the forward of a region, the other around each recompute.

Each recompute enters the second, from any thread, perhaps inside another recompute. So each entry has a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.utils.checkpoint

from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import Frame, stack
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.modes import QuietDispatchMode, reusable
from ckpt_hooks._operators.operator_events import OperatorWatch, wants_operators
from ckpt_hooks._torch.autograd import top_saved_tensors_hooks
from ckpt_hooks._torch.modes import active_fake_mode
from ckpt_hooks.policies.base import Policy
from ckpt_hooks.policies.decisions import asks_for_torch

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


def both(outer: ContextPair, inner: ContextPair) -> ContextPair:
    return _Both(outer[0], inner[0]), _Both(outer[1], inner[1])


def under_modes(contexts: ContextPair | None) -> ContextPair:
    """Returns the contexts of a region inside dispatch modes, with the region's own contexts in them."""
    # Operators take other paths under a mode, so a rerun needs one.
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
        self.policy = policy_of(outer) or policy_of(inner)

    def without_policy(self) -> AbstractContextManager[Any] | None:
        outer, inner = without_policy(self._outer), without_policy(self._inner)
        return inner if outer is None else outer if inner is None else _Both(outer, inner)

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


class Within(AbstractContextManager[None]):
    """A frame, and the user's context of forward inside of it."""

    def __init__(self, frame: Any, context: AbstractContextManager[Any]) -> None:
        self._frame, self._context = frame, context

    def __enter__(self) -> None:
        self._frame.__enter__()
        try:
            self._context.__enter__()
        except BaseException as error:
            self._frame.__exit__(type(error), error, error.__traceback__)
            raise

    def returns(self, result: Any) -> None:
        """See :meth:`FunctionFrame.returns`."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        try:
            suppressed = self._context.__exit__(kind, error, traceback)
        except BaseException as another:
            self._frame.__exit__(type(another), another, another.__traceback__)
            raise
        self._frame.__exit__(kind, error, traceback)
        if error is not None and suppressed:
            raise suppressed_error(error) from error


class PolicyContext(AbstractContextManager[None]):
    """One of the two contexts of a policy: a region takes the policy, and enters nothing; for anyone else it is torch's."""

    def __init__(self, policy: Policy, of_torch: list[AbstractContextManager[Any]], *, is_forward: bool) -> None:
        self.policy, self.is_forward = policy, is_forward
        self._of_torch = of_torch  # of both, empty until one is entered

    def is_before(self, other: object) -> bool:
        """Whether this is the forward context of a pair, and another one its context of recomputes."""
        return isinstance(other, PolicyContext) and self.is_forward > other.is_forward and self._of_torch is other._of_torch

    def __enter__(self) -> None:
        _refuse_hidden()
        if not self._of_torch:
            create: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
            self._of_torch += create(asks_for_torch(self.policy))
        self._of_torch[not self.is_forward].__enter__()

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._of_torch[not self.is_forward].__exit__(*exc_info)


def _refuse_hidden() -> None:
    """Raises if a region runs under the context of a policy hidden inside another context."""
    frame, hooks = stack.innermost, top_saved_tensors_hooks(False)
    if frame is not None and hooks is not None and are_of_frame(hooks):
        raise TypeError(
            f"context_fn of region {'/'.join(format_path(frame.path))!r} returned a context of "
            "create_selective_checkpoint_contexts within another context, where the region does not find it. Return the two as "
            "they are. For other contexts around them, write checkpoint(policy=policy, context_fn=others)(function)."
        )


def policy_of(context: AbstractContextManager[Any]) -> Policy | None:
    return context.policy if isinstance(context, (PolicyContext, _Both)) else None


def without_policy(context: AbstractContextManager[Any]) -> AbstractContextManager[Any] | None:
    """Returns a context without that of a policy, which a region carries out by itself; None if nothing is left."""
    if isinstance(context, _Both):
        return context.without_policy()
    return None if isinstance(context, (PolicyContext, nullcontext)) else context
