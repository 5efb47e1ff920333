"""``patch_torch``: programs that call ``torch.utils.checkpoint`` run on this package's engine."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint

from ckpt_hooks._checkpoint.running import frame_of_call
from ckpt_hooks._checkpoint.selective import policy_among
from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.hooks import mark_thread, rewind
from ckpt_hooks._core.misuse import Misuse, OfThisProcess, flag_or_none
from ckpt_hooks._core.mutation import watch_fused_steps
from ckpt_hooks._core.settings import Settings, current_settings
from ckpt_hooks._function.contexts import ContextPair, both, call_context_fn, noop_context_fn
from ckpt_hooks._options import DEFAULT_OPTIONS, Form, defaults_of, options_from
from ckpt_hooks._torch.checkpoint import Diversion, engine, is_compiled, reentrant_engine, settings_of_torch, without_composable
from ckpt_hooks._torch.modes import is_any_transform_active, is_traced, num_dispatch_modes, num_function_modes
from ckpt_hooks.policies.base import Policy, PolicyLike, policy_from

_TORCHS_NOOP: Any = torch.utils.checkpoint.noop_context_fn

_DEFAULTS = defaults_of(Form.DIRECT)
_FLAGS = {name for name, default in _DEFAULTS.items() if isinstance(default, bool)}  # torch takes any object for a flag

#: Active patches, the latest last. Replaced under the lock, read without it.
_active: tuple[TorchPatch, ...] = ()
_lock = threading.Lock()


class TorchPatch(OfThisProcess):
    """The result of :func:`patch_torch`: a patch in force, and the way to undo the patch.

    A context manager; the end of the block undoes the patch.
    """

    __slots__ = ("_has_warned", "_policy", "_preserve_rng_state", "_reentrant")

    def __init__(self, reentrant: bool | None, preserve_rng_state: bool | None, policy: Any) -> None:
        self._reentrant, self._has_warned = reentrant, False
        self._preserve_rng_state = preserve_rng_state
        self._policy = policy

    @property
    def active(self) -> bool:
        """Whether the patch is not undone."""
        return any(patch is self for patch in _active)

    def undo(self) -> None:
        """Undoes the patch, for calls from now on; regions of earlier calls stay as they are.

        Patches may be undone in any order. After the last, torch's functions are what they were. A second call does nothing.
        """
        _set_active(lambda active: tuple(patch for patch in active if patch is not self))

    def __enter__(self) -> TorchPatch:
        if not self.active:
            raise Misuse.UNDONE.error(kind=RuntimeError, name="This patch", call="`with patch_torch(...):`")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        options = f"reentrant={self._reentrant}, preserve_rng_state={self._preserve_rng_state}, policy={self._policy!r}"
        return f"<patch_torch({options}), {'active' if self.active else 'undone'}>"

    def _region(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        context_fn: Callable[[], ContextPair] = _TORCHS_NOOP,
        **named: Any,
    ) -> Iterator[None]:
        """Opens a region, yields for the call of the function, and closes the region."""
        if not torch.is_grad_enabled():
            yield
            return
        if self._preserve_rng_state is not None:
            named["preserve_rng_state"] = self._preserve_rng_state
        options = DEFAULT_OPTIONS
        if not named.items() <= _DEFAULTS.items():
            options = options_from(**{name: bool(value) if name in _FLAGS else value for name, value in named.items()})
        watch_fused_steps()
        mark = mark_thread()
        left_behind = False
        try:
            policy, contexts = self._policy, None
            if context_fn is not _TORCHS_NOOP and context_fn is not noop_context_fn:
                policy, contexts = self._contexts(context_fn)
            if policy is not None:
                options = options.replaced(policy=policy)
            frame = frame_of_call(function, args, kwargs, options, contexts, _settings())
            frame.__enter__()
            try:
                yield
            except BaseException as error:
                # Ctrl-C in a module with torch's composable ``checkpoint`` drops this generator. Python closes it later, maybe
                # inside other regions, which must stay as they are.
                left_behind = type(error) is GeneratorExit and stack.innermost is not frame
                if not left_behind:
                    frame.__exit__(type(error), error, error.__traceback__)
                raise
            frame.__exit__(None, None, None)
        except BaseException as error:
            if not left_behind:
                rewind(mark, error)
            raise

    def _contexts(self, context_fn: Callable[[], ContextPair]) -> tuple[Policy | None, ContextPair | None]:
        """Returns the policy of a caller's ``context_fn``, or else of the patch, and the contexts to enter."""
        forward, recompute = call_context_fn(context_fn)
        parts = without_composable(recompute)
        if parts is not None:
            recompute = parts[0] or nullcontext()
        policy, contexts = policy_among((forward, recompute))
        if parts is not None:
            hooks = nullcontext(), parts[1]
            contexts = hooks if contexts is None else both(hooks, contexts)
        return policy or self._policy, contexts


