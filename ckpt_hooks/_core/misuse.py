"""Wrong calls of the public functions, and the right form of each.

A right call runs none of this: a direct call is looked at after a failure, a decoration once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from .descriptions import describe_tensor

__all__ = [
    "check_alone",
    "check_callable",
    "checked_flag",
    "described_as",
    "explain_call",
    "explain_refusal",
    "flag_or_none",
    "name_of_callable",
    "reentrant_error",
    "segments_error",
    "steps_error",
]


def name_of_callable(value: Any) -> str:
    """Returns the name of a function in messages; of a module, the name of its class."""
    if isinstance(value, Module):
        return type(value).__name__
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else "function"


def described_as(value: Any) -> str:
    """Describes a wrong argument: a tensor by shape and dtype, a module or function by name."""
    if isinstance(value, torch.Tensor):
        return f"a tensor, {describe_tensor(value)}"
    if isinstance(value, Module):
        return f"a module, {name_of_callable(value)}"
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{name_of_callable(value)!r}"
    if isinstance(value, (list, tuple)) and any(isinstance(entry, torch.Tensor) for entry in value):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r} of type {type(value).__name__}"


def explain_refusal(error: BaseException) -> None:
    """Has an error say what to do, if a transform of ``torch.func`` in a region refused saved-tensor hooks."""
    if type(error) is not RuntimeError or _REFUSAL in str(error):
        return
    traceback, is_of_transform = error.__traceback__, False
    while traceback is not None and traceback.tb_next is not None:
        is_of_transform = is_of_transform or traceback.tb_frame.f_globals.get("__name__", "").startswith("torch._functorch.")
        traceback = traceback.tb_next
    if traceback is not None and traceback.tb_frame.f_code is _REFUSES_HOOKS and is_of_transform:
        error.args = (f"{error} {_REFUSAL}",)


# Transforms call it; an error of theirs has no class of its own, and is known by this code. 2.11 to 2.15.
_REFUSES_HOOKS = inspect.unwrap(torch.autograd.graph.disable_saved_tensors_hooks).__code__
_REFUSAL = (
    "A region works by such hooks. Inside of it, use torch.autograd.grad(..., create_graph=True) in place of torch.func.grad "
    "and the like, or leave the call out of the region. Forward-mode transforms and vmap run inside."
)


def explain_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TypeError | None:
    """Returns the error for a direct call of ``checkpoint`` after a ``TypeError`` or an ``AttributeError``.

    None where the failure is the function's own affair.
    """
    if not callable(function):
        return TypeError(f"checkpoint takes a function and its arguments, but got {_not_callable(function, args)}")
    if args or kwargs or _can_be_called(function):
        return None
    name = name_of_callable(function)
    return TypeError(
        f"checkpoint got the function {name!r} and no arguments for it, and {name} takes {_parameters(function)}. A decorator "
        f"is written with parentheses: `@checkpoint()`. A direct call has the arguments in it: `checkpoint({name}, *args)`."
    )


def _not_callable(value: Any, args: Sequence[Any] = ()) -> str:
    """Describes an argument in place of a function, and the right form."""
    described = described_as(value)
    if any(map(callable, args)):
        return f"{described}, first. The function comes first: write `checkpoint(block, x)`."
    if isinstance(value, torch.Tensor):
        return (
            f"{described}, in place of the function. A block that was called already has kept its activations: write "
            "`checkpoint(block, x)`, and not `checkpoint(block(x))`."
        )
    return f"{described} in place of the function, which cannot be called. Write `checkpoint(function, *args)`."


def _can_be_called(function: Any) -> bool:
    """Whether a function can be called without arguments, as far as its signature tells."""
    try:
        inspect.signature(function.forward if isinstance(function, Module) else function).bind()
    except TypeError:
        return False
    except ValueError:  # no signature is known
        return True
    return True


def _parameters(function: Any) -> str:
    return str(inspect.signature(function.forward if isinstance(function, Module) else function))


def check_callable(function: Any, form: str) -> None:
    """Checks the argument of a curried form, as in ``"checkpoint(...)"``.

    Raises:
        TypeError: If the argument cannot be called.
    """
    if not callable(function) and not hasattr(type(function), "__get__"):  # as static methods have
        called = " A block that was called already has kept its activations." if isinstance(function, torch.Tensor) else ""
        raise TypeError(
            f"{form} takes a function, but got {described_as(function)}.{called} Write `{form}(block)(x)`, and not "
            f"`{form}(block(x))`."
        )


def check_alone(function: Any, others: Sequence[Any], named: Mapping[str, Any], form: str) -> None:
    """Checks a call of the curried form, as in ``"checkpoint(...)"``, for more arguments than the function.

    Raises:
        TypeError: If there are more, by position or by name.
    """
    if others or named:
        raise TypeError(
            f"{form} takes the function alone, but got {len(others) + len(named)} more, {_listed(others, named)}. They are "
            f"arguments of what it returns: write `{form}({name_of_callable(function)})(*args)`, with two pairs of parentheses."
        )


def _listed(others: Sequence[Any], named: Mapping[str, Any]) -> str:
    words = [*map(described_as, others), *(f"{name}={value!r}" for name, value in named.items())]
    return words[0] if len(words) == 1 else f"the first {words[0]}"


def checked_flag(value: Any, name: str, *, or_none: bool = False) -> bool:
    """Returns a yes-or-no option as a boolean; the message of an error says None too, if that is another choice.

    Raises:
        TypeError: If the value is neither a boolean, nor 0 or 1.
    """
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    # By name: NumPy may be absent, and is not imported for this.
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(
        f"{name} should be True or False{' or None' if or_none else ''}, but got {value!r} of type {type(value).__name__}. "
        f"Pass {name}=False where that means no."
    )


def flag_or_none(value: Any, name: str) -> bool | None:
    """Returns an option which may be None besides as a boolean, as :func:`checked_flag` does."""
    return None if value is None else checked_flag(value, name, or_none=True)


def reentrant_error(use_reentrant: Any) -> Exception:
    """Returns the error for a ``use_reentrant`` other than None or False."""
    if not (isinstance(use_reentrant, int) and use_reentrant == 1):
        return TypeError(
            f"use_reentrant should be None or False, but got {use_reentrant!r} of type {type(use_reentrant).__name__}. Leave "
            "the flag out, or pass use_reentrant=False."
        )
    return ValueError(
        "use_reentrant=True, but this engine is non-reentrant. It records the graph in forward and recomputes when backward "
        "asks for a saved tensor, so autograd.grad, keyword arguments, nested structures and inputs without gradients all "
        "work, and a recompute stops early. Leave the flag out, or pass use_reentrant=False."
    )


def segments_error(functions: Sequence[Callable[..., Any]], segments: Any, input: Any) -> Exception:
    """Returns the error for a wrong number of segments, given the arguments of these names."""
    if isinstance(input, int) and not isinstance(segments, (int, float, str, type(None))):
        return TypeError(
            f"checkpoint_sequential takes functions, segments and input in this order, but got {described_as(segments)} for "
            f"segments and {input!r} for input. Write `checkpoint_sequential(functions, {input}, x)`."
        )
    return ValueError(
        f"segments should be an integer between 1 and the number of functions ({len(functions)}), but got {segments!r}. Pass "
        "the square root of the number of functions for a start."
    )


def steps_error(functions: Any) -> TypeError:
    """Returns the error for an argument ``functions`` of ``checkpoint_sequential`` which is no sequence."""
    return TypeError(
        f"checkpoint_sequential takes a torch.nn.Sequential or a sequence of callables, but got {described_as(functions)}. For "
        "one function, write `checkpoint(function, x)`."
    )
