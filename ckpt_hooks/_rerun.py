"""Function frames: a region that is a call of a function, brought back by calling it again.

A rerun sees what its forward saw: the captured arguments, the captured ambient state, no frame around it, gradients enabled.
What it does with the tensors that autograd saves meanwhile, and when it ends, is :mod:`ckpt_hooks._filling`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch

from ._ambient import Ambient
from ._arguments import Arguments
from ._filling import Filling, StopRecompute
from ._runtime.frame import Frame, format_path
from ._runtime.hooks import close_frame, open_frame
from ._runtime.observers import current_observer
from ._runtime.stack import stack
from ._torch import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    resume_transforms,
    set_grad_enabled,
    suspend_transforms,
)
from .errors import CheckpointError

__all__ = ["ContextPair", "FunctionFrame"]

#: Wraps a forward, and each of its recomputes.
ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class FunctionFrame(Frame):
    """A region whose forward is one call of a function; a context manager around that call.

    The call itself is the caller's, with the same function and arguments that the frame was given: hooks that run before and
    after a module's forward can enter and leave the frame.

    Example:
        >>> import torch
        >>> from ckpt_hooks._rerun import FunctionFrame
        >>> x = torch.ones(2, requires_grad=True)
        >>> with FunctionFrame(torch.sin, (x,), {}):
        ...     y = torch.sin(x)
    """

    __slots__ = (
        "_ambient",
        "_arguments",
        "_check_metadata",
        "_contexts",
        "_early_stop",
        "_explain",
        "_function",
        "_preserve_rng_state",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preserve_rng_state: bool = True,
        early_stop: bool = True,
        check_metadata: bool = True,
        contexts: ContextPair | None = None,
        explain: Callable[[CheckpointError], CheckpointError] | None = None,
        name: str | None = None,
    ) -> None:
        """Captures a call and saves its tensors.

        Args:
            function: What the region calls.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            preserve_rng_state: Whether a rerun draws the random numbers that forward drew.
            early_stop: Whether a rerun ends with the last value needed, or runs the function to its end.
            check_metadata: Whether shape, dtype and device are compared.
            contexts: Entered around forward, and around each rerun.
            explain: Turns an error of a rerun into one that says more.
            name: The region's name in errors and reports; the function's own if None.
        """
        if name is None:
            name = getattr(function, "__qualname__", None) or type(function).__qualname__
        Frame.__init__(self, name, stack.innermost, current_observer())
        # What a partial holds are arguments as well: taken out of it, they are saved as such, and not kept alive twice.
        while type(function) is functools.partial:
            args, kwargs = function.args + args, {**function.keywords, **kwargs}
            function = function.func
        self._function = function
        self._arguments = Arguments(args, kwargs)
        self._preserve_rng_state = preserve_rng_state
        self._early_stop = early_stop
        self._check_metadata = check_metadata
        self._contexts = contexts
        self._explain = explain

    def __enter__(self) -> FunctionFrame:
        self._ambient = Ambient(preserve_rng_state=self._preserve_rng_state)
        open_frame(self, metadata=self._check_metadata)
        if self.observer is not None:
            self.observer.entered(self)
        if self._contexts is not None:
            try:
                self._contexts[0].__enter__()
            except BaseException as error:
                self._close(error)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        suppressed: bool | None = False
        if self._contexts is not None:
            try:
                suppressed = self._contexts[0].__exit__(kind, error, traceback)
            except BaseException as another:
                self._close(another)
                raise
        self._close(error)
        if error is None:
            self._ambient.forward_ended()
            self.complete = True
        elif suppressed:
            raise RuntimeError(
                "the forward context provided by context_fn suppressed an exception raised during the checkpointed forward "
                f"({error!r}). There is no value to return for a forward that failed: let the exception pass, and handle it "
                "around the call of checkpoint."
            ) from error

    def _close(self, error: BaseException | None) -> None:
        close_frame(self)
        if self.observer is not None:
            self.observer.exited(self, error)

    def recompute(self, wanted: Collection[int] | None) -> list[torch.Tensor | None]:
        """Reruns the function; see :meth:`Frame.recompute`."""
        observer = self.observer
        if observer is None and self._explain is None:
            return self._rerun(wanted)
        if observer is not None:
            observer.recomputing(self)
        error: BaseException | None = None
        try:
            return self._rerun(wanted)
        except CheckpointError as found:
            error = found if self._explain is None else self._explain(found)
            if error is found:
                raise
            raise error from found
        except BaseException as found:
            error = found
            raise
        finally:
            if observer is not None:
                observer.recomputed(self, error)
            del error  # its traceback has this call, which would keep it alive in turn

    def _rerun(self, wanted: Collection[int] | None) -> list[torch.Tensor | None]:
        filling = Filling(self, wanted, early_stop=self._early_stop, check_metadata=self._check_metadata)
        transforms = suspend_transforms()
        undo = None
        # As if no frame were active, but for this one, which is the parent of those met inside (Rule 3).
        outer, stack.innermost = stack.innermost, self
        stack.recomputing += 1
        grad_enabled = torch.is_grad_enabled()
        try:
            args, kwargs = self._arguments.restore(self._region)
            undo = self._ambient.enter()
            push_saved_tensors_hooks(filling.hook(), _identity)
            try:
                set_grad_enabled(True)
                self._call_again(args, kwargs)
            finally:
                pop_saved_tensors_hooks()
        except StopRecompute:
            pass
        except Exception:
            if not filling.stopped:
                raise
            # The function swallowed the stop and failed later on. Every value is there (Rule 8).
        finally:
            set_grad_enabled(grad_enabled)
            if undo is not None:
                Ambient.leave(undo)
            stack.recomputing -= 1
            stack.innermost = outer
            if transforms is not None:
                resume_transforms(transforms)
        return filling.result()

    def _call_again(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        if self._contexts is None:
            self._function(*args, **kwargs)
        else:
            with _reusable(self._contexts[1]):
                self._function(*args, **kwargs)

    def _region(self) -> tuple[str, ...]:
        return format_path(self.path)


def _reusable(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Returns a context manager that can be entered although this one may have been entered before.

    One made by ``contextlib.contextmanager`` works once; like every ``ContextDecorator`` it knows how to make another.
    """
    recreate = getattr(context, "_recreate_cm", None)
    return context if recreate is None else recreate()
