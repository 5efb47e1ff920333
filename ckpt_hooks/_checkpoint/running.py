"""Runs one call as a region: plain, traced, or in a frame that fits its options."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.hooks import mark_thread, rewind
from ckpt_hooks._core.misuse import UNRUN, refuse_unrun, warn_of_transform
from ckpt_hooks._core.mutation import watch_fused_steps
from ckpt_hooks._core.settings import Settings, current_settings
from ckpt_hooks._function.contexts import ContextPair, both, noop_context_fn
from ckpt_hooks._function.frame import FunctionFrame
from ckpt_hooks._options import RegionOptions
from ckpt_hooks._torch.compiling import run_traced, skipped
from ckpt_hooks._torch.modes import is_any_transform_active, is_traced, num_dispatch_modes, num_function_modes


@skipped
def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    context_fn: Callable[[], ContextPair],
) -> Any:
    if torch.compiler.is_dynamo_compiling():
        if options.policy is not None:
            from .selective import contexts_with

            context_fn = functools.partial(contexts_with, options.policy, context_fn)
        return run_traced(function, args, kwargs, None if context_fn is noop_context_fn else context_fn)
    if not torch.is_grad_enabled():
        result = function(*args, **kwargs)
    elif is_any_transform_active() or ((num_dispatch_modes() or num_function_modes()) and is_traced()):
        # The call is plain, and keeps everything. A transform hides saved tensors from hooks. A tracer would record the
        # recompute wrongly: a replay runs below the tracer, so its results would be constants, and a rerun would draw other
        # random numbers.
        if is_any_transform_active():
            warn_of_transform(stacklevel=4)
        _, contexts = _with_contexts(options, context_fn)
        with contextlib.nullcontext() if contexts is None else contexts[0]:
            result = function(*args, **kwargs)
    else:
        watch_fused_steps()
        mark = mark_thread()
        try:
            options, contexts = _with_contexts(options, context_fn)
            frame = frame_of_call(function, args, kwargs, options, contexts, current_settings())
            with frame:
                result = function(*args, **kwargs)
                if type(frame) is FunctionFrame:
                    frame.returns(result)
        except BaseException as error:
            rewind(mark, error)
            raise
    if type(result) in UNRUN:
        refuse_unrun(function, result)
    return result


def _with_contexts(options: RegionOptions, context_fn: Callable[[], ContextPair]) -> tuple[RegionOptions, ContextPair | None]:
    if context_fn is noop_context_fn:
        return options, None
    from .selective import with_contexts

    return with_contexts(options, context_fn)


def frame_of_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    contexts: ContextPair | None,
    settings: Settings,
) -> Any:
    """Returns the frame to enter around a call: a recorded frame if a policy can apply, else a function frame."""
    if options.policy is not None:
        from .selective import frame_under_policy  # imported here, since calls without a policy do not need the module

        recorded = frame_under_policy(function, options, contexts)
        if recorded is not None:
            return recorded
    if not (options.debug if settings.debug is None else settings.debug):
        return FunctionFrame(function, args, kwargs, options, contexts, settings)
    from ckpt_hooks.report.debug import OperatorLogs

    logs = OperatorLogs(function)
    pair = logs.forward, logs.recompute
    frame = FunctionFrame(function, args, kwargs, options, pair if contexts is None else both(contexts, pair), settings)
    frame.explain = logs.explain
    return frame
