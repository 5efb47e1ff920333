"""Running a call as a region, and the contexts of a ``context_fn`` checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.hooks import mark_thread, rewind
from ckpt_hooks._core.settings import Settings, current_settings
from ckpt_hooks._function.callables import UNRUN, refuse_unrun, warn_of_transform
from ckpt_hooks._function.contexts import ContextPair, both, call_context_fn, noop_context_fn, without_selection
from ckpt_hooks._function.frame import FunctionFrame
from ckpt_hooks._function.options import RegionOptions
from ckpt_hooks._function.selective.modes import Recompute, Record
from ckpt_hooks._tensors.held_tensors import watch_fused_steps
from ckpt_hooks._torch.checkpoint import SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE
from ckpt_hooks._torch.compiling import run_traced, skipped
from ckpt_hooks._torch.modes import is_any_transform_active, is_traced, num_dispatch_modes, num_function_modes
from ckpt_hooks.report.debug import OperatorLogs
from ckpt_hooks.selective import create_selective_checkpoint_contexts


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
        result = _run_plainly(function, args, kwargs, context_fn)
    else:
        watch_fused_steps()
        mark = mark_thread()
        try:
            frame = frame_of_call(function, args, kwargs, options, context_fn, current_settings())
            with frame:
                result = function(*args, **kwargs)
                frame.returns(result)
        except BaseException as error:
            rewind(mark, error)
            raise
    if type(result) in UNRUN:
        refuse_unrun(function, result)
    return result


def _run_plainly(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context_fn: Callable[[], ContextPair]
) -> Any:
    """Calls the function of a region which keeps everything, in the user's context for forward."""
    # A transform hides saved tensors from hooks. A tracer would write down the work of a recompute: the values returned by a
    # replay come from below the tracer, as constants, and a rerun draws random numbers anew.
    if is_any_transform_active():
        warn_of_transform(stacklevel=5)
    if context_fn is noop_context_fn:
        return function(*args, **kwargs)
    with without_selection(call_context_fn(context_fn)[0]):
        return function(*args, **kwargs)


def frame_of_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    context_fn: Callable[[], ContextPair],
    settings: Settings,
) -> FunctionFrame:
    contexts = None if context_fn is noop_context_fn else own_contexts(call_context_fn(context_fn))
    if not (options.debug if settings.debug is None else settings.debug):
        return FunctionFrame(function, args, kwargs, options, contexts, settings)
    logs = OperatorLogs(function)
    own = logs.forward, logs.recompute
    frame = FunctionFrame(function, args, kwargs, options, own if contexts is None else both(contexts, own), settings)
    frame.call.explain = logs.explain
    return frame


_SELECTIVE = (Record, Recompute, SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE)


def own_contexts(contexts: ContextPair) -> ContextPair:
    """Returns the contexts of a region, with the package's own in place of torch's selective contexts."""
    forward: Any
    recompute: Any
    forward, recompute = contexts
    if type(forward) is Record and type(recompute) is Recompute and forward.selection is recompute.selection:
        return contexts
    if type(forward) is SELECTIVE_FORWARD and type(recompute) is SELECTIVE_RECOMPUTE and forward.storage is recompute.storage:
        # Torch's reuse outputs by how often an operator ran before, and know nothing of restored buffers, of random streams or
        # of a second backward.
        return create_selective_checkpoint_contexts(forward.policy_fn)
    for context in contexts:
        if not (hasattr(type(context), "__enter__") and hasattr(type(context), "__exit__")):
            raise TypeError(
                "context_fn should return two context managers, one for forward and one for recomputes, but one of them is "
                f"{context!r} of type {type(context).__name__}. Where there is nothing to do, return contextlib.nullcontext()."
            )
    if type(forward) in _SELECTIVE or type(recompute) in _SELECTIVE:
        are_of_two_calls = (type(forward), type(recompute)) in (
            (Record, Recompute),
            (SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE),
        )
        raise TypeError(
            "context_fn should return both contexts of one call of create_selective_checkpoint_contexts, the one for forward "
            f"first, but returned {_in_words(forward)} and {_in_words(recompute)}"
            f"{', of two calls' if are_of_two_calls else ''}. Return what that call returns. For "
            "other contexts around them, write checkpoint(policy=policy, context_fn=others)(function)."
        )
    return contexts


def _in_words(context: Any) -> str:
    kind = type(context)
    if kind not in _SELECTIVE:
        return f"a {kind.__name__}"
    whose = "a " if kind in (Record, Recompute) else "torch's "
    return f"{whose}selective context for {'forward' if kind in (Record, SELECTIVE_FORWARD) else 'recomputes'}"
