"""A region's function: checks that a call runs the function and that it takes the keywords; finds name and module."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

from torch.nn import Module, ModuleList, Sequential
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._torch.functions import OPERATOR_PACKET, OPERATORS
from ckpt_hooks.policies.base import Policy

__all__ = ["UNRUN", "check_runs", "check_swallowed", "is_policy", "module_of", "name_of_function", "refuse_unrun"]

#: Types of the results of calls which have not run the function.
UNRUN = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})

_KINDS = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def check_runs(function: Any) -> None:
    """Checks that a callable runs when called, as far as can be seen without a call.

    Args:
        function: A function, method, partial, module, or other callable.

    Raises:
        TypeError: If the callable is a generator function or a coroutine function, or calls one.
    """
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
    """Raises the error for a callable whose call returned a generator or a coroutine.

    Raises:
        TypeError: In any case.
    """
    if isinstance(result, CoroutineType):
        result.close()  # or Python warns that it was never awaited
    raise _unrun_error(function)


def _unrun_error(function: Any) -> TypeError:
    return TypeError(
        f"{function!r} does not run when it is called, so its calls cannot be regions. Write `with checkpoint_region():` "
        "around lines of it."
    )


def check_swallowed(function: Callable[..., Any], names: frozenset[str], kwargs: dict[str, Any]) -> None:
    """Checks keyword arguments of a direct call against the names of options of the curried form.

    Raises:
        TypeError: If the function takes no such argument, or the value is a policy: then the option is meant.
    """
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
    """Whether a value is a policy for the option ``policy``, and hardly anything else."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return bool(value) and all(isinstance(op, (*OPERATORS, OPERATOR_PACKET)) for op in value)
    if isinstance(value, Policy):
        return True
    if isinstance(value, Module) or not callable(value):
        return False
    try:
        if list(inspect.signature(value).parameters)[:2] == ["ctx", "op"]:  # as torch's documentation writes policies
            return True
    except (TypeError, ValueError):
        return False
    # An annotation is text where the user's module postpones its evaluation.
    returned = getattr(value, "__annotations__", {}).get("return")
    return returned is CheckpointPolicy or str(returned).strip("'\"").rpartition(".")[2] == "CheckpointPolicy"


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a keyword argument, as far as known."""
    try:
        parameters = inspect.signature(function.forward if isinstance(function, Module) else function).parameters
    except (TypeError, ValueError):  # Python's own functions and operators have no signature
        return True
    kinds = {parameter.kind for parameter in parameters.values()}
    own = parameters.get(name)
    return inspect.Parameter.VAR_KEYWORD in kinds or (own is not None and own.kind is not inspect.Parameter.POSITIONAL_ONLY)


# Functions that run some of a sequence of modules are named so by checkpoint_sequential of torch, 2.11 to 2.15, and by
# checkpoint_seq of timm. They close over the sequence, the first place and the last.
_RUNS_STEPS = "run_function.<locals>.forward"


def name_of_function(function: Callable[..., Any]) -> str:
    """Returns the name of a region which was given none."""
    name = _own_name(function)
    if name.endswith(_RUNS_STEPS) and (steps := _steps_of(function)):
        names = [(one, len(list(alike))) for one, alike in itertools.groupby(map(_own_name, steps))]
        name = ", ".join(one if count == 1 else f"{one} x{count}" for one, count in names)
    return name


def _own_name(function: Any) -> str:
    # A module's __getattr__ would look through its parameters and submodules, and fail slowly.
    name: str | None = None if isinstance(function, Module) else getattr(function, "__qualname__", None)
    return name or type(function).__qualname__


def module_of(function: Callable[..., Any]) -> Module | None:
    """Returns the module that a function runs: itself, or that of a bound method, or the first of some modules in a row."""
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, Module):
        owner = next(iter(_steps_of(function)), None)
    return owner if isinstance(owner, Module) else None


def _steps_of(function: Any) -> list[Any]:
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars != ("end", "functions", "start"):
        return []
    try:
        end, functions, start = (cell.cell_contents for cell in function.__closure__)
    except ValueError:  # not all are bound
        return []
    is_like_theirs = isinstance(functions, list | tuple | Sequential | ModuleList) and type(start) is type(end) is int
    return list(functions)[start : end + 1] if is_like_theirs else []
