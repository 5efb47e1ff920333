"""What a region takes: its function, its options, and its contexts.

Options are rows of one table, read by every form of a region. An option for another form has the form in its row, and stands
in the signature of the form, which users read.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.utils.checkpoint
from torch.nn import Module

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.descriptions import format_path, text_of
from ckpt_hooks._core.frame import Frame, stack
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.misuse import (
    check_callable,
    check_is,
    check_signature,
    checked_flag,
    described_as,
    flag_or_none,
    is_swallowed,
    slip,
    wrong,
)
from ckpt_hooks._core.modes import QuietDispatchMode, reusable
from ckpt_hooks._torch.autograd import top_saved_tensors_hooks
from ckpt_hooks._torch.functions import OPERATOR_PACKET, OPERATORS
from ckpt_hooks._torch.modes import active_fake_mode

if TYPE_CHECKING:
    from ckpt_hooks.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Check:
    # Shape, dtype, device and version, or the version alone, which is compared in any case: a saved value modified afterwards
    # is wrong, and plain autograd raises as well.
    facts: Callable[[Any], Any]
    fingerprint: Callable[[torch.Tensor], Any] | None = None  # None: no values
    is_sampled: bool = False  # whether the self-check compares values in some passes


METADATA = operator.attrgetter("shape", "dtype", "device", "_version")

NOTHING = Check(operator.attrgetter("_version"))

_CHECKS = {"default": Check(METADATA, is_sampled=True), "metadata": Check(METADATA), "none": NOTHING}


def check_of(determinism_check: Any) -> Check:
    if isinstance(determinism_check, str):
        if determinism_check in _CHECKS:
            return _CHECKS[determinism_check]
        if determinism_check == "values":
            from ckpt_hooks._tensors.determinism import hash_of

            return Check(METADATA, hash_of)
    elif callable(determinism_check):
        check_signature(determinism_check, "determinism_check", "tensor")
        return Check(METADATA, determinism_check)
    wanted = "one of 'default', 'metadata', 'none', 'values', or a function of a tensor"
    raise wrong(
        determinism_check,
        "determinism_check",
        wanted,
        "Leave it out for 'default', which compares values in some passes.",
        ValueError,
    )


def version_of(facts: Any) -> int:
    version: int = facts[-1] if isinstance(facts, tuple) else facts
    return version


class Form(enum.Flag):
    DIRECT = enum.auto()  # checkpoint(function, *args), and torch's calls of the kind under patch_torch
    CURRIED = enum.auto()  # checkpoint(...), by whatever makes functions and modules regions
    RECORDED = enum.auto()  # checkpoint_region(...), likewise


_CALLS = Form.DIRECT | Form.CURRIED
_NOT_DIRECT = Form.CURRIED | Form.RECORDED  # in a direct call such a keyword is the function's, as in torch
_EVERY = _CALLS | Form.RECORDED


def _offload_from(is_on: Any, name: str) -> int | None:
    if not checked_flag(is_on, name):
        return None
    from ckpt_hooks._tensors import transfers

    return transfers.DEFAULT_MIN_OFFLOAD_SIZE


def _policy(value: Any, name: str) -> Any:
    """Returns the policy; where Dynamo traces, the key of one that it could not follow."""
    from ckpt_hooks.policies.base import Policy, key_for, policy_from

    return key_for(value) if torch.compiler.is_dynamo_compiling() and not isinstance(value, Policy) else policy_from(value)


class Option(NamedTuple):
    forms: Form
    default: Any = None  # as users write it
    # Returns the value for frames, or raises, given a value and the option's name; None where no frame knows the option.
    check: Any = None
    field: str = ""  # the name in frames, if another


#: The table. Forms pass values on in this order, and errors list names in it.
OPTIONS = {
    "context_fn": Option(_CALLS),
    "determinism_check": Option(_CALLS, "default", lambda value, _: check_of(value), "check"),
    "debug": Option(_CALLS, False, checked_flag),
    "early_stop": Option(_CALLS, True, checked_flag),
    "preserve_rng_state": Option(_EVERY, True, checked_flag),
    "respect_saved_tensors_hooks": Option(_EVERY, None, lambda *args: flag_or_none(*args) is not False, "respect_hooks"),
    "use_reentrant": Option(_CALLS),
    "name": Option(_NOT_DIRECT, None, lambda value, _: checked_name(value)),
    "policy": Option(_NOT_DIRECT, None, _policy),
    "preserve_buffers": Option(Form.CURRIED, True, checked_flag),
    "offload_inputs": Option(_NOT_DIRECT, False, _offload_from, "offload_from"),
    "split_backward": Option(_NOT_DIRECT, False, checked_flag),
    "replay_whole": Option(Form.RECORDED, None, flag_or_none),
}


def options_of(form: Form) -> list[str]:
    return [name for name, option in OPTIONS.items() if form in option.forms]


def checked_name(name: Any) -> str | None:
    check_is(name, (str, type(None)), "name", "a string", "Pass the name that errors have for it: name='block'.")
    return name  # type: ignore[no-any-return]


def defaults_of(form: Form) -> dict[str, Any]:
    """Returns the defaults of the options of a form which it passes on to frames."""
    return {name: OPTIONS[name].default for name in options_of(form) if OPTIONS[name].check is not None}


@dataclasses.dataclass(frozen=True)
class RegionOptions:
    """The options of one region, of either kind, as frames take them."""

    check: Check = _CHECKS["default"]
    debug: bool = False
    early_stop: bool = True
    preserve_rng_state: bool = True
    respect_hooks: bool = True
    name: str | None = None  # None for the function's own
    policy: Policy | None = None  # a region under a policy is a recorded one
    preserve_buffers: bool = True
    offload_from: int | None = None  # bytes from which inputs go to the host; None for none
    split_backward: bool = False
    replay_whole: bool | None = None  # None to go by the bytes that a recorded region saved


DEFAULT_OPTIONS = RegionOptions()


def options_from(options: RegionOptions = DEFAULT_OPTIONS, /, **given: Any) -> RegionOptions:
    """Returns ``options`` with other values, by their names for users; raises for a wrong value."""
    values = {}
    for name, value in given.items():
        option = OPTIONS[name]
        if value is not option.default:  # a comprehension with ``:=`` is more than Dynamo traces
            values[option.field or name] = option.check(value, name)
    # Not a new object: Dynamo knows where a check stands that options have, and none that is the default of a class.
    return dataclasses.replace(options, **values) if values else options


# ----------------------------------------------------------------------------------------------------------------- contexts

#: The context of a forward, and the context of each of its recomputes.
ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def noop_context_fn() -> ContextPair:
    """Returns two context managers without effect: the default ``context_fn`` of :func:`ckpt_hooks.checkpoint`."""
    return nullcontext(), nullcontext()


def call_context_fn(context_fn: Callable[[], ContextPair]) -> ContextPair:
    try:
        contexts = context_fn()
    except TypeError:
        check_context_fn(context_fn)
        raise
    if not (isinstance(contexts, (tuple, list)) and len(contexts) == 2):
        raise TypeError(
            "context_fn should return two context managers, one for forward and one for recomputes, but returned "
            f"{described_as(contexts)}. Return contextlib.nullcontext() where there is nothing to enter."
        )
    return contexts[0], contexts[1]


def check_context_fn(context_fn: Any) -> None:
    advice = "Leave it out, or pass noop_context_fn, where there is nothing to enter."
    if isinstance(context_fn, tuple):  # of what was called
        advice = "Pass the function, not what it returns: noop_context_fn, say, or a policy as `policy=...`."
    check_callable(context_fn, "context_fn", "", "a function that returns two context managers", advice)


def both(outer: ContextPair, inner: ContextPair) -> ContextPair:
    return _Both(outer[0], inner[0]), _Both(outer[1], inner[1])


def under_modes(contexts: ContextPair | None) -> ContextPair:
    """Returns the contexts of a region inside dispatch modes: operators take other paths there, so a rerun needs a mode."""
    under_mode = nullcontext(), QuietDispatchMode()
    contexts = under_mode if contexts is None else both(under_mode, contexts)
    # The user's modes are not entered again, for they may count. A fake mode is: it counts nothing, and without it a tensor
    # made from nothing would be a real tensor.
    fake = active_fake_mode()
    return contexts if fake is None else both((nullcontext(), fake), contexts)


def telling_operators(contexts: ContextPair | None, parent: Frame | None) -> ContextPair:
    from ckpt_hooks._operators.operator_log import OperatorWatch, wants_operators

    watches = nullcontext() if wants_operators(parent) else OperatorWatch(), OperatorWatch()
    return watches if contexts is None else both(watches, contexts)


class _Both(AbstractContextManager[None]):
    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        entered = _one_in_the_other(reusable(self.outer), reusable(self.inner))
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._entered.pop().__exit__(*exc_info)


@contextmanager
def _one_in_the_other(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    # An ``ExitStack`` keeps an exception raised on exit in a cycle, and with the exception a region's inputs.
    with outer, inner:
        yield


def suppressed_error(error: BaseException) -> RuntimeError:
    return RuntimeError(
        "the forward context provided by context_fn suppressed an exception raised during the checkpointed forward "
        f"({error!r}). There is no value to return for a forward that failed: let the exception pass, and handle it "
        "around the call of checkpoint."
    )


@contextmanager
def within(frame: Any, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enters a frame, and the user's context of forward inside of it."""
    error: BaseException | None = None
    try:
        with frame:
            with context:
                try:
                    yield
                except BaseException as raised:
                    error = raised
                    raise
            if error is not None:
                raise suppressed_error(error) from error
    finally:
        del error  # which has this call in its traceback


