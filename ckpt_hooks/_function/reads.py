"""Watches reads of tensors that were written to since forward and have no copy: a rerun ends at the first read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._operators.facts import OpKind, facts_of
from ckpt_hooks._tensors.copies import copy_of, fill_all
from ckpt_hooks._tensors.nested import outer_tensors_in
from ckpt_hooks._torch.tensors import storage_of

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
        output = func(*args, **kwargs)
        count_writes(func, args)
        return output

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
