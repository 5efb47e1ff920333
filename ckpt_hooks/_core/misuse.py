"""The errors for wrong calls of the public functions: a table of their words, and checks that several callers share."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from ckpt_hooks._torch.modes import is_refused_by_transform
from ckpt_hooks.errors import CheckpointError

from .descriptions import RegionPath, describe_tensor, format_path


class Misuse(enum.Enum):
    """Words for each wrong call: what came, and what to write."""

    NO_FUNCTION = "{form} takes a function first, but got {given}. Write `{right}`, and not `{form}(block(x))`."
    NO_ARGUMENTS = (
        "checkpoint got no arguments for the function {name!r}, which takes {parameters}. Write `checkpoint({name}, *args)`, "
        "or `@checkpoint()` as a decorator, with parentheses."
    )
    MORE_ARGUMENTS = "{form} takes the function alone, but got {count} more, the first {given}. Write `{form}({name})(*args)`."
    FLAG = "{name} should be True or False{or_none}, but got {given}. Pass {name}=False where that means no."
    REENTRANT_FLAG = "use_reentrant should be None or False, but got {given}. Leave it out, or pass use_reentrant=False."
    REENTRANT = "use_reentrant=True, but this engine is non-reentrant. Leave the flag out, or pass use_reentrant=False."
    STEPS = "checkpoint_sequential takes a sequence of callables, but got {given}. For one, write `checkpoint(function, x)`."
    SEGMENTS = "segments should be an integer from 1 to the number of functions ({count}), but got {given}. Pass one of these."
    COUNT = "{name} should be an integer from {least}, but got {given}. Pass one."
    OTHER_STATE = (
        "step {number} of checkpoint_loop returned {found}, but got {expected}. Return a state of the same structure: the next "
        "step gets it."
    )
    NOT_OPEN = (
        "region {region!r} is left, but is not open on this thread: it was left before, or never entered. Write "
        "`with checkpoint_region():`, or call __exit__ once for each __enter__."
    )
    OTHER_THREAD = (
        "region {region!r} was entered on another thread, and can be left there alone: it stays open there until that thread "
        "enters or leaves a region. Run a generator with a region in it on one thread, or end the region before it yields."
    )
    LEFT_OPEN = (
        "region {region!r}: its function has returned, and left open {inner} that it had entered. Leave that region "
        "in the function: run a generator with a region in it to its end, or close it."
    )
    SEQUENTIAL_ORDER = "checkpoint_sequential got {given} for segments. Write `checkpoint_sequential(functions, {input}, x)`."
    CHUNKS = "chunks should be a positive integer, but got {given}. Pass the number of slices, 8 say."
    NO_CHUNKS = "{name} is an option of chunks, whose number is missing. Write chunks={given}, or leave {name} out."
    NO_DIM = "dim should be a dimension of the tensor to cut ({tensor}), but got {given}. Pass that of the rows, 1 or -2 say."
    REDUCE = "reduce should be None, 'sum' or 'mean', but got {given}. Leave it out where each row has a result of its own."
    CHUNKED = "chunked should be names of arguments, but got {given}. Write chunked='labels', or chunked=['labels', 'mask']."
    NO_NAME = "chunked has {given}, but {name!r} gets no argument of this name. Pass it by name: `{name}(x, labels=labels)`."
    NO_TENSOR = "The argument to cut should be a tensor, but got {given}. Pass it first, and others to cut by chunked."
    OTHER_ROWS = (
        "{name} should be a tensor with {rows} rows in dimension {dim}, as the first argument, but got {given}. Leave it out "
        "of chunked if all slices need the whole."
    )
    RESULT = (
        "For each slice the function should return a tensor, or a tuple of as many tensors as for others, but returned "
        "{given}. Return tensors alone."
    )
    RESULT_ROWS = (
        "For a slice of {rows} rows in dimension {dim} the function should return as many, but returned {given}. Pass the "
        "dimension whose rows have results of their own as dim, or for a loss reduce='sum' or 'mean'."
    )
    RESULT_SHAPES = "Results to add up should have one shape, {shape}, but got {given}. Add up over the rows in the function."
    NO_COUNT = "With reduce='mean' the function should return (sum, count) of its slice, but returned {given}. Add a count."
    DEPENDENT_ROWS = (
        "{name!r} returns something else for {rows} rows of dimension {dim} than for the same in a slice of twice as many: "
        "they depend on each other, or on their place. Call it as a whole, or pass another dim, whose rows are independent."
    )

    def error(self, given: Any = None, **words: Any) -> Exception:
        """Returns the error for a wrong argument."""
        kind = ValueError if self.name in _WRONG_VALUES else TypeError
        return kind(self.value.format(given=described_as(given), **words))

    def error_of(self, path: RegionPath, **words: Any) -> CheckpointError:
        """Returns the error for a region that is left wrongly."""
        region = format_path(path)
        return CheckpointError(self.value.format(region="/".join(region), **words), region=region)


_WRONG_VALUES = {"REENTRANT", "SEGMENTS", "COUNT", "CHUNKS", "NO_CHUNKS", "NO_DIM", "REDUCE", "NO_NAME"}
_WRONG_VALUES |= {"OTHER_ROWS", "RESULT_ROWS", "RESULT_SHAPES", "DEPENDENT_ROWS"}


def name_of_callable(value: Any) -> str:
    """Returns the name of a function in messages; of a module, the name of its class."""
    name = type(value).__name__ if isinstance(value, Module) else getattr(value, "__name__", None)
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


def explain_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """Returns the error for a direct call of ``checkpoint`` which failed; None where that is the function's own affair."""
    if not callable(function):
        return Misuse.NO_FUNCTION.error(function, form="checkpoint", right="checkpoint(block, x)")
    called = function.forward if isinstance(function, Module) else function
    try:
        if not args and not kwargs:
            inspect.signature(called).bind()
    except TypeError:
        return Misuse.NO_ARGUMENTS.error(name=name_of_callable(function), parameters=inspect.signature(called))
    except ValueError:  # no signature is known
        pass
    return None