class PolicyContext(AbstractContextManager[None]):
    """One of the two contexts of a policy: a region takes the policy, and enters nothing; for anyone else it is torch's."""

    def __init__(self, policy: Policy, of_torch: list[AbstractContextManager[Any]], *, is_forward: bool) -> None:
        self.policy, self.is_forward = policy, is_forward
        self._of_torch = of_torch  # of both, empty until a context is entered

    def is_before(self, other: object) -> bool:
        """Whether this is the first of a pair, and another context the second."""
        return isinstance(other, PolicyContext) and self.is_forward > other.is_forward and self._of_torch is other._of_torch

    def __enter__(self) -> None:
        _refuse_hidden()
        if not self._of_torch:
            from ckpt_hooks.policies.decisions import asks_for_torch

            create: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
            self._of_torch += create(asks_for_torch(self.policy))
        self._of_torch[not self.is_forward].__enter__()

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._of_torch[not self.is_forward].__exit__(*exc_info)


def _refuse_hidden() -> None:
    frame, hooks = stack.innermost, top_saved_tensors_hooks(False)
    if frame is not None and hooks is not None and are_of_frame(hooks):
        raise TypeError(
            f"context_fn of region {'/'.join(format_path(frame.path))!r} returned a context of "
            "create_selective_checkpoint_contexts within another context, where the region does not find it. Return the two as "
            "they are. For other contexts around them, write checkpoint(policy=policy, context_fn=others)(function)."
        )


