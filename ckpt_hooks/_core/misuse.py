"""The errors for wrong calls: a table of their words, checks that several callers share, and what these ask of functions."""

from __future__ import annotations

import enum
import functools
import inspect
import numbers
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn, SupportsIndex

import torch
from torch.nn import Module
from typing_extensions import Self

from ckpt_hooks._torch.modes import is_refused_by_transform
from ckpt_hooks.errors import CheckpointError

from .descriptions import RegionPath, describe_tensor, format_path, text_of


class Misuse(enum.Enum):
    """Words for each wrong call: what came, and what to write."""

    NO_FUNCTION = "{form} takes a function first, but got {given}. Write `{right}`, and not `{form}(block(x))`."
    NO_ARGUMENTS = (
        "checkpoint got no arguments for the function {name!r}, which takes {parameters}. Write `checkpoint({name}, *args)`, "
        "or `@checkpoint()` as a decorator, with parentheses."
    )
    MORE_ARGUMENTS = (
        "{form} takes only a function, but got {count} more, the first {given}. Pass the function's arguments in another call: "
        "`{form}({name})(*args)`."
    )
    UNKNOWN = "Unexpected keyword arguments: {names}. {form} takes {known}. {advice}"
    SLIP = (
        "{form} got {name}={given}, {reason}. If you mean the option {near}, write `{right}`; the options are {known}. To pass "
        "{name} to the function, bind it with functools.partial first."
    )
    SIGNATURE = "{name} is called with ({parameters}), but {given} takes {own}. Write `def {name}({parameters}):`."
    PARENTHESES = "{name} is a class: write `with {name}():`, with parentheses."
    NO_BLOCK = "{name} makes regions of calls, not of blocks. Write `with checkpoint_region():`, or `{name}(function)(*args)`."
    CALLED = "{name} is a policy, which regions call. Pass it as it is, without parentheses: `policy={name}`."
    PICKLED = (
        "{name} refers to live objects of this process, so it cannot be pickled. Leave it out of the pickle, or save its "
        "`to_json()` if it has that method. A checkpointed model can be pickled: after loading, `remove_checkpointing(model)` "
        "undoes its regions."
    )
    UNDONE = "{name} was undone before this `with` block, so it has no effect in the block. Write {call} to make a new one."
    #: Any argument of the wrong kind, or with a wrong value.
    WRONG = "{name} should be {wanted}, but got {given}. {advice}"
    REENTRANT = "use_reentrant=True, but this engine is non-reentrant. Leave the flag out, or pass use_reentrant=False."
    STEPS = (
        "functions should be a sequence of callables, but got {given}. For a single function, write `checkpoint(function, x)`. "
        "For a dict, pass its values: `[*functions.values()]`."
    )
    NOT_OPEN = (
        "__exit__ was called for region {region!r}, which is not open on this thread: it was exited before, or never entered. "
        "Write `with checkpoint_region():`, or call __exit__ once for each __enter__."
    )
    OTHER_THREAD = (
        "region {region!r} was entered on another thread, and can be exited only there: it stays open until that thread enters "
        "or exits a region. Run a generator that contains a region on one thread, or exit the region before the yield."
    )
    LEFT_OPEN = (
        "region {region!r}: its function has returned without exiting {inner}, which it had entered. Exit that region "
        "in the function: if a generator entered it, run the generator to its end, or close it."
    )
    SPAN_OPEN = (
        "region {region!r}: the module around the span has returned without calling the span's last layer after the first. "
        "Perhaps an exception was caught in between. End the span at a layer that runs in each call."
    )
    SPAN_REVERSED = (
        "region {region!r}: the last layer of the span has run before the first, and not after it. Swap the two names: pass "
        "them in the order in which the layers run."
    )
    SPAN_END = (
        "region {region!r}: {name} is not the same at both ends: before the first layer {before}, after the last {now}. Put "
        "both ends of the span inside the same block, or both outside of it."
    )
    NO_CHUNKS = "{name} is an option of chunks, but the number of chunks is missing. Write chunks=8, or leave {name} out."
    NO_NAME = (
        "chunked has {given}, but {name!r} got no argument of this name. Pass the argument by its name, as in `labels=labels`, "
        "or leave the name out of chunked."
    )
    RESULT = (
        "The function should return tensors for each slice, in the same places of a tuple or dict for all slices, but returned "
        "{given}. Return tensors, or None in all slices."
    )
    RESULT_ROWS = (
        "For a slice of {rows} rows in dimension {dim} the function should return {rows} rows, but returned {given}. Pass as "
        "dim a dimension in which each row has its own result; for a loss, pass reduce='sum' or 'mean'."
    )
    RESULT_SHAPES = (
        "The results of slices are added up, so each should have the shape {shape}, but got {given}. Sum over the rows in the "
        "function."
    )
    NO_PAIR = (
        "With xs a step of checkpoint_loop should return (state, y), but step {step} returned {given}. Return (state, None) if "
        "there is no y."
    )
    OTHER_OUTPUT = (
        "checkpoint_loop stacks its outputs, so they should be alike in all steps, but step {step} returned {given}, and the "
        "first step {first}. Return the same structure and shapes in each step, or put the parts that differ into the state."
    )
    TWO_SIZES = "chunks and chunk_size both say how large slices are. Pass only one."
    NO_COUNT = (
        "With reduce='mean' the function should return (sum, count) of its slice, but returned {given}. Return the number of "
        "counted rows with the sum."
    )
    DEPENDENT_ROWS = (
        "{name!r} returns other values for {rows} rows of dimension {dim} than for the same rows in a slice twice as long: the "
        "rows depend on each other, or on their place. Call it without chunks, or pass another dim, whose rows are independent."
    )

    def error(self, value: Any = None, kind: type[Exception] = TypeError, **words: Any) -> Exception:
        return kind(self.value.format(given=described_as(value), **words))

    def error_of(self, path: RegionPath, **words: Any) -> CheckpointError:
        region = format_path(path)
        return CheckpointError(self.value.format(region="/".join(region), **words), region=region)


