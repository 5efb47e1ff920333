"""``checkpoint``, with the signature of ``torch.utils.checkpoint``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from typing_extensions import ParamSpec

from ckpt_hooks._core.misuse import explain_call, flag_or_none, reentrant_error
from ckpt_hooks._core.settings import override
from ckpt_hooks._function.contexts import ContextPair, noop_context_fn
from ckpt_hooks._options import DEFAULT_OPTIONS, OPTIONS, DeterminismCheck, Form, check_swallowed, options_from, options_of
from ckpt_hooks._torch.compiling import run_traced, skipped

from .running import run

if TYPE_CHECKING:
    from ckpt_hooks.policies.base import PolicyLike

P = ParamSpec("P")
R = TypeVar("R")

_DEFAULTS = tuple(
    OPTIONS[name].default
    for name in ("determinism_check", "debug", "early_stop", "preserve_rng_state", "respect_saved_tensors_hooks")
)
_CURRIED = options_of(Form.CURRIED)
#: A direct call passes keywords of these names to the function, as torch does.
_CURRIED_ONLY = frozenset(_CURRIED) - frozenset(options_of(Form.DIRECT))


@contextlib.contextmanager
def set_checkpoint_early_stop(enable: bool | None) -> Iterator[None]:
    """Sets whether recomputes stop early, for all regions whose forward runs in the block.

    Belongs to this thread and context. The innermost block wins over outer blocks and over the ``early_stop`` of a region.
    Backward may run outside of the block.

    Args:
        enable: Whether a recompute stops after the last needed tensor. None leaves it to each region.

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


# A signature with ``P.args`` cannot have keyword-only parameters. So the overloads for calls with options take any arguments,
# and each requires one of the options.
@overload
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None,
    context_fn: Callable[[], ContextPair] = noop_context_fn,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> R: ...


@overload
def checkpoint(function: Callable[..., R], *args: Any, context_fn: Callable[[], ContextPair], **kwargs: Any) -> R: ...
@overload
def checkpoint(function: Callable[..., R], *args: Any, determinism_check: DeterminismCheck, **kwargs: Any) -> R: ...
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
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    preserve_rng_state: bool = True,
    name: str | None = None,
    policy: PolicyLike | None = None,
    preserve_buffers: bool = True,
    offload_inputs: bool = False,
    split_backward: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@skipped  # type: ignore[misc]  # overloads overlap if a parameter of the function has the name of an option
