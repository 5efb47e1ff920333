"""``checkpoint``: function frames, called as in ``torch.utils.checkpoint``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, SupportsIndex, TypeVar, overload

import torch
from typing_extensions import Never, ParamSpec

from ckpt_hooks._core.interrupts import bring_back, mark_thread
from ckpt_hooks._core.misuse import check_alone, check_callable, checked_flag, explain_call, reentrant_error
from ckpt_hooks._core.settings import Settings, current_settings, override
from ckpt_hooks._function.callables import UNRUN, check_runs, check_swallowed, refuse_unrun
from ckpt_hooks._function.contexts import ContextPair, both, call_context_fn, check_context_fn, noop_context_fn, selection_of
from ckpt_hooks._function.frame import FunctionFrame
from ckpt_hooks._function.options import DEFAULT_OPTIONS, RegionOptions
from ckpt_hooks._function.transforms import run_plainly
from ckpt_hooks._tensors.determinism import DEFAULT_CHECK, check_of
from ckpt_hooks._tensors.fused_steps import watch_fused_steps
from ckpt_hooks._torch import is_any_transform_active, is_traced, num_dispatch_modes, num_function_modes
from ckpt_hooks.policies.base import Policy, policy_from
from ckpt_hooks.report.debug import OperatorLogs
from ckpt_hooks.selective import create_selective_checkpoint_contexts

from .pairs import own_contexts

__all__ = ["checkpoint", "noop_context_fn", "set_checkpoint_early_stop"]

P = ParamSpec("P")
R = TypeVar("R")


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
    with override(early_stop=None if enable is None else checked_flag(enable, "enable", others=(None,))):
        yield


@overload
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], ContextPair] = noop_context_fn,
    determinism_check: str | Callable[[torch.Tensor], Any] = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> R: ...


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
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


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

    In the first form every keyword not listed here reaches ``function``. Without gradients (``torch.no_grad``) the function is
    called plainly.

    Kept from forward until the graph lets go: the tensors among the arguments, at any depth of lists, tuples, dicts and
    dataclasses; the contents of closed-over variables, and of globals named by the function; and the state of the random
    generators, of which regions share a copy. Recomputed tensors live until autograd takes them, or until the backward ends.

    Under ``make_fx`` over forward and backward a region keeps everything: the graph is the graph of the program without
    regions, and a compiler decides what to recompute. The same holds under transforms of ``torch.func``.

    Args:
        function: The function to call. A second call must run the same operators in the same order. Dropout and the like may
            draw from torch's default generators.
        *args: Positional arguments of ``function``.
        use_reentrant: None or False, for code written for ``torch.utils.checkpoint``. This engine is non-reentrant.
        context_fn: Returns two context managers. The first wraps forward alone. The second wraps each recompute alone, entered
            anew each time.
        determinism_check: ``"default"`` compares shape, dtype and device of each tensor saved in forward and recompute.
            ``"values"`` compares a hash of the values too, and reads all values in both runs. ``"sampled_values"`` compares
            some 64 of the values, at fixed places. A function of a tensor has its results compared; tensors among these stay
            on their device, with one wait for the device a recompute. Where values are compared, a recompute which draws
            from ``random`` or from NumPy's global state is an error too, unless tracked (:func:`ckpt_hooks.track_rng`).
            ``"none"`` compares nothing. A dispatch mode of the user's may change results and is not entered again, so
            ``"default"`` is ``"values"`` under a mode. With ``torch.backends.cudnn.benchmark`` cuDNN may choose another
            algorithm for the recompute, whose values differ in the last bits.
        debug: Whether an error in a recompute lists the operators of both runs. Slow.
        early_stop: Whether a recompute ends, by an exception, with the last needed tensor. False takes 5 to 10% off a step of
            operators on small tensors, and costs the region's last operators on large ones.
        respect_saved_tensors_hooks: Whether outputs kept by a policy go through the saved-tensor hooks around the region
            (``save_on_cpu`` and the like). The region's inputs do in any case. None is True.
        preserve_rng_state: Whether a recompute draws the random numbers of forward. If not, it draws new numbers. The streams
            outside are put back in both cases.
        **kwargs: Keyword arguments of ``function``. The curried form has three more options: ``name``, the region's name in
            errors; ``policy``, which outputs to keep (a policy of :mod:`ckpt_hooks.policies`, a function, or a list of
            operators); and ``preserve_buffers``, whether a recompute finds buffers as forward found them, and leaves them as
            it found them. True by default.

    Returns:
        The result of ``function``; in the curried form (``function=None``), a decorator for functions.

    Raises:
        ValueError: If an option is unknown or has a wrong value.
        TypeError: If an argument is an iterator, which cannot be read twice; if ``function`` is a generator function or a
            coroutine function, which a call does not run; or if a direct call has an option of the curried form, and the
            function does not take it, or it is a policy.
        RuntimeError: If ``context_fn`` suppressed an exception of forward, or saved-tensor hooks are disabled.
        CheckpointError: In backward, where a tensor cannot be brought back as it was.

    Note:
        Of the limits in the README, in more detail:

        - Hooks registered by the function on its arguments count once. Hooks on parameters, on closed-over tensors, on nodes
          (``x.grad_fn.register_hook``) and on accumulated gradients count twice.
        - State is looked for in the function's module, closure, defaults, partials and arguments, in plain objects in these,
          and in globals which are a module, a tensor or a generator. State deeper in objects, behind weak references, in
          attributes of classes, in closed-over containers, or in globals named by a called function alone, is not put back.
        - A parameter which the function itself writes to before it reads it (a clamp) is fine. ``nn.Embedding(max_norm=...)``
          rounds once more. Averages kept in parameters without gradients are rewound up to 16 MiB a region.
        - Tensors first kept by an object in a module after its first forwards are not rewound, nor are unregistered submodules
          (``Sequential.insert``), nor buffers of other classes than torch's own, sparse and quantised buffers included. A write
          in forward to such a buffer is a :class:`ckpt_hooks.MutationError`.
        - Tensors with a graph are not rewound where the function writes to them in place: closed-over tensors, and attributes
          of modules above 64 KiB, which are a :class:`ckpt_hooks.MutationError`.
        - Several threads which train one module with buffers need ``preserve_buffers=False``.
        - TorchScript saves other tensors in its first calls: call a scripted function once under ``torch.no_grad()`` before.
        - A backward inside a region on two devices may be an error after a minute, where the other device's thread waits for
          the region. A rerun with a backward inside cannot follow a read of ``ctx.input_grad_buffers``.

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
    check = DEFAULT_CHECK if determinism_check == "default" else check_of(determinism_check)
    options = DEFAULT_OPTIONS
    if not (
        preserve_rng_state is True
        and early_stop is True
        and check is DEFAULT_CHECK
        and (respect_saved_tensors_hooks is None or respect_saved_tensors_hooks is True)
    ):
        options = RegionOptions(
            checked_flag(preserve_rng_state, "preserve_rng_state"),
            checked_flag(early_stop, "early_stop"),
            check=check,
            respect_hooks=respect_saved_tensors_hooks is None
            or checked_flag(respect_saved_tensors_hooks, "respect_saved_tensors_hooks", others=(None,)),
        )
    if function is None:
        if args:
            raise TypeError(
                "checkpoint got arguments, but None for the function. Write `checkpoint(function, *args)`, or "
                "`checkpoint(...)(function)(*args)` to give options first."
            )
        return _curried(options, context_fn, debug, kwargs)
    if kwargs and not _CURRIED_OPTIONS.isdisjoint(kwargs):
        check_swallowed(function, _CURRIED_OPTIONS, kwargs)
    try:
        return _run(function, args, kwargs, options, context_fn, debug)
    except (TypeError, AttributeError):
        explained = explain_call(function, args, kwargs)
        if explained is None:
            raise
    try:
        raise explained
    finally:
        del explained  # its traceback has this call, and the arguments with it


#: Options that in a direct call are keyword arguments of the function, as in torch.
_CURRIED_OPTIONS = frozenset({"name", "policy", "preserve_buffers"})


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    context_fn: Callable[[], ContextPair],
    debug: bool,
) -> Any:
    if not torch.is_grad_enabled():
        result = function(*args, **kwargs)
    elif is_any_transform_active() or ((num_dispatch_modes() or num_function_modes()) and is_traced()):
        result = run_plainly(function, args, kwargs, context_fn)
    else:
        watch_fused_steps()
        mark = mark_thread()
        try:
            frame = frame_of_call(function, args, kwargs, options, context_fn, debug, current_settings())
            with frame:
                result = function(*args, **kwargs)
        except BaseException as error:
            bring_back(mark, error)
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
    debug: bool,
    settings: Settings,
) -> FunctionFrame:
    """Returns the frame of a call, to be entered around the call.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: The options of recomputes.
        context_fn: Returns the contexts of forward and recomputes.
        debug: Whether both runs are logged, unless the settings say so.
        settings: The settings in force.
    """
    contexts = None if context_fn is noop_context_fn else own_contexts(call_context_fn(context_fn))
    if not (debug if settings.debug is None else settings.debug):
        return FunctionFrame(function, args, kwargs, options, contexts, settings)
    checked_flag(debug, "debug")
    logs = OperatorLogs()
    own = logs.forward, logs.recompute
    frame = FunctionFrame(function, args, kwargs, options, own if contexts is None else both(contexts, own), settings)
    frame.explain = logs.explain
    return frame


class CheckpointedFunction(Generic[P, R]):
    """A function whose calls are regions: the result of :func:`checkpoint` in its curried form.

    Binds to instances as the function does, and is copied with the function (``copy.deepcopy`` of a model).

    Attributes:
        function: The function to call.
    """

    __qualname__: str  # of the function

    def __init__(
        self, function: Callable[P, R], options: RegionOptions, context_fn: Callable[[], ContextPair], debug: bool
    ) -> None:
        self.function = function
        self._options = (options, context_fn, debug)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function as a region."""
        result: R = _run(self.function, args, kwargs, *self._options)
        return result

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # A decorated function is pickled as functions are, by its name.
        found: Any = sys.modules.get(self.__module__)
        for name in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        return self.__qualname__ if found is self else super().__reduce_ex__(protocol)

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        bind = getattr(type(self.function), "__get__", None)
        if bind is None:
            return self
        bound = bind(self.function, instance, owner)
        return self if bound is self.function else CheckpointedFunction(bound, *self._options)


