"""``checkpoint``: function frames, called as in ``torch.utils.checkpoint``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch
from typing_extensions import ParamSpec

from ckpt_hooks._core.events import Settings, current_settings, override
from ckpt_hooks._core.hooks import mark_thread, rewind
from ckpt_hooks._core.misuse import explain_call, flag_or_none, reentrant_error
from ckpt_hooks._core.mutation import watch_fused_steps
from ckpt_hooks._function.frame import FunctionFrame
from ckpt_hooks._function.options import (
    DEFAULT_OPTIONS,
    UNRUN,
    ContextPair,
    Form,
    RegionOptions,
    both,
    call_context_fn,
    check_swallowed,
    defaults_of,
    noop_context_fn,
    options_of,
    refuse_unrun,
    values_of,
    warn_of_transform,
    without_policy,
)
from ckpt_hooks._torch.compiling import run_traced, skipped
from ckpt_hooks._torch.modes import is_any_transform_active, is_traced, num_dispatch_modes, num_function_modes

P = ParamSpec("P")
R = TypeVar("R")

_PASSED_ON = defaults_of(Form.DIRECT)
_DEFAULTS = tuple(_PASSED_ON.values())
#: Options that in a direct call are keyword arguments of the function, as in torch.
_CURRIED = options_of(Form.CURRIED)
_CURRIED_ONLY = frozenset(_CURRIED) - frozenset(options_of(Form.DIRECT))


@contextlib.contextmanager
def set_checkpoint_early_stop(enable: bool | None) -> Iterator[None]:
    """Sets whether recomputes stop early, for every region whose forward runs in the block.

    Backward need not run in the block. The setting belongs to this thread and context. The innermost block wins over outer
    blocks and over each region's ``early_stop``.

    Args:
        enable: Whether a recompute ends with the last needed tensor. None defers to each region.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, set_checkpoint_early_stop
        >>> x = torch.ones(2, requires_grad=True)
        >>> with set_checkpoint_early_stop(False):
        ...     y = checkpoint(torch.sin, x)
        >>> y.sum().backward()  # runs torch.sin to its end once more
    """
    with override(early_stop=flag_or_none(enable, "enable")):
        yield


# By each option, for a signature with ``P.args``, which calls without options have, can have none itself.
@overload
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None,
    context_fn: Callable[[], ContextPair] = noop_context_fn,
    determinism_check: str | Callable[[torch.Tensor], Any] = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> R: ...


@overload
def checkpoint(function: Callable[..., R], *args: Any, context_fn: Callable[[], ContextPair], **kwargs: Any) -> R: ...
@overload
def checkpoint(
    function: Callable[..., R], *args: Any, determinism_check: str | Callable[[torch.Tensor], Any], **kwargs: Any
) -> R: ...
@overload
def checkpoint(function: Callable[..., R], *args: Any, debug: bool, **kwargs: Any) -> R: ...
@overload
def checkpoint(function: Callable[..., R], *args: Any, early_stop: bool, **kwargs: Any) -> R: ...
@overload
def checkpoint(function: Callable[..., R], *args: Any, respect_saved_tensors_hooks: bool | None, **kwargs: Any) -> R: ...
@overload
def checkpoint(function: Callable[..., R], *args: Any, preserve_rng_state: bool, **kwargs: Any) -> R: ...
@overload
def checkpoint(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...


@overload
def checkpoint(
    function: None = None,
    *,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], ContextPair] = noop_context_fn,
    determinism_check: str | Callable[[torch.Tensor], Any] = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    preserve_rng_state: bool = True,
    name: str | None = None,
    policy: Any = None,
    preserve_buffers: bool = True,
    offload_inputs: bool = False,
    split_backward: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@skipped  # type: ignore[misc]  # where a function has parameters of the names of options
def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], ContextPair] = noop_context_fn,
    determinism_check: str | Callable[[torch.Tensor], Any] = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Calls a function without keeping its activations; backward calls the function again.

    Three ways to write it::

        y = checkpoint(block, x, mask=mask)     # call block(x, mask=mask) as a region
        y = checkpoint(name="block")(block)(x)  # options first: returns a function whose calls are regions
        @checkpoint(early_stop=False)           # the same as a decorator, on functions and methods
        def forward(self, x): ...

    In the first form every keyword not listed here reaches ``function``, with a warning, once, if it has the name of an option
    and is one of the function's ``**kwargs``. Without gradients (``torch.no_grad``) the function is called plainly.

    Kept from forward until the graph lets go: the tensors among the arguments, at any depth of lists, tuples, dicts and
    dataclasses; the contents of closed-over variables, and of globals named by the function; and the state of the random
    generators, of which regions share a copy. Recomputed tensors live until autograd takes them, or until the backward ends.

    A recompute finds as forward found them, and leaves as it found them: random generators, arguments and the containers among
    them, closed-over variables, attributes, buffers and submodules of modules, objects in reach, and the surroundings:
    autocast of every device type, default dtype and device, deterministic algorithms, precisions, attention kernels, the number
    of threads, context variables, function modes. The user's dispatch modes (counters, loggers) are left out.

    A buffer of up to 16 KiB is copied whenever it holds something new, and regions share the copy. A larger one is copied by
    the first forward that meets it, until that forward ends unless it wrote to the buffer: then every later forward keeps a
    copy. A forward is a first one again after a change of a flag, a hook or a submodule of the module.

    Under ``make_fx`` over forward and backward a region keeps everything: the graph is the graph of the program without
    regions, and a compiler decides what to recompute. The same holds under transforms of ``torch.func``.

    Where ``torch.compile`` traces the call, the compiler computes activations again, with the same random numbers, and keeps
    what the policy names. Other options mean nothing there.

    Args:
        function: The function to call. A second call must run the same operators in the same order. Dropout and the like may
            draw from torch's default generators.
        *args: Positional arguments of ``function``.
        use_reentrant: None or False, for code written for ``torch.utils.checkpoint``. This engine is non-reentrant.
        context_fn: Returns two context managers. The first wraps forward alone. The second wraps each recompute alone, entered
            anew each time.
        determinism_check: ``"metadata"`` compares shape, dtype and device of each tensor saved in forward and recompute.
            ``"default"`` does so too, and in passes 1, 2, 4, 8, ... of a module or function compares the values (see
            :func:`ckpt_hooks.set_self_check`), unless the recompute draws new random numbers. ``"values"`` compares a hash of
            the values in each pass, and reads all values in both runs. A function of a tensor has its
            results compared, ``lambda tensor: tensor.flatten()[::99]`` some of the values; tensors among these stay on their
            device, with one wait for the device a recompute. ``"none"`` compares nothing. A dispatch mode of the
            user's may change results and is not entered again, so ``"default"`` is ``"values"`` under a mode. With
            ``torch.backends.cudnn.benchmark`` cuDNN may choose another algorithm for the recompute, whose values differ in the
            last bits.
        debug: Whether the error for a recompute which differs begins with the first operator that differs, its line and its
            module, and names choices (top-k, sort) before it. A small operator takes a few times as long. See
            :func:`ckpt_hooks.set_checkpoint_debug_enabled`.
        early_stop: Whether a recompute ends with the last needed tensor: by an exception, unless no operator is left to run, or
            two at most on tensors of up to 512 elements. False runs the region's last operators again in any case.
        respect_saved_tensors_hooks: Whether outputs kept by a policy go through the saved-tensor hooks around the region
            (``save_on_cpu`` and the like). The region's inputs do in any case. None is True.
        preserve_rng_state: Whether a recompute draws the random numbers of forward. If not, it draws new numbers. The streams
            outside are put back in both cases.
        **kwargs: Keyword arguments of ``function``. The curried form has more options:

            - ``name``: the region's name in errors.
            - ``policy``: which outputs to keep. A policy of :mod:`ckpt_hooks.policies`, a function, or a list of operators. The
              call is then a recorded region (:class:`ckpt_hooks.checkpoint_region`): the function runs once, and backward
              replays the operators that it needs; a kept output that was modified after the call, and that it needs, is a
              :class:`MutationError`. ``early_stop`` and ``preserve_buffers`` mean nothing then. So it is for
              policies given by ``context_fn``.
            - ``preserve_buffers``: whether a recompute finds buffers as forward found them, and leaves them as it found them.
              True by default.
            - ``offload_inputs``: whether the tensors among the arguments wait for backward on the host, in pinned memory.
              False by default. Moved are results of operators which require grad, from 256 KiB; a backward fetches those of
              one region ahead. Inside another region, and under saved-tensor hooks, these have the arguments.
            - ``split_backward``: for pipeline schedules which run gradients of inputs and gradients of weights as two
              backwards: one recompute serves both. A recomputed tensor stays until it was used twice, or the graph lets go of
              it, or a backward frees the graph. False by default.

    Returns:
        The result of ``function``; in the curried form (``function=None``), a decorator for functions.

    Raises:
        ValueError: If an option is unknown or has a wrong value.
        TypeError: If an argument is an iterator, which cannot be read twice; if ``function`` is a generator function or a
            coroutine function, which a call does not run; or if a direct call has an option of the curried form which the
            function does not take, or a policy of this package or a list of operators among its ``**kwargs``.
        RuntimeError: If ``context_fn`` suppressed an exception of forward, or saved-tensor hooks are disabled.
        CheckpointError: In backward, where a tensor cannot be brought back as it was. At the end of a forward which writes to
            a buffer of more than 16 KiB that earlier forwards only read, if no flag, hook or submodule changed before.

    Note:
        Of the limits in the README, in more detail:

        - Hooks registered by the function on its arguments count once. Hooks on parameters, on closed-over tensors, on nodes
          (``x.grad_fn.register_hook``) and on accumulated gradients count twice.
        - State is looked for in the function's module, its hooks, closure, defaults, partials and arguments, in globals that it
          names, and in containers and objects there. State behind weak references, in attributes of classes and of Python's
          modules, in modules that hooks alone reach, or in globals named by a called function alone, is not put back. Objects
          are kept alive as long as something else does so; a list which is gone by then is there again as another list.
        - A parameter which the function itself writes to before it reads it (a clamp) is fine. ``nn.Embedding(max_norm=...)``
          rounds once more. Averages kept in parameters without gradients are rewound up to 16 MiB a region.
        - Tensors first kept by an object in a module after its first forwards are not rewound, nor are buffers of other classes
          than torch's own, sparse and quantised buffers included. A write in forward to such a buffer is a
          :class:`ckpt_hooks.MutationError`.
        - Tensors with a graph are not rewound where the function writes to them in place: closed-over tensors, and attributes
          of modules above 64 KiB, which are a :class:`ckpt_hooks.MutationError`.
        - Several threads which train one module with buffers need ``preserve_buffers=False``.
        - All that TorchScript saves is kept, past saved-tensor hooks around: it saves other tensors in the first calls of a
          function than in later ones. In a recorded region inside of this one such a call may be an error.
        - A backward inside a region on two devices waits for ever where the other device's thread waits for the region: call
          ``torch.autograd.grad`` outside of the region, or keep each region on one device.
        - A rerun with a backward inside cannot follow a read of ``ctx.input_grad_buffers``.
        - Random numbers of Python and NumPy without :func:`ckpt_hooks.track_rng` are drawn anew, which is a
          :class:`ckpt_hooks.DeterminismError` in the first pass. What forward drew and a recompute does not draw goes
          unnoticed. Seed generators outside of regions that two threads recompute at once.
        - A tensor that the first forward made, or that went into a region inside another one, and that got another storage
          before backward, may count with either. ``torch.utils.swap_tensors`` refuses tensors that an open recorded region has
          read.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
        >>> x = torch.ones(2, 4, requires_grad=True)
        >>> checkpoint(block, x).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 4])
    """
    if use_reentrant:
        raise reentrant_error(use_reentrant)
    if function is not None and torch.compiler.is_dynamo_compiling():
        return run_traced(function, args, kwargs, None if context_fn is noop_context_fn else context_fn)
    options = DEFAULT_OPTIONS
    values = determinism_check, debug, early_stop, preserve_rng_state, respect_saved_tensors_hooks
    if values != _DEFAULTS:
        # Not a new object: Dynamo knows where a check stands that options have, and none that is the default of a class.
        options = dataclasses.replace(options, **values_of(zip(_PASSED_ON, values, strict=True)))
    if function is None:
        if args:
            raise TypeError(
                "checkpoint got arguments, but None for the function. Write `checkpoint(function, *args)`, or "
                "`checkpoint(...)(function)(*args)` to give options first."
            )
        from .curried import curried

        return curried(options, context_fn, kwargs)
    if kwargs and not _CURRIED_ONLY.isdisjoint(kwargs):
        check_swallowed(function, kwargs, _CURRIED)
    try:
        return run(function, args, kwargs, options, context_fn)
    except (TypeError, AttributeError):
        explained = explain_call(function, args, kwargs, _CURRIED)
        if explained is None:
            raise
    try:
        raise explained
    finally:
        del explained  # its traceback has this call, and the arguments with it


