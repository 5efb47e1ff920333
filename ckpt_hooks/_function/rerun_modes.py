"""The dispatch modes of a rerun: one notices reads of changed tensors, one repeated updates and unfilled memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._core.call_sites import call_site_of, name_in_models, place_in_words
from ckpt_hooks._core.descriptions import describe_kind, format_path, region_in_words
from ckpt_hooks._core.modes import QuietDispatchMode
from ckpt_hooks._operators.facts import NORMALIZES_BY_BATCH, REPEATABLE, UNINITIALIZED, OpFacts, OpKind, facts_of
from ckpt_hooks._state.journal import JournalLoan
from ckpt_hooks._tensors.copies import copy_of, fill_all
from ckpt_hooks._tensors.nested import outer_tensors_in
from ckpt_hooks._torch.tensors import storage_of, version_of
from ckpt_hooks.errors import MutationError

from .words import name_of_tensor

# Reads of tensors that were written to since forward and have no copy

#: The memory of a tensor: its storage or None, the first byte, the byte after the last, and whether the tensor fills the range.
_MemoryRange = tuple["int | None", int, int, bool]


def _range_of(tensor: torch.Tensor) -> _MemoryRange:
    storage = storage_of(tensor)
    if storage is None or tensor.is_nested:
        return None, 0, 0, False
    start, extent, size = tensor.storage_offset(), 1, tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        extent += (length - 1) * stride
    return storage, int(start * size), int((start + extent) * size), tensor.numel() >= extent


def _ranges_in(values: Any) -> list[_MemoryRange]:
    return [_range_of(tensor) for tensor in outer_tensors_in(values)]


def _overlap(memory: _MemoryRange, other: _MemoryRange) -> bool:
    return memory[0] is not None and memory[0] == other[0] and memory[1] < other[2] and other[1] < memory[2]


#: Kinds of operators that do not read the numbers in their arguments.
_HARMLESS = frozenset({OpKind.VIEW, OpKind.IGNORED, OpKind.ALIASES, OpKind.FACTORY})


class WatchReads(QuietDispatchMode):
    """Notes an operator's first read from the memory of a changed tensor, and undoes writes to changed tensors."""

    # A function often reaches parameters that its rerun does not read. They may have changed: an optimizer that steps during
    # backward has changed the later layers of a model. So a rerun ends only when an operator is about to read a changed tensor.
    # Values after the read would be wrong, and a backward inside the function could wait for this rerun for ever.

    def __init__(self, changed: Sequence[tuple[torch.Tensor, int]], collector: Any) -> None:
        super().__init__()
        self._watched = [(_range_of(parameter), parameter, version) for parameter, version in changed]
        self._collector = collector
        self._undo: dict[int, tuple[torch.Tensor, int, torch.Tensor, None]] = {}
        self._has_read = False

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        fill_all(self._undo.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts, kwargs = facts_of(func), kwargs or {}
        is_write = facts.kind is OpKind.WRITES and not self.paused
        written = _ranges_in(facts.written_in(args, kwargs)) if is_write else ()
        if written and facts.is_repeatable:
            self._about_to_write(written)
        if facts.kind not in _HARMLESS and self._watched and not (self._has_read or self.paused):
            read = _ranges_in((args, kwargs))
            changed = [watched for memory in read for watched in self._watched if _overlap(watched[0], memory)]
            if changed:
                self._has_read = True
                self._collector.distrust(functools.partial(self._collector.mutated, *changed[0][1:]))
        if written:
            self._about_to_write(written)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _about_to_write(self, written: Sequence[_MemoryRange]) -> None:
        left = []
        for watched in self._watched:
            memory, parameter, _ = watched
            written_here = [other for other in written if _overlap(memory, other)]
            if written_here and id(parameter) not in self._undo:
                self._undo[id(parameter)] = parameter, parameter._version, copy_of(parameter), None
            if not any(other[1] <= memory[1] and memory[2] <= other[2] and other[3] for other in written_here):
                left.append(watched)  # a write that fills the tensor ends the watch: later reads get the new values
        self._watched = left


# A rerun that the self-check compares

#: Operators of ATen that may leave results unfilled.
_UNFILLED = UNINITIALIZED | {"resize_", "_grouped_mm", "_varlen_attn", "_flash_attention_forward"}

#: Operators whose repetition changes nothing.
_REPEATABLE = REPEATABLE | {"bitwise_and_", "bitwise_or_", "logical_and_", "logical_or_"}

#: Operators that read the tensor they write to only if an argument is set: the position and name of that argument.
_READS_IF_SET = {
    "index_put_": (3, "accumulate"),
    "_index_put_impl_": (3, "accumulate"),
    "put_": (3, "accumulate"),
    "scatter_": (4, "reduce"),
    **dict.fromkeys(NORMALIZES_BY_BATCH | {"batch_norm", "_native_batch_norm_legit"}, (5, "training")),
}

_ADVICE = (
    "Make the tensor a buffer of a module that the region calls: a recompute gets buffers as forward got them. Or write "
    "`with checkpoint_region():`, which runs Python once."
)


class CheckedRerun(QuietDispatchMode):
    """Notes for the self-check whether memory may be unfilled, and reports updates that a rerun repeats."""

    def __init__(self, frame: Any, loan: JournalLoan | None, arguments: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self._frame, self._sampled, self._loan = frame, frame.sampled, loan
        self._puts_back = frame.options.preserve_buffers
        # Storages to which writes are not checked: of arguments, and storages made, filled or reported in this rerun.
        self._exempt = {storage_of(tensor) for tensor in arguments if tensor is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused:
            return super().__torch_dispatch__(func, types, args, kwargs)
        facts = facts_of(func)
        if not facts.is_trusted or facts.name in _UNFILLED:
            self._sampled.may_be_unfilled = True
        if facts.written and self._puts_back and not (facts.is_opaque or facts.is_inplace_view or facts.replaces_storage):
            self._look_at_write(facts, args, kwargs or {})
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if facts.has_fresh:
            self._exempt.update(map(storage_of, outer_tensors_in(output)))
        return output

    def _look_at_write(self, facts: OpFacts, args: Any, kwargs: Any) -> None:
        reads = not (facts.name in _REPEATABLE or kwargs.get("beta") == 0)  # as ``baddbmm_`` with ``beta=0``
        if facts.name in _READS_IF_SET:
            place, name = _READS_IF_SET[facts.name]
            reads = bool(args[place] if place < len(args) else kwargs.get(name))
        for written in facts.written:
            for tensor in outer_tensors_in(written.of(args, kwargs)):
                storage, version = storage_of(tensor), version_of(tensor)
                if storage is None or storage in self._exempt or version < 0:
                    continue
                # Memory at version 0 is new: if it were older, forward's write would have raised the version.
                if written.overwritten or (written.counted and version == 0):
                    self._exempt.add(storage)
                elif reads:
                    self._exempt.add(storage)  # reported once
                    if self._loan is None or storage not in self._loan.journal.storages():
                        self._sampled.settle(self._error(tensor, facts), _ADVICE)

    def _error(self, tensor: torch.Tensor, facts: OpFacts) -> MutationError:
        region = format_path(self._frame.path)
        name = name_of_tensor(tensor, self._frame.function, name_in_models(tensor) or "a tensor from outside of the region")
        line = place_in_words(call_site_of(sys._getframe()), {})
        return MutationError(
            f"{region_in_words(region)}: {name}, {describe_kind(tensor)}, is updated by forward and again by its recompute, "
            f"with {facts.full_name}\n  at {line}\n",
            region=region,
            tensor=name,
            expected=None,
            found=None,
        )
