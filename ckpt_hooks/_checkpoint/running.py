"""Running a call as a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.interrupts import mark_thread, rewind
from ckpt_hooks._core.settings import Settings, current_settings
from ckpt_hooks._function.callables import UNRUN, refuse_unrun
from ckpt_hooks._function.contexts import ContextPair, both, call_context_fn, noop_context_fn
from ckpt_hooks._function.frame import FunctionFrame
from ckpt_hooks._function.options import RegionOptions
from ckpt_hooks._function.transforms import run_plainly
from ckpt_hooks._tensors.held_tensors import watch_fused_steps
from ckpt_hooks._torch.compiling import run_traced, skipped
from ckpt_hooks._torch.modes import is_any_transform_active, is_traced, num_dispatch_modes, num_function_modes
from ckpt_hooks.report.debug import OperatorLogs

from .context_fn_check import own_contexts

__all__ = ["frame_of_call", "run"]


@skipped
def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    context_fn: Callable[[], ContextPair],
) -> Any:
    """Calls a function, as a region where gradients are enabled."""
    if torch.compiler.is_dynamo_compiling():
        return run_traced(function, args, kwargs, None if context_fn is noop_context_fn else context_fn)
    if not torch.is_grad_enabled():
        result = function(*args, **kwargs)
    elif is_any_transform_active() or ((num_dispatch_modes() or num_function_modes()) and is_traced()):
        result = run_plainly(function, args, kwargs, context_fn)
    else:
        watch_fused_steps()
        mark = mark_thread()
        try:
            frame = frame_of_call(function, args, kwargs, options, context_fn, current_settings())
            with frame:
                result = function(*args, **kwargs)
        except BaseException as error:
            rewind(mark, error)
            raise
    if type(result) in UNRUN:
        refuse_unrun(function, result)
    return result


def frame_of_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    context_fn: Callable[[], ContextPair],
    settings: Settings,
) -> FunctionFrame:
    """Returns the frame of a call, to be entered around the call, under some settings."""
    contexts = None if context_fn is noop_context_fn else own_contexts(call_context_fn(context_fn))
    if not (options.debug if settings.debug is None else settings.debug):
        return FunctionFrame(function, args, kwargs, options, contexts, settings)
    logs = OperatorLogs(function)
    own = logs.forward, logs.recompute
    frame = FunctionFrame(function, args, kwargs, options, own if contexts is None else both(contexts, own), settings)
    frame.call.explain = logs.explain
    return frame
