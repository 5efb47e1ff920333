"""Checks of a region's function and of its call; its name and module."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

from torch.nn import Module

from ckpt_hooks._torch.functions import OPERATOR_PACKET, OPERATORS
from ckpt_hooks.policies.base import Policy

#: Types of the results of calls which have not run the function.
UNRUN = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})

_warned_of_transform = False
_KINDS = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def check_runs(function: Any) -> None:
    """Refuses generator functions and coroutine functions, and callables that call one, as far as seen without a call."""
    inner = function
    while type(inner) is functools.partial:
        inner = inner.func
    if isinstance(inner, Module):
        inner = inner.forward
    elif not inspect.isroutine(inner) and not isinstance(inner, type):
        inner = getattr(type(inner), "__call__", inner)  # noqa: B004 -- what kind of function is it?
    if any(is_kind(inner) for is_kind in _KINDS):
        raise _unrun_error(function)


def refuse_unrun(function: Any, result: Any) -> NoReturn:
    """Raises the error for a callable whose call returned a generator or a coroutine."""
    if isinstance(result, CoroutineType):
        result.close()  # or Python warns that it was never awaited
    raise _unrun_error(function)


def _unrun_error(function: Any) -> TypeError:
    return TypeError(
        f"{function!r} does not run when it is called, so its calls cannot be regions. Write `with checkpoint_region():` "
        "around lines of it."
    )


def check_swallowed(function: Callable[..., Any], names: frozenset[str], kwargs: dict[str, Any]) -> None:
    """Refuses a keyword argument of a direct call that is meant as an option of the curried form."""
    for name in names & kwargs.keys():
        if is_policy(kwargs[name]):
            found = "which is a policy"
        elif not _takes(function, name):
            found = "which the function does not take"
        else:
            continue
        raise TypeError(
            f"checkpoint got {name}={kwargs[name]!r}, {found}. {name} is an option of checkpoint in the curried form only: "
            f"in a direct call keyword arguments go to the function: write checkpoint({name}=...)(function)(*args). To hand it "
            f"to the function all the same, bind it before: checkpoint(functools.partial(function, {name}=...), *args)."
        )


def is_policy(value: Any) -> bool:
    """Whether a value is one of the package's policies, or a list of operators. A function may be anything else as well."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return bool(value) and all(isinstance(op, (*OPERATORS, OPERATOR_PACKET)) for op in value)
    return isinstance(value, Policy)


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function.forward if isinstance(function, Module) else function).parameters
    except (TypeError, ValueError):  # Python's own functions and operators have no signature
        return True
    kinds = {parameter.kind for parameter in parameters.values()}
    own = parameters.get(name)
    return inspect.Parameter.VAR_KEYWORD in kinds or (own is not None and own.kind is not inspect.Parameter.POSITIONAL_ONLY)


def warn_of_transform(*, stacklevel: int) -> None:
    """Warns, once, of a region which runs plainly under a transform of functions, ``stacklevel`` calls below the region."""
    global _warned_of_transform
    if not _warned_of_transform:
        _warned_of_transform = True
        warnings.warn(
            "checkpoint was called under a torch.func transform (grad, vjp, vmap, ...), which saved-tensor hooks cannot see "
            "through. Regions run un-checkpointed there: results are right, memory is as without checkpointing.",
            stacklevel=stacklevel,
        )


def name_of_function(function: Any) -> str:
    """Returns the name of a region which was given none."""
    # A module's __getattr__ would look through its parameters and submodules, and fail slowly.
    name: str | None = None if isinstance(function, Module) else getattr(function, "__qualname__", None)
    return name or type(function).__qualname__


def module_of(function: Callable[..., Any]) -> Module | None:
    """Returns the module that a function runs: itself, or that of a bound method."""
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, Module) else None