def _curried(
    options: RegionOptions, context_fn: Callable[[], ContextPair], debug: bool, own_options: dict[str, Any]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    policy = own_options.pop("policy", None)
    if policy is not None:
        context_fn = _with_policy(context_fn, policy_from(policy))
    options = dataclasses.replace(
        options,
        name=own_options.pop("name", None),
        preserve_buffers=checked_flag(own_options.pop("preserve_buffers", True), "preserve_buffers"),
    )
    if own_options:
        raise ValueError(
            f"Unexpected keyword arguments: {', '.join(own_options)}. Without a function, checkpoint takes its options only: "
            "context_fn, determinism_check, debug, early_stop, preserve_rng_state, respect_saved_tensors_hooks, "
            "use_reentrant, name, policy, preserve_buffers. Arguments of the function go to what that returns: "
            "checkpoint(...)(function)(*args)."
        )

    check_context_fn(context_fn)
    checked_flag(debug, "debug")

    def as_region(function: Callable[P, R], *others: Never, **named: Never) -> Callable[P, R]:
        check_callable(function, "checkpoint(...)")
        check_alone(function, others, named, "checkpoint(...)")
        check_runs(function)
        return CheckpointedFunction(function, options, context_fn, debug)

    return as_region


def _with_policy(context_fn: Callable[[], ContextPair], policy: Policy) -> Callable[[], ContextPair]:
    if context_fn is noop_context_fn:
        return functools.partial(create_selective_checkpoint_contexts, policy)

    def contexts() -> ContextPair:
        others = own_contexts(call_context_fn(context_fn))
        if selection_of(others[0]) is not None:
            raise TypeError(
                "checkpoint got policy and a context_fn that returns the contexts of another policy: a region has one. Pass "
                "ckpt_hooks.policies.save_from_both_policies(one, other) as policy, and contexts of other kinds by context_fn."
            )
        return both(create_selective_checkpoint_contexts(policy), others)

    return contexts
