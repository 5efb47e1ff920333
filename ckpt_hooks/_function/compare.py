"""Compares the tensors saved in a rerun with the tensors saved in forward; errors for differences."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NoReturn

import torch

from ckpt_hooks._core.descriptions import describe, format_path, region_in_words
from ckpt_hooks._core.modes import is_without_values, past_modes
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._options import Check, version_of
from ckpt_hooks.errors import DeterminismError

from .collector import Collector
from .words import CAUSES, name_of_tensor, node_of


def result_of(collector: Collector, check: Check) -> list[torch.Tensor]:
    """Returns the values of an ended rerun, up to the last wanted value; ``MISSING`` for unwanted values."""
    # ``MISSING`` also stands for a value that the function modified after saving it, as in ``y = x.sin(); x.mul_(2)``: a rerun
    # for this value alone ends before the modification.
    values, frame = collector.values, collector.frame
    if not collector.early_stop and frame.complete and len(values) != len(frame.numbers):
        _raise_miscounted(collector)
    num_doubtful, mutated = collector.doubt or (0, None)
    if mutated is not None and collector.wanted is not None and len(collector.wanted) == 1:
        raise mutated()
    end = collector.last + 1
    if len(values) != end:
        if len(values) < end:
            _raise_miscounted(collector)
        del values[end:]
        if num_doubtful:
            collector.without_grad = [index for index in collector.without_grad if index < end]
    if frame.marks or collector.marks:
        _compare_marks(collector)
    actual = list(map(check.facts, values))
    expected = frame.facts if collector.versions is None else list(map(_at_lower_version, frame.facts, collector.versions))
    if actual != (expected if len(expected) == len(actual) else expected[: len(actual)]):
        _look_into(collector, actual, expected)
    if collector.without_grad != frame.without_grad:
        _compare_grad(collector)
    if check.fingerprint is not None and not is_without_values():
        if frame.sampled is not None:
            _compare_sampled(collector)
        else:
            _compare_values(collector, check.fingerprint)
    # If backward asks for a doubtful value, a rerun for this value alone raises the error.
    return values + [MISSING] * num_doubtful


def _compare_marks(collector: Collector) -> None:
    # An inner region saves its inputs in this frame, which gives values to handles by their order. If an inner region gets more
    # or fewer tensors in a rerun, later handles would get values of other handles, perhaps of the same shape.
    forward, rerun = (
        marks[: bisect_right(marks, collector.last, key=itemgetter(0))] for marks in (collector.frame.marks, collector.marks)
    )
    for expected, actual in itertools.zip_longest(forward, rerun):
        if expected is None or actual is None or expected[:3] != actual[:3]:
            position = min(mark[0] for mark in (expected, actual) if mark is not None)
            before, now = (
                "no inner region at that point"
                if mark is None
                else f"region {mark[3][0]!r} with {mark[1]} tensors after {mark[0]} saved tensors"
                for mark in (expected, actual)
            )
            message = (
                "An inner region was given other tensors during recomputation than during the original forward pass, or began "
                f"at another point. Forward had {before}; the recompute had {now}.\n"
            )
            raise _error(collector, message, position, before, now)


def _look_into(collector: Collector, actual: list[Any], expected_facts: list[Any]) -> None:
    if (difference := _first_other(collector)) is not None:
        index, expected, now = difference
        message = "Recomputed values for the following tensors have different metadata than during the forward pass.\n"
        raise _error(collector, message + _in_words(difference), index, expected, now)
    for index, (value, expected, now) in enumerate(zip(collector.values, expected_facts, actual, strict=False)):
        if value is not MISSING and expected != now:
            if collector.wanted is not None and len(collector.wanted) == 1:
                name = name_of_tensor(value, collector.frame.function, f"the saved tensor at position {index}")
                region = format_path(collector.frame.path)
                raise mutated(Why.SAVED_BY_RERUN, region, value, version_of(expected), name=name)
            collector.values[index] = MISSING


def _noted(collector: Collector) -> list[Any]:
    """Returns the fingerprints of forward to compare with."""
    from ckpt_hooks._tensors.determinism import Twice

    noted = collector.frame.fingerprints[: len(collector.values)]
    return [past_modes(each.unless_written) if type(each) is Twice else each for each in noted]


def _compare_values(collector: Collector, fingerprint: Callable[[torch.Tensor], Any]) -> None:
    expected = _noted(collector)
    with torch.no_grad():
        index, actual = past_modes(_first_difference, collector, fingerprint, expected)
    if index is not None:
        raise _error_of_values(collector, index, *(f" with fingerprint {_short(row[index])}" for row in (expected, actual)))


def _error_of_values(collector: Collector, index: int, before: str, now: str) -> DeterminismError:
    value = collector.values[index]
    what = describe(value.shape, value.dtype, value.device)
    message = "Recomputed values differ from the values of the forward pass. The first difference is in "
    return _error(collector, f"{message}the saved tensor at position {index}, {what}.\n", index, what + before, what + now)


def _compare_sampled(collector: Collector) -> None:
    from ckpt_hooks._tensors.determinism import may_be_unfilled
    from ckpt_hooks._tensors.samples import others

    frame, values = collector.frame, collector.values
    if collector.moved_otherwise:  # the rerun looks into draws next, which may explain a difference
        return
    frame.sampled.passed()
    with torch.no_grad():
        for index in others(_noted(collector), values):
            if not (index in collector.without_grad and may_be_unfilled(node_of(frame, index), values[index])):
                frame.sampled.settle(_error_of_values(collector, index, "", " with different values"))
                return


def _first_difference(
    collector: Collector, fingerprint: Callable[[torch.Tensor], Any], expected: list[Any]
) -> tuple[int | None, list[Any]]:
    from ckpt_hooks._tensors.determinism import first_difference, may_be_unfilled

    actual = [
        None if known is None or value is MISSING else fingerprint(value)
        for known, value in zip(expected, collector.values, strict=True)
    ]
    while (index := first_difference(expected, actual)) is not None:
        # An operator may save memory that it never fills, whose content differs from run to run.
        is_fresh = index in collector.without_grad
        if not (is_fresh and may_be_unfilled(node_of(collector.frame, index), collector.values[index])):
            break
        actual[index] = None
    return index, actual


def _compare_grad(collector: Collector) -> None:
    expected = [index for index in collector.frame.without_grad if index < len(collector.values)]
    actual = collector.without_grad
    if expected != actual:
        index = min(set(expected) ^ set(actual))
        before, now = (f"a tensor with requires_grad={index not in indices}" for indices in (expected, actual))
        message = (
            "Tensors saved during recomputation differ in requires_grad from the tensors saved in forward. At position "
            f"{index}, forward saved {before}, and the recompute {now}. Set requires_grad before forward or after backward.\n"
        )
        raise _error(collector, message, index, before, now)


def _raise_miscounted(collector: Collector) -> NoReturn:
    expected, actual = len(collector.frame.numbers), len(collector.values)
    message = "A different number of tensors was saved during the original forward and recomputation.\n"
    saved, again = f"Number of tensors saved during forward: {expected}\n", f"{actual} tensors"
    if actual > expected:
        message = "The function is trying to save more tensors during recomputation than during the original forward pass.\n"
        again += " or more"
    else:
        saved += f"Number of tensors saved during recomputation: {actual}\n"
    first = _first_other(collector)
    details = "" if first is None else _in_words(first)
    raise _error(collector, message + saved + details, min(expected, actual), f"{expected} tensors", again)


def _first_other(collector: Collector) -> tuple[int, str, str] | None:
    """Returns the position, and both metadata, of the first wanted value whose shape, dtype or device has changed."""
    for index, (value, expected) in enumerate(zip(collector.values, collector.frame.facts, strict=False)):
        if value is not MISSING and isinstance(expected, tuple):
            now = value.shape, value.dtype, value.device
            if now != expected[:3]:
                return index, describe(*expected[:3]), describe(*now)
    return None


def _in_words(difference: tuple[int, str, str]) -> str:
    index, expected, actual = difference
    return f"tensor at position {index}:\nsaved metadata: {expected}\nrecomputed metadata: {actual}\n"


def _error(collector: Collector, message: str, index: int, expected: str, actual: str) -> DeterminismError:
    region = format_path(collector.frame.path)
    words = f"{region_in_words(region)}: {message}{CAUSES}"
    return DeterminismError(words, region=region, index=index, expected=expected, found=actual)


def _at_lower_version(facts: Any, version: int) -> Any:
    """Returns the metadata of a tensor in forward, with the version of the rerun if that is lower."""
    # A higher version in the rerun stays an error: other code has written to the tensor since forward.
    if not isinstance(facts, tuple):
        return facts if facts is None else min(facts, version)
    return facts if facts[-1] is None or facts[-1] <= version else (*facts[:-1], version)


def _short(fingerprint: Any) -> str:
    words = repr(fingerprint.tolist() if isinstance(fingerprint, torch.Tensor) else fingerprint)
    return words if len(words) <= 80 else f"{words[:80]}..."