def patch_torch(
    *, reentrant: bool | None = None, preserve_rng_state: bool | None = None, policy: PolicyLike | None = None
) -> TorchPatch:
    """Runs calls of ``torch.utils.checkpoint`` on this package's engine, on all threads, without editing the code that calls.

    ::

        patch_torch()                                     # for the rest of the program
        with patch_torch(preserve_rng_state=True): ...    # for a block: forwards and their backwards

    Covers ``checkpoint`` however it was imported, its curried form, ``checkpoint_sequential``, and ``checkpoint_wrapper`` and
    the composable ``checkpoint`` of ``torch.distributed``, with all options and selective contexts. Torch's
    ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled`` work too; ``with`` blocks of this package's setters take
    precedence.

    Not covered: calls that ``torch.compile`` or another tracer sees, calls under ``torch.func``, and programs that have
    replaced ``torch.utils.checkpoint.checkpoint``. With several patches the latest applies. Nested regions need the same patch
    in forward and in backward.

    Args:
        reentrant: Whether to cover calls with ``use_reentrant=True`` and calls without the flag. If True, parameters get
            gradients whether or not an argument requires grad. False leaves such calls to torch. None does the same and warns
            once.
        preserve_rng_state: Whether recomputes draw the random numbers of forward, whatever the caller says. None leaves it to
            the caller.
        policy: Which outputs to keep, as for :func:`ckpt_hooks.checkpoint`. Calls with a selective policy keep their own.

    Returns:
        The patch, a context manager that also has ``undo()``.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If a list of operators has something else in it.
        RuntimeError: If torch has no such function to replace.

    Example:
        >>> import torch
        >>> from torch.utils.checkpoint import checkpoint
        >>> from ckpt_hooks import is_recomputing, patch_torch
        >>> def block(x):
        ...     print("again" if is_recomputing() else "forward")
        ...     return x.sin().cos()
        >>> with patch_torch():
        ...     checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
        forward
        again
    """
    patch = TorchPatch(
        flag_or_none(reentrant, "reentrant"),
        flag_or_none(preserve_rng_state, "preserve_rng_state"),
        None if policy is None else policy_from(policy),
    )
    _set_active(lambda active: (*active, patch))
    return patch


def _set_active(change: Callable[[tuple[TorchPatch, ...]], tuple[TorchPatch, ...]]) -> None:
    """Changes the active patches, and diverts or restores torch's functions accordingly."""
    global _active
    with _lock:
        before, wanted = _active, change(_active)
        try:
            _divert(wanted)
        except BaseException:
            _divert(before)
            raise
        _active = wanted


def _divert(patches: tuple[TorchPatch, ...]) -> None:
    if patches:
        engine.divert(_choose)
    else:
        engine.restore()
    if any(patch._reentrant is not False for patch in patches):
        reentrant_engine.divert(_choose_reentrant)
    else:
        reentrant_engine.restore()


def _choose() -> Diversion | None:
    """Returns the region of the latest patch; None if torch has to run the call."""
    if is_compiled() or is_any_transform_active():
        return None
    if (num_dispatch_modes() or num_function_modes()) and is_traced():
        return None
    active = _active
    return active[-1]._region if active else None


def _choose_reentrant() -> Diversion | None:
    active = _active
    latest = active[-1] if active else None
    if latest is None or latest._reentrant is False:
        return None
    region = _choose()
    if latest._reentrant:
        return region
    if region is None or latest._has_warned or not torch.is_grad_enabled():
        return None
    latest._has_warned = True
    warn_user(
        "this call of torch.utils.checkpoint is reentrant (use_reentrant=True, or no flag), so patch_torch leaves it to torch. "
        "Write `patch_torch(reentrant=True)` to cover such calls too, or `patch_torch(reentrant=False)` for no warning."
    )
    return None


def _settings() -> Settings:
    settings = current_settings()
    early_stop, debug = settings_of_torch()
    if early_stop is None and debug is None:
        return settings
    return dataclasses.replace(
        settings,
        early_stop=early_stop if settings.early_stop is None else settings.early_stop,
        debug=debug if settings.debug is None else settings.debug,
    )
