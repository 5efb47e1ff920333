"""Running a call as a region, and the contexts of a ``context_fn`` checked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.hooks import mark_thread, rewind
from ckpt_hooks._core.settings import Settings, current_settings
from ckpt_hooks._function.frame import FunctionFrame
from ckpt_hooks._function.options import (
    UNRUN,
    ContextPair,
    PolicyContext,
    RegionOptions,
    Within,
    both,
    call_context_fn,
    module_of,
    name_of_function,
    noop_context_fn,
    policy_of,
    refuse_unrun,
    unwrapped,
    warn_of_transform,
    without_policy,
)
from ckpt_hooks._recorded.frame import RecordedFrame
from ckpt_hooks._recorded.tape import Tape
from ckpt_hooks._tensors.copies import is_theirs, layout_of
from ckpt_hooks._tensors.held_tensors import watch_fused_steps
from ckpt_hooks._torch.checkpoint import SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE
from ckpt_hooks._torch.compiling import run_traced, skipped
from ckpt_hooks._torch.modes import is_any_transform_active, is_traced, num_dispatch_modes, num_function_modes
from ckpt_hooks.policies.base import Policy
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
    with without_policy(call_context_fn(context_fn)[0]) or nullcontext():
        return function(*args, **kwargs)


def frame_of_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    context_fn: Callable[[], ContextPair],
    settings: Settings,
) -> FunctionFrame | RecordedFrame | Within:
    """Returns the frame of a call, to be entered around the call: a recorded one under a policy."""
    contexts = None if context_fn is noop_context_fn else own_contexts(call_context_fn(context_fn))
    policy = None if contexts is None else policy_of(contexts[0])
    if contexts is not None and policy is not None:
        module = module_of(unwrapped(function))
        hooks = _hooks_of(module)
        inside, around = without_policy(contexts[0]), without_policy(contexts[1])
        if _takers.isdisjoint(hooks):
            recorded = _recorded_frame(function, module, options, policy, around, hooks)
            return recorded if inside is None else Within(recorded, inside)
        contexts = None if inside is around is None else (inside or nullcontext(), around or nullcontext())
    if not (options.debug if settings.debug is None else settings.debug):
        return FunctionFrame(function, args, kwargs, options, contexts, settings)
    logs = OperatorLogs(function)
    own = logs.forward, logs.recompute
    frame = FunctionFrame(function, args, kwargs, options, own if contexts is None else both(contexts, own), settings)
    frame.explain = logs.explain
    return frame


#: The code of hooks that took parameters away after a forward under a policy.
_takers: set[Any] = set()
_NO_HOOKS: frozenset[Any] = frozenset()
_known_hooks: WeakKeyDictionary[torch.nn.Module, tuple[int, frozenset[Any]]] = WeakKeyDictionary()


def _hooks_of(module: torch.nn.Module | None) -> frozenset[Any]:
    """Returns the code of the hooks on forward in a module."""
    if module is None:
        return _NO_HOOKS
    found = _known_hooks.get(module)
    if found is None or found[0] != RemovableHandle.next_id:  # one counter for all hooks of the process
        hooks = [
            hook
            for one in module.modules()
            for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values(), vars(one).get("forward"))
            if hook is not None
        ]
        found = _known_hooks[module] = RemovableHandle.next_id, frozenset(map(_code_of, hooks))
    return found[1]


def _code_of(hook: Any) -> Any:
    hook = unwrapped(hook)
    return getattr(hook, "__code__", type(hook))


def _look_for_weights(module: torch.nn.Module, hooks: frozenset[Any], tape: Tape) -> None:
    """Notes hooks that took away weights which a region has read: they gave them other memory, or put empty ones there."""
    empty = {parameter.shape for parameter in module.parameters() if parameter.is_meta}
    are_taken = False
    for held in tape.parameters():
        parameter, memory = held.tensor, held.memory
        assert parameter is not None
        if memory is not None and held.is_elsewhere() and is_theirs(parameter, layout_of(memory)):
            held.leave(memory)
            are_taken = True
        are_taken = are_taken or parameter.shape in empty
    if are_taken:
        _takers.update(hooks)
        warn_user(
            "Hooks took away weights that a call under a policy has read, and nobody tells how to fill them again. The call "
            "holds them until its backward. From now on calls of modules with such hooks run without their policy: exact, with "
            "more to compute. Units of FSDP2 can have policies."
        )


def _recorded_frame(
    function: Callable[..., Any],
    module: torch.nn.Module | None,
    options: RegionOptions,
    policy: Policy,
    around: AbstractContextManager[Any] | None,
    hooks: frozenset[Any],
) -> RecordedFrame:
    at_end = functools.partial(_look_for_weights, module, hooks) if module is not None and hooks else None
    return RecordedFrame(
        options.name or name_of_function(unwrapped(function)),
        policy,
        respect_hooks=options.respect_hooks,
        preserve_rng_state=options.preserve_rng_state,
        split_backward=options.split_backward,
        offload_from=options.offload_from,
        debug=options.debug,
        compares_values=options.check.fingerprint is not None,
        around_replays=around,
        is_call=True,
        at_end=at_end,
        module=module,
    )


_SELECTIVE = (PolicyContext, SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE)


def own_contexts(contexts: ContextPair) -> ContextPair:
    """Returns the contexts of a region, with the package's own in place of torch's selective contexts."""
    forward: Any
    recompute: Any
    forward, recompute = contexts
    if type(forward) is PolicyContext and forward.is_before(recompute):
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
        kinds = [(_is_forward(context), type(context) is PolicyContext) for context in contexts]
        are_of_two_calls = kinds[0][0] is True and kinds[1] == (False, kinds[0][1])
        raise TypeError(
            "context_fn should return both contexts of one call of create_selective_checkpoint_contexts, the one for forward "
            f"first, but returned {_in_words(forward)} and {_in_words(recompute)}"
            f"{', of two calls' if are_of_two_calls else ''}. Return what that call returns. For "
            "other contexts around them, write checkpoint(policy=policy, context_fn=others)(function)."
        )
    return contexts


def _is_forward(context: Any) -> bool | None:
    """Whether a policy's context is for forward; None for other contexts."""
    if type(context) is PolicyContext:
        return context.is_forward
    return type(context) is SELECTIVE_FORWARD if type(context) in _SELECTIVE else None


def _in_words(context: Any) -> str:
    is_forward = _is_forward(context)
    if is_forward is None:
        return f"a {type(context).__name__}"
    whose = "a " if type(context) is PolicyContext else "torch's "
    return f"{whose}selective context for {'forward' if is_forward else 'recomputes'}"