def wrong(value: Any, name: str, wanted: str, advice: str, kind: type[Exception] = TypeError) -> Exception:
    return Misuse.WRONG.error(value, kind, name=name, wanted=wanted, advice=advice)


def name_of_callable(value: Any) -> str:
    """Returns an identifier for a function, to write in examples."""
    name = type(value).__name__ if isinstance(value, Module) else getattr(value, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else "function"


def name_of_function(function: Any) -> str:
    """Returns the name of a function's region."""
    # A module's __getattr__ would look through its parameters and submodules, and fail slowly.
    name: str | None = None if isinstance(function, Module) else getattr(function, "__qualname__", None)
    return name or type(function).__qualname__


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
    return f"{text_of(value)} of type {type(value).__name__}"


def explain_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Sequence[str]) -> Exception | None:
    """Returns the error for a direct call of ``checkpoint`` which failed; None if the call was right."""
    if not callable(function):
        return Misuse.NO_FUNCTION.error(function, form="checkpoint", right="checkpoint(block, x)")
    if not args and not kwargs and not accepts(function, (), {}):
        return Misuse.NO_ARGUMENTS.error(name=name_of_callable(function), parameters=signature_of(function))
    for name, value in kwargs.items():
        if not accepts(function, (), {name: value}, partly=True) and (near := _nearest(name, options)):
            return slip(value, name, "which its function does not take", near, options)
    return None


def slip(value: Any, name: str, reason: str, near: str, options: Sequence[str], form: str = "checkpoint") -> Exception:
    """Returns the error for a keyword argument that resembles an option: options go into a call before the function's."""
    first = f"checkpoint({near}=...)(function)"
    right = f"{first}(*args)" if form == "checkpoint" else f"{form}({first}, x)"
    return Misuse.SLIP.error(value, form=form, name=name, reason=reason, near=near, right=right, known=", ".join(options))


