"""The options of regions: a table, which every form reads, and the value that both kinds of frame take.

To give an option to another form, add the form to the option's row, and the option to the form's signature.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.misuse import check_is, check_signature, checked_flag, flag_or_none, is_swallowed, slip, wrong
from ckpt_hooks._torch.functions import OPERATOR_PACKET, OPERATORS

if TYPE_CHECKING:
    from ckpt_hooks.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Check:
    # Returns shape, dtype, device and version of a tensor, or only the version. The version is always compared, since a tensor
    # modified after it was saved has wrong values; plain autograd raises then too.
    facts: Callable[[Any], Any]
    fingerprint: Callable[[torch.Tensor], Any] | None = None  # returns what to compare of the values; None compares no values
    is_sampled: bool = False  # whether the self-check compares values in some passes


METADATA = operator.attrgetter("shape", "dtype", "device", "_version")

NOTHING = Check(operator.attrgetter("_version"))

_CHECKS = {"default": Check(METADATA, is_sampled=True), "metadata": Check(METADATA), "none": NOTHING}


#: The values of the option ``determinism_check``.
DeterminismCheck = Literal["default", "metadata", "none", "values"] | Callable[[torch.Tensor], Any]


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
    DIRECT = enum.auto()  # checkpoint(function, *args), and such calls of torch's checkpoint under patch_torch
    CURRIED = enum.auto()  # checkpoint(...), also where checkpoint_module and other functions call it
    RECORDED = enum.auto()  # checkpoint_region(...), also where checkpoint_module and other functions call it


_CALLS = Form.DIRECT | Form.CURRIED
_NOT_DIRECT = Form.CURRIED | Form.RECORDED  # a direct call passes such a keyword on to the function, as torch does
_EVERY = _CALLS | Form.RECORDED


def _offload_from(is_on: Any, name: str) -> int | None:
    if not checked_flag(is_on, name):
        return None
    from ckpt_hooks._tensors import transfers

    return transfers.DEFAULT_MIN_OFFLOAD_SIZE


def _policy(value: Any, name: str) -> Any:
    """Returns the policy; while Dynamo traces, a key for a function or list, which Dynamo could not trace."""
    from ckpt_hooks.policies.base import Policy, key_for, policy_from

    return key_for(value) if torch.compiler.is_dynamo_compiling() and not isinstance(value, Policy) else policy_from(value)


class Option(NamedTuple):
    forms: Form
    default: Any = None  # as users write it
    # A function of the user's value and the option's name, which returns the value for frames, or raises. None if frames do
    # not take the option.
    check: Any = None
    field: str = ""  # the name in ``RegionOptions``, if that differs


#: The table. Forms pass values on in the order of the table, and errors list names in this order.
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
    check_is(name, (str, type(None)), "name", "a string", "Pass a name for the region in errors, such as name='block'.")
    return name  # type: ignore[no-any-return]


def defaults_of(form: Form) -> dict[str, Any]:
    """Returns the defaults of those options of a form which frames take."""
    return {name: OPTIONS[name].default for name in options_of(form) if OPTIONS[name].check is not None}


@dataclasses.dataclass(frozen=True)
class RegionOptions:
    """The options of one region, of either kind, as frames take them."""

    check: Check = _CHECKS["default"]
    debug: bool = False
    early_stop: bool = True
    preserve_rng_state: bool = True
    respect_hooks: bool = True
    name: str | None = None  # None means the function's name
    policy: Policy | None = None  # a region with a policy is recorded
    preserve_buffers: bool = True
    offload_from: int | None = None  # inputs of at least this many bytes go to the host; None moves no input
    split_backward: bool = False
    replay_whole: bool | None = None  # None decides by the bytes that the recorded region saved

    def replaced(self, **fields: Any) -> RegionOptions:
        # Both ways set every field on the instance: Dynamo cannot trace a ``check`` that it reads from the class's defaults.
        if torch.compiler.is_dynamo_compiling():
            return dataclasses.replace(self, **fields)
        options = object.__new__(RegionOptions)  # a tenth of the time of ``replace``, since programs make regions in each step
        vars(options).update(vars(self), **fields)
        return options


DEFAULT_OPTIONS = RegionOptions()


def options_from(options: RegionOptions = DEFAULT_OPTIONS, /, **given: Any) -> RegionOptions:
    """Returns ``options`` with other values, given as users name and write the options; raises for a wrong value."""
    values = {}
    for name, value in given.items():
        option = OPTIONS[name]
        if value is not option.default:  # in a loop, since Dynamo cannot trace a comprehension with ``:=``
            values[option.field or name] = option.check(value, name)
    return options.replaced(**values) if values else options


_warned: set[tuple[str, str]] = set()


def check_swallowed(function: Any, kwargs: dict[str, Any], options: Sequence[str], form: str = "checkpoint") -> None:
    """Looks for options among the ``**kwargs`` of a function: refuses policies, and warns once of each other option."""
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
    """Whether a value can only be a policy: a policy of this package, its name, or a list of operators; not a function."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return bool(value) and all(isinstance(op, (*OPERATORS, OPERATOR_PACKET)) for op in value)
    from ckpt_hooks.policies.base import NAMED, Policy

    return isinstance(value, Policy) or (isinstance(value, str) and value in NAMED)