@skipped
def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    context_fn: Callable[[], ContextPair],
) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return run_traced(function, args, kwargs, None if context_fn is noop_context_fn else context_fn)
    if not torch.is_grad_enabled():
        result = function(*args, **kwargs)
    elif is_any_transform_active() or ((num_dispatch_modes() or num_function_modes()) and is_traced()):
        # Keeping everything. A transform hides saved tensors from hooks. A tracer would write down the work of a recompute: the
        # values returned by a replay come from below the tracer, as constants, and a rerun draws random numbers anew.
        if is_any_transform_active():
            warn_of_transform(stacklevel=4)
        around = None if context_fn is noop_context_fn else without_policy(call_context_fn(context_fn)[0])
        with around or contextlib.nullcontext():
            result = function(*args, **kwargs)
    else:
        watch_fused_steps()
        mark = mark_thread()
        try:
            frame = frame_of_call(function, args, kwargs, options, context_fn, current_settings())
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


def frame_of_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    context_fn: Callable[[], ContextPair],
    settings: Settings,
) -> Any:
    """Returns the frame of a call, to be entered around the call: under a policy a recorded frame."""
    contexts = None
    if context_fn is not noop_context_fn:
        from ckpt_hooks.selective import frame_under_policy  # others need no recorded frames

        recorded, contexts = frame_under_policy(function, options, call_context_fn(context_fn))
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