def is_swallowed(function: Any, name: str) -> bool:
    """Whether a function, or a module's forward, takes a keyword argument only by its ``**kwargs``."""
    code = getattr(function.forward if isinstance(function, Module) else function, "__code__", None)
    if code is not None and name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False  # a shortcut: the signature below gives the same answer 30 times slower
    try:
        parameters = signature_of(function).parameters
    except (TypeError, ValueError):
        return False
    return name not in parameters and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def unwrapped(function: Any) -> Any:
    while type(function) is functools.partial:
        function = function.func
    return function


def module_of(function: Callable[..., Any]) -> Module | None:
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, Module) else None


def signature_of(function: Any) -> inspect.Signature:
    return inspect.signature(function.forward if isinstance(function, Module) else function)


def accepts(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, partly: bool = False) -> bool:
    """Whether a function or a module's forward takes these arguments (``partly``: these and more); True where unknown."""
    try:
        signature = signature_of(function)
    except (AttributeError, TypeError, ValueError):  # some builtins, operators and local functions in Dynamo have no signature
        return True
    try:
        (signature.bind_partial if partly else signature.bind)(*args, **kwargs)
    except TypeError:
        return False
    return True


def check_signature(function: Any, name: str, parameters: str, args: Any = None, kwargs: Any = None) -> None:
    """Raises if a user's function does not take the parameters, named in a string, or the arguments of a failed call."""
    values = [word for word in parameters.split(", ") if word and not word.startswith("**")] if args is None else args
    if not accepts(function, values, kwargs or {}):
        raise Misuse.SIGNATURE.error(function, name=name, own=signature_of(function), parameters=parameters)


def check_callable(function: Any, name: str, parameters: str, wanted: str, advice: str) -> None:
    if not callable(function) or isinstance(function, type):
        raise wrong(function, name, wanted, advice)
    check_signature(function, name, parameters)


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


def check_is(value: Any, kinds: Any, name: str, wanted: str, advice: str) -> None:
    if not isinstance(value, kinds):
        raise wrong(value, name, wanted, advice)


def check_module(module: Any, name: str, advice: str) -> None:
    check_is(module, Module, name, "a torch.nn.Module", advice)


class NeedsParentheses(type):
    """The type of classes that are used like functions: makes ``with checkpoint_region:`` a clear error."""

    def __enter__(cls) -> NoReturn:
        raise Misuse.PARENTHESES.error(name=cls.__name__)

    def __exit__(cls, *exc_info: object) -> None:
        """Python looks for ``__exit__`` before it enters the block."""


class OfThisProcess:
    """A handle: a copy is the handle itself, and pickling raises."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Misuse.PICKLED.error(name=type(self).__name__)


def unknown_error(names: Iterable[Any], known: Collection[str], form: str, advice: str = "Pass no others.") -> Exception:
    """Returns the error for unknown keywords of a form, with the known names and the nearest name to each keyword."""
    names = [*map(str, names)]
    near = [f"{option} for {name}" for name in names if (option := _nearest(name, known))]
    advice = f"Write {', '.join(near)}." if near else advice
    return Misuse.UNKNOWN.error(kind=ValueError, names=", ".join(names), form=form, known=", ".join(known), advice=advice)


def _nearest(name: str, known: Collection[str]) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(name, known, 1)), None)


def check_curried(function: Any, others: Sequence[Any], named: Mapping[str, Any], form: str) -> None:
    """Checks a call of a curried form, as in ``"checkpoint(...)"``, which takes only a function."""
    if not callable(function) and not hasattr(type(function), "__get__"):  # a class method is not callable, but has ``__get__``
        raise Misuse.NO_FUNCTION.error(function, form=form, right=f"{form}(block)(x)")
    if more := [*others, *named.values()]:
        raise Misuse.MORE_ARGUMENTS.error(more[0], form=form, count=len(more), name=name_of_callable(function))


def checked_flag(value: Any, name: str, *, or_none: bool = False, advice: str | None = None) -> bool:
    """Returns True, False, 0 or 1 as a boolean; with ``or_none`` the error for another value names None too."""
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    # By name: NumPy may be absent, and is not imported for this.
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    advice = advice or f"Pass {name}=False to switch it off."
    raise wrong(value, name, f"True or False{' or None' if or_none else ''}", advice)


def integer_in(value: Any) -> int | None:
    """Returns an integer of any type, NumPy's too, as an int; None for a bool and for other values."""
    is_integer = hasattr(value, "__index__") and not isinstance(value, (bool, torch.Tensor, type))
    return operator.index(value) if is_integer else None


