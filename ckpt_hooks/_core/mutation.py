"""Tensors changed since forward: the errors, by a table of words; and writes by fused optimizers, which no version counts."""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_hooks._torch.tensors import is_freed, is_kept_anyway, storage_of
from ckpt_hooks.errors import MutationError

from .call_sites import name_in_models
from .descriptions import describe_kind, region_in_words

#: Stands for the version of a tensor of forward that is gone, and in whose place another tensor stands.
GONE = -1


class _Words(NamedTuple):
    sentence: str
    advice: str = "{advice}"
    tensor: str = ""  # the field ``tensor`` of the error, where no tensor is at hand


class Why(enum.Enum):
    """Words for each error. A row with ``{change}`` needs the tensor, whose version says how it has changed."""

    SAVED = _Words("{tensor} that {region} saved {change}")
    OFFLOADED = _Words("{tensor} that was saved in a block of offload_saved_tensors {change}")
    NEEDED = _Words("{tensor} that {region} needs ({detail}) {change}")
    HELD = _Words(
        "{tensor} that {region} needs ({detail}) {change}",
        "{advice} Or keep what was computed from it, by a policy or by moving that code out of the region.",
    )
    REACHED = _Words("{region}: {tensor} {change}", "{advice} If the function writes to it, have it write to a clone.")
    COPIED_NEXT = _Words("{region}: {tensor} {change}", "{advice} Or run the step again: the next forward copies it.")
    SAVED_BY_RERUN = _Words(
        "{region}: {tensor} {change}",
        "{advice} Or the function saved another tensor in forward than in the recompute, or wrote to it in only one of the two "
        "runs, as in a hook that removes itself or a first call that does more. Make the function do the same each time.",
    )
    MOVED = _Words(
        "{region}: {tensor} was given other memory (`tensor.data = ...`) after forward began.",
        "Assign a new tensor in its place, or exchange its memory after backward.",
    )
    WRITTEN_LATE = _Words(
        "{region}: forward has written to {tensor} which earlier forwards only read: {versions}.",
        "This forward made no copy before the write, and the next forward will: run this forward again, and first restore the "
        "tensor if the write must not count twice. Or assign a new tensor, or use checkpoint_region, which reruns no code.",
    )
    # Changes that no version shows.
    PARAMETER_GONE = _Words(
        "{region}: {tensor} is gone, and no other parameter has its name.",
        "Keep it until backward.",
        "the parameter {detail!r}",
    )
    OVERWRITTEN = _Words(
        "{region}: {tensor} has been modified by an inplace operation ({detail}) later in the region.",
        "Modify a clone, or use the out-of-place form.",
        "a saved tensor",
    )
    WRITTEN_UNSEEN = _Words(
        "{region}: a kernel of the custom function `{detail}` wrote to an argument from outside of the region, which no "
        "version counter shows.",
        "Pass a clone to the function, or call ctx.mark_dirty on the argument in its forward.",
        "an argument of {detail}",
    )


class _HowChanged(enum.Enum):
    """How a tensor has changed: a predicate, and advice."""

    MODIFIED = (
        "has been modified by an inplace operation: {versions}.",
        "Modify it after backward, or use a clone of it in {start}.",
    )
    REPLACED = (
        "is another tensor than forward saw: {versions}. It was assigned anew, given other memory (`tensor.data = ...`, "
        "`module.half()`), or exchanged by torch.utils.swap_tensors.",
        "Assign or exchange it after backward, or pass forward's tensor to the function as an argument.",
    )
    FREED = (
        "has no memory any more: it was freed after forward and not filled again.",
        "Free it after backward. Where a framework gathers parameters, make each of its units a region of its own.",
    )


def _change_of(tensor: torch.Tensor, expected: int | None) -> tuple[_HowChanged, str]:
    # A version counter rises with each operation in place, ``set_`` and ``resize_`` among them, and never falls. So a higher
    # version is a write, or another tensor with more writes. A lower version is another tensor for sure.
    if expected == GONE:
        return _HowChanged.REPLACED, "forward's tensor is gone"
    if expected is None or is_freed(tensor):
        return _HowChanged.FREED, ""
    version = tensor._version
    if version == expected:
        return _HowChanged.MODIFIED, "a step of a fused optimizer wrote to it, which its version does not tell"
    change = _HowChanged.REPLACED if version < expected else _HowChanged.MODIFIED
    return change, f"it is at version {version}; expected version {expected} instead"


def mutated(
    why: Why,
    region: tuple[str, ...],
    tensor: torch.Tensor | None = None,
    expected: int | None = None,
    *,
    name: str = "",
    kind: str = "",  # dtype and shape, if the tensor is only a version witness
    detail: str = "",
) -> MutationError:
    """Returns the error for a tensor at another version than ``expected``, or with freed memory if ``expected`` is None."""
    sentence, advice, what = why.value
    slots = {"region": region_in_words(region), "detail": detail, "start": "the region" if region else "the block"}
    if tensor is None:
        what = slots["tensor"] = what.format(**slots)
    else:
        change, slots["versions"] = _change_of(tensor, expected)
        slots["change"], slots["advice"] = (words.format(**slots) for words in change.value)
        if change is _HowChanged.MODIFIED and is_kept_anyway(tensor):
            slots["advice"] += " Usual causes: an optimizer's step before backward, and a hook of forward which writes to it."
        kind = f"a {kind or describe_kind(tensor)} {'leaf' if is_kept_anyway(tensor) else 'tensor'}"
        known = name or name_in_models(tensor)
        slots["tensor"] = f"{known}, {kind}," if known else kind
        what = name or (f"{known}, {kind}" if known else kind)
    return MutationError(
        f"{sentence.format(**slots)} Backward needs the values that forward saw. {advice.format(**slots)}",
        region=region,
        tensor=what,
        expected=None if expected == GONE else expected,
        found=None if tensor is None or expected is None else tensor._version,
    )


# Steps of fused optimizers

# Optimizers with ``fused=True`` write to parameters without counting versions: a recompute would take such a parameter for
# forward's. The counters of torch are left alone, since plain autograd does not notice these writes either.

#: The number of the latest step which wrote to a parameter, by the address of its object and of its storage. A tensor at the
#: address of a dead parameter is younger than that step, so the step does not count for it.
_latest_steps: dict[int | None, int] = {}


class _FusedSteps:
    count = 0


fused_steps = _FusedSteps()  # an attribute, since regions read it several times and a call takes longer


@functools.cache  # a single hook is enough
def watch_fused_steps() -> None:
    register_optimizer_step_post_hook(_count_step)


def stepped_since(tensor: torch.Tensor, count: int) -> bool:
    """Whether a fused step after step number ``count`` has written to a tensor, or to its storage."""
    return fused_steps.count > count and (
        _latest_steps.get(id(tensor), 0) > count or _latest_steps.get(storage_of(tensor), 0) > count
    )


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        if group.get("fused"):
            fused_steps.count += 1
            written = [parameter for parameter in group["params"] if parameter.grad is not None]
            _latest_steps.update(dict.fromkeys(map(id, written), fused_steps.count))
            _latest_steps.update(dict.fromkeys(map(storage_of, written), fused_steps.count))
            _latest_steps.pop(None, None)  # the key of parameters without a storage
