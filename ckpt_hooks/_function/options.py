"""The options of regions: one row of a table for each, read by every form of a region.

An option for one more form has the form in its row, and stands in the signature of the form, which users read.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

from ckpt_hooks._core.misuse import checked_flag, flag_or_none
from ckpt_hooks._tensors import transfers
from ckpt_hooks._tensors.determinism import Check, check_of


class Form(enum.Flag):
    DIRECT = enum.auto()  # checkpoint(function, *args), and torch's calls of the kind under patch_torch
    CURRIED = enum.auto()  # checkpoint(...), by whatever makes functions and modules regions
    RECORDED = enum.auto()  # checkpoint_region(...), likewise


_CALLS = Form.DIRECT | Form.CURRIED
_NOT_DIRECT = Form.CURRIED | Form.RECORDED  # in a direct call such a keyword is the function's, as in torch
_EVERY = _CALLS | Form.RECORDED


def _offload_from(is_on: Any, name: str) -> int | None:
    return transfers.DEFAULT_MIN_OFFLOAD_SIZE if checked_flag(is_on, name) else None


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
    "respect_saved_tensors_hooks": Option(_EVERY, None, lambda *given: flag_or_none(*given) is not False, "respect_hooks"),
    "use_reentrant": Option(_CALLS),
    "name": Option(_NOT_DIRECT),
    "policy": Option(_NOT_DIRECT),
    "preserve_buffers": Option(Form.CURRIED, True, checked_flag),
    "offload_inputs": Option(_NOT_DIRECT, False, _offload_from, "offload_from"),
    "split_backward": Option(_NOT_DIRECT, False, checked_flag),
    "replay_whole": Option(Form.RECORDED, None, flag_or_none),
}


def options_of(form: Form) -> list[str]:
    return [name for name, option in OPTIONS.items() if form in option.forms]


def defaults_of(form: Form) -> dict[str, Any]:
    """Returns the defaults of the options of a form which it passes on to frames."""
    return {name: OPTIONS[name].default for name in options_of(form) if OPTIONS[name].check is not None}


def values_of(given: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the given values besides defaults as frames take them, by the names in frames; raises for a wrong value."""
    values = {}
    for name, value in given:
        option = OPTIONS[name]
        if value is not option.default:  # a comprehension with ``:=`` is more than Dynamo traces
            values[option.field or name] = option.check(value, name)
    return values


_DEFAULTS = {option.field or name: option.check(option.default, name) for name, option in OPTIONS.items() if option.check}


@dataclasses.dataclass(frozen=True)
class RegionOptions:
    check: Check = _DEFAULTS["check"]
    debug: bool = _DEFAULTS["debug"]
    early_stop: bool = _DEFAULTS["early_stop"]
    preserve_rng_state: bool = _DEFAULTS["preserve_rng_state"]
    respect_hooks: bool = _DEFAULTS["respect_hooks"]
    name: str | None = None  # None for the function's own
    preserve_buffers: bool = _DEFAULTS["preserve_buffers"]
    offload_from: int | None = _DEFAULTS["offload_from"]  # bytes from which inputs go to the host; None for none
    split_backward: bool = _DEFAULTS["split_backward"]


DEFAULT_OPTIONS = RegionOptions()