# ---------------------------------------------------------------------------------------------------------------- functions

#: Types of the results of calls which have not run the function.
UNRUN = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})

_KINDS = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def check_runs(function: Any) -> None:
    """Refuses generator functions and coroutine functions, and callables that call them, as far as seen without a call."""
    inner = unwrapped(function)
    if isinstance(inner, type) and issubclass(inner, Module):
        raise wrong(inner, "function", "a function or a module", f"Make a module of the class first: `{inner.__name__}(...)`.")
    if isinstance(inner, Module):
        inner = inner.forward
    elif not inspect.isroutine(inner) and not isinstance(inner, type):
        inner = getattr(type(inner), "__call__", inner)  # noqa: B004 -- what kind of function is it?
    if any(is_kind(inner) for is_kind in _KINDS):
        raise _unrun_error(function)


def refuse_unrun(function: Any, result: Any) -> NoReturn:
    if isinstance(result, CoroutineType):
        result.close()  # or Python warns that it was never awaited
    raise _unrun_error(function)


def _unrun_error(function: Any) -> TypeError:
    return TypeError(
        f"{text_of(function)} does not run when it is called, so its calls cannot be regions. Write "
        "`with checkpoint_region():` around lines of it."
    )


_warned: set[tuple[str, str]] = set()


def check_swallowed(function: Any, kwargs: dict[str, Any], options: Sequence[str], form: str = "checkpoint") -> None:
    """Looks for options among the ``**kwargs`` of a function: refuses policies, and warns of others, once each."""
    for name in [name for name in options if name in kwargs]:
        is_refused = is_policy(kwargs[name])
        if (is_refused or (form, name) not in _warned) and is_swallowed(function, name):
            description = "which is a policy" if is_refused else "which reaches the function by its **kwargs"
            error = slip(kwargs[name], name, description, name, options, form)
            if is_refused:
                raise error
            _warned.add((form, name))
            warn_user(str(error))


def is_policy(value: Any) -> bool:
    """Whether a value is a policy of this package, or a list of operators. A function may be anything else as well."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return bool(value) and all(isinstance(op, (*OPERATORS, OPERATOR_PACKET)) for op in value)
    from ckpt_hooks.policies.base import Policy

    return isinstance(value, Policy)


@functools.cache  # once for each form
def warn_of_transform(*, stacklevel: int) -> None:
    """Warns of a region which runs plainly under a transform of functions, ``stacklevel`` calls below the region."""
    warnings.warn(
        "checkpoint was called under a torch.func transform (grad, vjp, vmap, ...), which saved-tensor hooks cannot see "
        "through. Regions run un-checkpointed there: results are right, memory is as without checkpointing.",
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