def checked_integer(value: Any, name: str, advice: str = "", least: int = 1) -> int:
    if (number := integer_in(value)) is None or number < least:
        wanted = "a positive integer" if least == 1 else f"an integer from {least}"
        raise wrong(value, name, wanted, advice or f"Pass {least} or more.", ValueError)
    return number


#: Sizes in words, read as GNU's tools read them: 2M is 2MiB, and not 2MB.
_SIZE = re.compile(r"\s*(\d{1,19})(?:\.(\d{1,19}))?\s*(?:([kmgt])(i?b?)|b)\s*", re.IGNORECASE | re.ASCII)


def checked_bytes(value: Any, name: str, or_part: str = "") -> int:
    """Returns a number of bytes, given as any integer type, or in words, as in ``"2MiB"``."""
    number = integer_in(value)
    if isinstance(value, str) and (words := _SIZE.fullmatch(value)):
        whole, part, prefix, suffix = words.groups("")
        power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
        number = int(whole + part) * (1000 if suffix in ("b", "B") else 1024) ** power // 10 ** len(part)
    if number is None or not 0 <= number < 2**63:
        kind = ValueError if isinstance(value, (int, float, str)) and not isinstance(value, bool) else TypeError
        raise wrong(value, name, f"a number of bytes{or_part}", "Write an integer, or '20GiB', '500MB' or '2M'.", kind)
    return number


def checked_part(value: Any, name: str, advice: str, *, is_below: bool = False) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1 or (is_below and value == 1):
        raise wrong(value, name, f"a fraction from 0.0 to {'below ' if is_below else ''}1.0", advice, ValueError)
    return float(value)


def flag_or_none(value: Any, name: str) -> bool | None:
    return None if value is None else checked_flag(value, name, or_none=True)


def reentrant_error(value: Any) -> Exception:
    if isinstance(value, int) and value == 1:
        return Misuse.REENTRANT.error(kind=ValueError)
    return wrong(value, "use_reentrant", "None or False", "Leave it out, or pass use_reentrant=False.")


@functools.cache  # warns once for each form of region: each passes another ``stacklevel``
def warn_of_transform(*, stacklevel: int) -> None:
    """Warns that a region, ``stacklevel`` calls up the stack, runs un-checkpointed under a ``torch.func`` transform."""
    warnings.warn(
        "checkpoint was called under a torch.func transform (grad, vjp, vmap, ...), which saved-tensor hooks cannot see "
        "through. Regions run un-checkpointed there: results are right, memory is as without checkpointing. To save memory, "
        "take gradients by torch.autograd.grad or backward() instead of the transform.",
        stacklevel=stacklevel,
    )


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error, once; Python 3.10 has no notes."""
    if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def explain_refusal(error: BaseException) -> None:
    """Adds advice to the error by which a ``torch.func`` transform refuses the saved-tensor hooks of a region."""
    if type(error) is RuntimeError and not hasattr(error, "is_explained") and is_refused_by_transform(error):
        error.is_explained = True  # type: ignore[attr-defined]
        error.args = (
            f"{error} A region works by such hooks. Inside it, use torch.autograd.grad(..., create_graph=True) in place of "
            "torch.func.grad and the like, or move the call out of the region. Forward-mode transforms and vmap may stay.",
        )
