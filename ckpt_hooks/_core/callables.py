"""The function of a region: checks, its name, its module."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

from torch.nn import Module

from .descriptions import text_of
from .misuse import wrong

#: A call that returns an object of such a type has not run the function's body.
UNRUN = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})

_KINDS = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def check_runs(function: Any) -> None:
    """Refuses module classes, generator functions and coroutine functions, also inside a partial, a module or ``__call__``."""
    inner = unwrapped(function)
    if isinstance(inner, type) and issubclass(inner, Module):
        raise wrong(inner, "function", "a function or a module", f"Make a module of the class first: `{inner.__name__}(...)`.")
    if isinstance(inner, Module):
        inner = inner.forward
    elif not inspect.isroutine(inner) and not isinstance(inner, type):
        inner = getattr(type(inner), "__call__", inner)  # noqa: B004 -- not a test for callables
    if any(is_kind(inner) for is_kind in _KINDS):
        raise _unrun_error(function)


def refuse_unrun(function: Any, result: Any) -> NoReturn:
    if isinstance(result, CoroutineType):
        result.close()  # or Python warns that it was never awaited
    raise _unrun_error(function)


def _unrun_error(function: Any) -> TypeError:
    return TypeError(
        f"{text_of(function)} returns a generator or coroutine: a call does not run its body, so the call cannot be a region. "
        "Write `with checkpoint_region():` around lines inside the function."
    )


@functools.cache  # warns once for each form of region: each passes another ``stacklevel``
def warn_of_transform(*, stacklevel: int) -> None:
    """Warns that a region, ``stacklevel`` calls up the stack, runs un-checkpointed under a ``torch.func`` transform."""
    warnings.warn(
        "checkpoint was called under a torch.func transform (grad, vjp, vmap, ...), which saved-tensor hooks cannot see "
        "through. Regions run un-checkpointed there: results are right, memory is as without checkpointing. To save memory, "
        "take gradients by torch.autograd.grad or backward() instead of the transform.",
        stacklevel=stacklevel,
    )


def unwrapped(function: Any) -> Any:
    while type(function) is functools.partial:
        function = function.func
    return function


def name_of_function(function: Any) -> str:
    # A module's __getattr__ would look through its parameters and submodules, and fail slowly.
    name: str | None = None if isinstance(function, Module) else getattr(function, "__qualname__", None)
    return name or type(function).__qualname__


def module_of(function: Callable[..., Any]) -> Module | None:
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, Module) else None