def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], ContextPair] = noop_context_fn,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs a function without keeping its activations. Backward runs the function again to compute them.

    Three ways to write it::

        y = checkpoint(block, x, mask=mask)     # calls block(x, mask=mask) as a region
        y = checkpoint(name="block")(block)(x)  # options first: returns a function whose calls are regions
        @checkpoint(early_stop=False)           # the same as a decorator, on functions and methods
        def forward(self, x): ...

    Results, gradients, buffers and random numbers are bitwise those of the plain call, or an error says why not. Under
    ``torch.no_grad`` the call is plain.

    Cost:
        Backward runs the operators of forward a second time. On a CPU each saved tensor costs a few microseconds more, and some
        hundred in passes that the self-check compares (1, 2, 4, 8, ...).

    Kept until the graph is freed:
        The tensors among the arguments (also in lists, tuples, dicts and dataclasses), the contents of closed-over variables
        and of globals that the function names, and one state of the random generators, which regions share. Changed buffers up
        to 16 KiB are copied; larger ones are copied only in forwards known to write to them.

    Restored for a recompute, and put back after it:
        Random generators, arguments and their containers, closed-over variables, attributes, buffers and submodules of
        modules, objects that these reach, and settings: autocast, default dtype and device, deterministic algorithms,
        precisions, attention kernels, thread counts, context variables, function modes. Dispatch modes of the user are not
        entered again.

    Tracing:
        ``torch.compile`` recomputes by itself, with the same random numbers, and keeps what the policy names; other options
        have no effect. Under ``make_fx`` over forward and backward, and under ``torch.func``, a region keeps everything.

    Args:
        function: The function to call. Its second call must run the same operators in the same order.
        *args: Positional arguments of ``function``.
        use_reentrant: None or False. As in ``torch.utils.checkpoint``.
        context_fn: Returns two context managers: around forward, and around each recompute.
        determinism_check: How to compare tensors saved in forward with those of the recompute. ``"metadata"`` compares shape,
            dtype and device. ``"default"`` also compares values in passes 1, 2, 4, 8, ... of each module or function
            (:func:`ckpt_hooks.set_self_check`), unless the recompute draws new random numbers. ``"values"`` compares a
            hash of the values in each pass. A function of a tensor compares what it returns, such as
            ``lambda tensor: tensor.flatten()[::99]``. ``"none"`` compares nothing. Under a dispatch mode of the user all but
            ``"none"`` and a function compare values.
        debug: Whether the error for a recompute that differs names the first operator that differs, its line and its module.
            Makes small operators a few times slower.
        early_stop: Whether a recompute stops, by an exception, after the last tensor that backward needs. It finishes instead
            where at most two nodes of the graph are left to make. False always runs the function to its end.
        respect_saved_tensors_hooks: Whether outputs that a policy keeps pass through the saved-tensor hooks around the region,
            such as ``save_on_cpu``. The region's inputs always pass through these hooks. None means True.
        preserve_rng_state: Whether a recompute draws the random numbers of forward again. False draws new numbers. Torch's
            generators are put back after the recompute in both cases.
        **kwargs: Keyword arguments of ``function``. One with the name of an option of the curried form reaches a function that
            takes ``**kwargs``, with a warning; a policy there is an error. Options of the curried form alone:

            - ``name``: the region's name in errors.
            - ``policy``: which outputs to keep: a policy of :mod:`ckpt_hooks.policies` or its name (``"dots_saveable"``), a
              function, or a list of operators.
              Makes the call a recorded region (:class:`ckpt_hooks.checkpoint_region`): the function runs once and backward
              replays operators. ``early_stop`` and ``preserve_buffers`` then have no effect.
            - ``preserve_buffers``: whether to restore buffers for a recompute. True by default. False where threads share them.
            - ``offload_inputs``: whether tensor arguments wait for backward in pinned host memory. False by default. Moves only
              tensors of at least 256 KiB that require grad and are no leaves. Has no effect inside another region or under
              saved-tensor hooks.
            - ``split_backward``: whether one recompute serves two backwards, for inputs and for weights, as in pipelines.
              Keeps each recomputed tensor until it was used twice. False by default.

    Returns:
        What ``function`` returns. Without a function, a decorator.

    Raises:
        TypeError: If an option has a value of another kind; if an argument is an iterator; if ``function`` is a generator or
            coroutine function, since calling one does not run its body; or if a direct call has a keyword that ``function``
            does not take.
        ValueError: If ``determinism_check`` or an option is unknown, ``use_reentrant`` is True, or a list of operators has
            something else in it.
        RuntimeError: If ``context_fn`` suppresses an exception of forward, or if saved-tensor hooks are disabled.
        CheckpointError: In backward, if a tensor cannot be brought back as it was: :class:`ckpt_hooks.DeterminismError` where
            the recompute differs, :class:`ckpt_hooks.MutationError` where an input was modified in place. In forward, if
            it writes to a buffer above 16 KiB that earlier forwards of the same module only read.

    Limits:
        - Hooks that the function registers on its arguments run once; hooks on parameters, closed-over tensors and graph nodes
          run twice.
        - Not restored: state behind weak references, in attributes of classes and Python modules, or in globals that only
          called functions name; buffers of other classes than ``torch.Tensor``, sparse or quantized. The self-check and
          version counters turn most such changes into an error.
        - A tensor from outside that the function modifies in place is an error if backward needs its values.
        - Python's and NumPy's random numbers need :func:`ckpt_hooks.track_rng`.
        - What TorchScript code saves is kept.
        - Calling backward inside a region can deadlock if that backward uses a second device.

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
    # Tuples, since each call makes this comparison, and comparing dictionaries takes three times as long.
    if (determinism_check, debug, early_stop, preserve_rng_state, respect_saved_tensors_hooks) != _DEFAULTS:
        options = options_from(
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            preserve_rng_state=preserve_rng_state,
            respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        )
    if function is None:
        if args:
            raise TypeError(
                "checkpoint got arguments, but None for the function. Write `checkpoint(function, *args)`, or "
                "`checkpoint(...)(function)(*args)` to give options first."
            )
        from .curried import curried  # imported here, since direct calls do not need the module

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
        del explained  # its traceback holds this frame, and so the arguments