def check_curried(function: Any, others: Sequence[Any], named: Mapping[str, Any], form: str) -> None:
    """Checks a call of a curried form, as in ``"checkpoint(...)"``, which takes a function alone."""
    if not callable(function) and not hasattr(type(function), "__get__"):  # as static methods have
        raise Misuse.NO_FUNCTION.error(function, form=form, right=f"{form}(block)(x)")
    if more := [*others, *named.values()]:
        raise Misuse.MORE_ARGUMENTS.error(more[0], form=form, count=len(more), name=name_of_callable(function))


def checked_flag(value: Any, name: str, *, or_none: bool = False) -> bool:
    """Returns a yes-or-no option as a boolean, given a boolean, 0 or 1; an error says None too, if that is another choice."""
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    # By name: NumPy may be absent, and is not imported for this.
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise Misuse.FLAG.error(value, name=name, or_none=" or None" if or_none else "")


def checked_count(value: Any, name: str, least: int = 0) -> int:
    """Returns a number of things, or raises."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Misuse.COUNT.error(value, name=name, least=least)
    return value


def flag_or_none(value: Any, name: str) -> bool | None:
    """Returns an option which may be None besides as a boolean, as :func:`checked_flag` does."""
    return None if value is None else checked_flag(value, name, or_none=True)


def reentrant_error(value: Any) -> Exception:
    """Returns the error for a ``use_reentrant`` other than None or False."""
    is_true = isinstance(value, int) and value == 1
    return (Misuse.REENTRANT if is_true else Misuse.REENTRANT_FLAG).error(value)


def explain_refusal(error: BaseException) -> None:
    """Has an error say what to do, if a transform of ``torch.func`` in a region refused saved-tensor hooks."""
    if type(error) is RuntimeError and not hasattr(error, "is_explained") and is_refused_by_transform(error):
        error.is_explained = True  # type: ignore[attr-defined]
        error.args = (
            f"{error} A region works by such hooks. Inside of it, use torch.autograd.grad(..., create_graph=True) in place of "
            "torch.func.grad and the like, or leave the call out of the region. Forward-mode transforms and vmap run inside.",
        )
