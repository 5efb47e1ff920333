"""Checks, names and modules of a region's function, and facts about the code."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

from torch.nn import Module

from ckpt_hooks._torch.functions import OPERATOR_PACKET, OPERATORS
from ckpt_hooks.policies.base import Policy

from .places import is_atom

#: Types of the results of calls which have not run the function.
UNRUN = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})

_warned_of_transform = False
_KINDS = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def check_runs(function: Any) -> None:
    """Refuses generator functions and coroutine functions, and callables that call one, as far as seen without a call."""
    inner = unwrapped(function)
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


def unwrapped(function: Any) -> Any:
    """Returns the function in a ``functools.partial``, also in one of another."""
    while type(function) is functools.partial:
        function = function.func
    return function


def name_of_function(function: Any) -> str:
    """Returns the name of a region which was given none."""
    # A module's __getattr__ would look through its parameters and submodules, and fail slowly.
    name: str | None = None if isinstance(function, Module) else getattr(function, "__qualname__", None)
    return name or type(function).__qualname__


def module_of(function: Callable[..., Any]) -> Module | None:
    """Returns the module that a function runs: itself, or that of a bound method."""
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, Module) else None


# ------------------------------------------------------------------------------------------------------------- facts of code

_BUILTINS = frozenset(vars(builtins))
#: Types of most values of global names.
_CODE = frozenset({types.FunctionType, types.ModuleType, types.BuiltinFunctionType, type})
_NAMING = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_facts: dict[int, tuple[weakref.ref[types.CodeType], tuple[tuple[str, ...], bool]]] = {}


def facts_of_code(function: types.FunctionType) -> tuple[tuple[str, ...], bool]:
    """Returns the names of global variables, and whether a function is torch's or this package's own."""
    code = function.__code__
    key = id(code)
    known = _facts.get(key)
    if known is None:
        variables = function.__globals__
        # By its instructions: ``co_names`` lists the names of attributes too. A built-in's name counts where the file binds it.
        found = dict.fromkeys(str(step.argval) for step in _steps_in(code) if step.opname in _NAMING)
        names = tuple(name for name in found if name in variables or name not in _BUILTINS)
        facts = names, is_own(function)
        known = _facts[key] = weakref.ref(code, lambda _: _facts.pop(key, None)), facts
    return known[1]


def is_own(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] in ("torch", "ckpt_hooks")


def _steps_in(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _steps_in(constant)


def named_functions(function: types.FunctionType) -> list[types.FunctionType]:
    """Returns the functions of users that a function's code names."""
    variables = function.__globals__
    found = [variables.get(name) for name in facts_of_code(function)[0]]
    return [one for one in found if type(one) is types.FunctionType and not is_own(one)]


def has_state(function: Any) -> bool:
    """Whether a user's function, or another callable, closes over something, or names a global variable that is not code."""
    if type(function) is not types.FunctionType:
        return True
    names, is_library = facts_of_code(function)
    if is_library:
        return False
    variables = function.__globals__
    if function.__closure__ and not all(map(_is_class, function.__closure__)):
        return True
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    is_plain = not function.__dict__ and all(map(is_atom, defaults))
    return not is_plain or any(type(variables.get(name)) not in _CODE for name in names)


def _is_class(cell: types.CellType) -> bool:
    """Whether a cell is that of ``super()``."""
    try:
        return isinstance(cell.cell_contents, type)
    except ValueError:
        return False
