"""Private parts of ``torch.utils.checkpoint``: functions behind the public calls, selective modes, and global settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch.utils.checkpoint

#: A generator function that opens a region, yields for the call of the function, and closes the region:
#: ``region(function, args, kwargs, **options)``, with the options of ``torch.utils.checkpoint.checkpoint``.
Diversion = Callable[..., Iterator[None]]

_torchs: Any = torch.utils.checkpoint

# The generator function of all non-reentrant calls: of ``checkpoint``, of the curried form, and of the composable form in
# ``torch.distributed``, which imports the name. 2.14 and 2.15: ``..._impl(function, args, kwargs, *, options)``. 2.11 to
# 2.13: without ``_impl``, options second, the function's arguments last. Remove once torch lets libraries register an engine.
_ARGUMENTS_LAST = not hasattr(_torchs, "_checkpoint_without_reentrant_generator_impl")
FUNCTION_OF_ENGINE = f"_checkpoint_without_reentrant_generator{'' if _ARGUMENTS_LAST else '_impl'}"


def _called(*args: Any, **kwargs: Any) -> Any:
    """Provides the code of torch's function, which runs with the globals of torch's module and so imports ``engine`` itself."""
    from ckpt_hooks._torch.checkpoint import engine

    # This is a generator like torch's function: Python 3.13 warns if ``__code__`` gets code of another kind.
    yield from engine.called(*args, **kwargs)


class _Engine:
    """Torch's non-reentrant engine, whose calls may be diverted."""

    # Torch's function object stays where it is and gets other code. So calls by names imported at any time are diverted, and
    # Dynamo, which knows the object by identity, still finds it.
    __slots__ = ("_before", "_choose", "_function", "_original")

    def __init__(self) -> None:
        self._before: tuple[Any, Any, Any] | None = None

    def divert(self, choose: Callable[[], Diversion | None]) -> None:
        """Sends calls to the region that ``choose`` returns for each call; None leaves a call to torch."""
        if self._before is not None:
            return
        function: Any = getattr(_torchs, FUNCTION_OF_ENGINE, None)
        if type(function) is not FunctionType or function.__closure__ is not None:
            raise RuntimeError(
                f"patch_torch diverts torch.utils.checkpoint.{FUNCTION_OF_ENGINE}, a function of torch 2.11 to 2.15, but found "
                f"{function!r} in torch {torch.__version__}. Call patch_torch before another library replaces this function, "
                "or call ckpt_hooks.checkpoint."
            )
        self._function, self._choose = function, choose
        self._original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
        self._original.__kwdefaults__ = function.__kwdefaults__
        self._before = function.__code__, function.__defaults__, function.__kwdefaults__
        _set_code(function, _called.__code__, None, None)

    def restore(self) -> None:
        """Undoes :meth:`divert`, unless another library has replaced the code since."""
        if self._before is not None and self._function.__code__ is _called.__code__:
            _set_code(self._function, *self._before)
        self._before = None

    def called(self, *args: Any, **kwargs: Any) -> Any:
        region = self._choose()
        if region is None:
            return self._original(*args, **kwargs)
        return _arguments_first(region, *args, **kwargs) if _ARGUMENTS_LAST else region(*args, **kwargs)


def _set_code(function: Any, code: Any, defaults: Any, named_defaults: Any) -> None:
    # Another thread may call the function between two of these lines. Torch passes each argument, so no call needs a default.
    function.__code__ = code
    function.__defaults__ = defaults
    function.__kwdefaults__ = named_defaults


#: The options that torch 2.11 to 2.13 pass by position, between the function and its arguments.
_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def _arguments_first(region: Diversion, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Calls a region with the arguments in torch 2.14's order."""
    return region(function, args[len(_OPTIONS) :], kwargs, **dict(zip(_OPTIONS, args, strict=False)))


class _ReentrantEngine:
    """Torch's reentrant engine, ``CheckpointFunction.apply(function, preserve_rng_state, *args)``."""

    # Sets ``apply`` on the class, where Python finds it before the inherited method. Remove once torch has no reentrant engine.
    __slots__ = ("_before", "_class", "_original", "_set")

    def __init__(self) -> None:
        self._class: Any = None

    def divert(self, choose: Callable[[], Diversion | None]) -> None:
        if self._class is not None:
            return
        kind: Any = torch.utils.checkpoint.CheckpointFunction
        original = kind.apply

        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            region = choose()
            if region is None:
                return original(function, preserve_rng_state, *args)
            with contextlib.contextmanager(region)(function, args, {}, preserve_rng_state=preserve_rng_state):
                return function(*args)

        self._class, self._before, self._set = kind, vars(kind).get("apply"), staticmethod(apply)
        kind.apply = self._set

    def restore(self) -> None:
        kind, self._class = self._class, None
        if kind is None or vars(kind).get("apply") is not self._set:
            return
        if self._before is None:
            del kind.apply
        else:
            kind.apply = self._before


#: One of each for the process, since torch's function and class are patched for the whole process.
engine = _Engine()
reentrant_engine = _ReentrantEngine()


def settings_of_torch() -> tuple[bool | None, bool | None]:
    """Returns torch's settings by ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled``; None where not set."""
    return _torchs._enable_checkpoint_early_stop, _torchs._checkpoint_debug_enabled


# The two dispatch modes of torch's own selective checkpointing. The first has the policy as ``policy_fn``, and both have the
# same ``storage``. The package replaces such a pair by its own modes, since torch's are not exact. Remove once they are.
SELECTIVE_FORWARD: Any = torch.utils.checkpoint._CachingTorchDispatchMode
SELECTIVE_RECOMPUTE: Any = torch.utils.checkpoint._CachedTorchDispatchMode

# While torch 2.11 and 2.12 run a graph only to get the shapes of its results, ``torch.compiler.is_compiling()`` is False.
# Remove when torch 2.12 is no longer supported.
_RUNS_FOR_SHAPES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def is_compiled() -> bool:
    """Whether a compiler traces the operators of this thread."""
    return torch.compiler.is_compiling() or (_RUNS_FOR_SHAPES and torch._guards.TracingContext.try_get() is not None)


# The module of torch's composable ``checkpoint``, whose ``_no_hook(module, context)`` wraps the user's context and switches the
# module's hooks off in a recompute.
COMPOSABLE = "torch.distributed._composable.checkpoint_activation"


def without_composable(
    context: AbstractContextManager[Any],
) -> tuple[AbstractContextManager[Any] | None, AbstractContextManager[Any]] | None:
    """Splits a recompute context of torch's composable ``checkpoint`` into the user's context, or None, and torch's."""
    function: Any = getattr(context, "func", None)
    if getattr(function, "__module__", None) != COMPOSABLE or function.__name__ != "_no_hook":
        return None  # the context is not from the composable ``checkpoint``
    module, users = (*context.args, None)[:2]  # type: ignore[attr-defined]
    return users, contextlib.contextmanager(function)(module)
