"""Ledgers, recorded under the profiler from a block or a step, and how they print. Plain values, no tensors."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.misuse import wrong
from ckpt_hooks._torch.profiling import giving_way, is_profiling, profile_memory
from ckpt_hooks.report.formats import Exported, MemoryEvent, frames_of, snapshot_of
from ckpt_hooks.report.printing import (
    REMEDIES,
    Maker,
    Origin,
    Printed,
    Table,
    alike,
    as_json,
    count_of,
    fold_names,
    format_bytes,
    name_pattern,
    noting_out_of_memory,
    times,
    up_to_number,
)

from .data import Holder, LedgerData, Phase, maker_in_words
from .pictures import BandKind, ModelBlocks, Picture, band_of, compare
from .rows import Marks, OlderMemory, rows_of, watch

_HEADER = ("at the peak", "storages", "made by", "operator", "line", "held by")
_MOST = 7  # rows of holders
_CAUSES = 5  # rows of causes, and lines of a note
_LEAST = 0.01  # the smallest cause that is shown, as a fraction of the memory in use
_MOST_PHASES = 6  # rows of phases; with more, phases of equal names share a row
_BAR = 24  # characters


class MemoryLedger(LedgerData, Printed, Exported):
    """The memory of a device during a step: every allocation, with the operator and module that made it.

    ``print`` shows the peak, phases, the largest holders at the peak, and what would reduce them. In a ``with`` block, read the
    ledger after the block.

    Attributes:
        device: The device, such as ``"cpu"``.
        base_nbytes: Bytes in use when the ledger began: on a host those of tensors that Python knew, on an accelerator those
            of the allocator.
        allocations: An :class:`Allocation` for each allocation, in order of time.
        changes: A :class:`Change` for each allocation and free, in order of time.
        devices: All devices that allocated.
        entries: A :class:`RegionEntry` for each entry of a region, in order.
    """

    def on(self, device: str) -> MemoryLedger:
        """Returns the ledger of another device, such as ``"cpu"`` for host memory.

        Raises:
            ValueError: If the device allocated nothing.
        """
        if device not in self.devices:
            wanted = f"one of {', '.join(self.devices)}"
            raise wrong(device, "device", wanted, "Name one of these: other devices allocated nothing.", ValueError)
        other = MemoryLedger()
        other.fill(*self._taken, device)
        return other

    def causes_now(self) -> list[str]:
        """Returns lines about the largest holders at the end of the ledger, each with what would reduce it."""
        lines = []
        for cause in self._causes_of(self.holders_at(len(self.changes) - 1)):
            nbytes, count, *words, remedy = cause.values()
            lines.append(f"{'  '.join(filter(None, (format_bytes(nbytes), f'x{count}', *words)))}: {remedy}")
        return lines

    def _causes_of(self, holders: Sequence[Holder]) -> list[dict[str, Any]]:
        """Returns holders grouped by what would reduce them, each group with its largest part in words."""
        groups = sorted(alike(holders, lambda holder: _remedy_for(self, holder)), key=_size_of, reverse=True)
        total = sum(map(_size_of, groups))
        causes = []
        for group in groups:
            if (remedy := _remedy_for(self, group[0])) and _size_of(group) > _LEAST * total:
                count = sum(holder.count for holder in group)
                words = zip(("made_by", "operator", "line", "held_by"), _row_of(_groups_of(group)[0])[2:], strict=True)
                causes.append({"nbytes": _size_of(group), "count": count, **dict(words), "remedy": remedy})
        return causes[:_CAUSES]

    def plot(self, path: str | os.PathLike[str] | None = None) -> Picture:
        """Draws the memory of the step, by blocks of the model; see :func:`ckpt_hooks.report.compare`.

        Args:
            path: A file to write, as in ``"step.png"`` or ``"step.svg"``; None to write none.

        Returns:
            The :class:`Picture`, which notebooks show.

        Raises:
            ImportError: If matplotlib is absent: ``pip install 'ckpt_hooks[plot]'``.
        """
        return compare(path, **{"": self})

    def to_snapshot(self) -> dict[str, Any]:
        """Returns the ledger as a dict in the format of ``torch.cuda.memory._snapshot()``.

        :meth:`save_snapshot` writes the pickle. Stacks show the operator with its line, then modules, the region and the kind
        of maker. A segment is a run of addresses that the step used. Memory from before has no stack and made-up addresses.

        Returns:
            ``segments`` at the end of the ledger, and ``device_traces`` with this device's trace. The host is device 0.

        Example:
            >>> import torch
            >>> from ckpt_hooks import memory_ledger
            >>> x = torch.ones(4096, requires_grad=True)
            >>> (events,) = memory_ledger(lambda: x.exp().sum().backward()).to_snapshot()["device_traces"]
            >>> events[0]["action"], events[0]["size"], events[0]["frames"][0]["name"]
            ('alloc', 16384, 'aten::exp')
        """

        def events() -> Iterator[MemoryEvent]:
            for change in self.changes:
                allocation = None if change.allocation is None else self.allocations[change.allocation]
                address, stack = (None, []) if allocation is None else (allocation.address, stack_of(allocation.origin))
                yield MemoryEvent(change.nbytes > 0, address, abs(change.nbytes), stack, change.time // 1000)

        stack_of = functools.cache(frames_of)  # events with the same origin share a stack, so the pickle is a tenth as large
        freed = sum(change.nbytes for change in self.changes if change.allocation is None)
        return snapshot_of(events(), torch.device(self.device).index or 0, max(0, self.base_nbytes + freed))

    def scalars(self) -> dict[str, int]:
        """Returns the ledger as a flat dict of bytes for metric loggers.

        Returns:
            ``base``, the memory in use when the ledger began; ``peak``, above it; ``recomputed``, what recomputes allocated.
            For each block of the model, ``peak/layers.0``, its share at the peak, and ``recomputed/layers.0``. ``peak/older``,
            ``peak/gradients``, ``peak/optimizer``, ``peak/outside`` and ``peak/backward`` belong to no block. All ``peak/...``
            add up to ``base`` plus ``peak``.

        Example:
            >>> import torch
            >>> from ckpt_hooks import memory_ledger
            >>> x = torch.ones(4096, requires_grad=True)
            >>> memory_ledger(lambda: x.exp().sum().backward()).scalars()["recomputed"]
            0
        """
        peak, (names,) = self.peak, ModelBlocks([self], 1).names
        scalars = {"peak": peak.nbytes, "base": self.base_nbytes, "recomputed": 0}
        scalars.update({"peak/older": peak.older_nbytes} if peak.older_nbytes else {})
        for allocation, block in zip(self.allocations, names, strict=True):
            part, keys = band_of(allocation, None if block is None else 0)[0], list[str]()
            if allocation.origin.maker is Maker.RECOMPUTE:
                keys = ["recomputed", *([] if block is None else [f"recomputed/{block}"])]
            if allocation.born <= peak.change and (allocation.freed is None or peak.change < allocation.freed):
                keys.append(f"peak/{block if part in (BandKind.BLOCK, BandKind.AGAIN) else part.name.lower()}")
            for key in keys:
                scalars[key] = scalars.get(key, 0) + allocation.nbytes
        return scalars

    def _headline(self) -> str:
        peak = self.peak
        words = f"peak {format_bytes(peak.nbytes)} above the {format_bytes(self.base_nbytes)} in use before, on {self.device}"
        if not self.changes:
            return f"{words}: nothing was allocated"
        maker = "" if peak.origin is None else maker_in_words(peak.origin)
        there = maker if maker.startswith(peak.phase) else ", by ".join(filter(None, (peak.phase, maker)))
        return f"{words}: in {there}; {count_of(len(self.allocations), 'allocation')}"

    def _tables(self) -> Iterator[Table]:
        peak = self.peak
        yield _table_of_phases(self.phases, peak.change)
        groups = _groups_of(peak.holders)
        left, freed = sum(map(_size_of, groups[_MOST:])), self.base_nbytes - peak.older_nbytes
        rest = (
            f"and {format_bytes(left)} in {count_of(len(groups) - _MOST, 'more row')}" if left else "",
            f"{format_bytes(peak.older_nbytes)} from before" if peak.older_nbytes else "",
            f"{format_bytes(freed)} from before are freed by then" if freed else "",
        )
        rows = [_row_of(group) for group in groups[:_MOST]]
        yield Table(_HEADER, rows, (0, 1), (2, 3), "", ", ".join(filter(None, rest)))
        rows = [[format_bytes(cause["nbytes"]), cause["line"], cause["remedy"]] for cause in self._causes_of(peak.holders)]
        yield Table(["at the peak", "most at", "what takes it away"], rows, (0,), (2,))

    def to_json(self) -> dict[str, Any]:
        """Returns the ledger as values for ``json.dumps``: each origin once, and allocations with the index of their origin.

        ``causes`` are the largest parts of the memory in use at the peak, each with what would reduce it.
        """
        origins: dict[Origin, int] = {}
        rows = [
            {
                "nbytes": allocation.nbytes,
                "origin": origins.setdefault(allocation.origin, len(origins)),
                "born": allocation.born,
                "freed": allocation.freed,
                "is_gradient": allocation.is_gradient,
                "holds": [[hold.reason.value, hold.region, hold.begin, hold.end] for hold in allocation.holds],
            }
            for allocation in self.allocations
        ]
        parts = ("device", "base_nbytes", "peak", "phases")
        return {
            **{name: as_json(getattr(self, name)) for name in parts},
            "causes": self._causes_of(self.peak.holders),
            "origins": as_json([*origins]),
            "allocations": rows,
            "changes": [[change.time, change.allocation, change.nbytes, change.live] for change in self.changes],
        }


def _remedy_for(ledger: LedgerData, holder: Holder) -> str:
    """Returns how to reduce the memory of a holder, in words; empty if nothing does."""
    origin, reason = holder.origin, holder.reason
    if origin.maker is Maker.OPTIMIZER:
        is_foreach = (origin.operator or "").startswith("aten::_foreach_")
        return "foreach=False" if is_foreach else "an optimizer with less state"
    is_of_module = origin.maker is Maker.MODULE and origin.module is not None
    if reason is None and is_of_module and all(phase.name != "backward" for phase in ledger.phases):
        reason = Reason.SAVED  # a guess: only a backward would show whether the program holds the memory too
    if reason is Reason.SAVED and is_of_module and (block := up_to_number((origin.module or "").rpartition(" ")[0])):
        return f'apply_checkpointing(model, "{block.rstrip("0123456789")}*")'
    return REMEDIES.get(reason, "")


def _table_of_phases(phases: Sequence[Phase], peak: int) -> Table:
    groups = alike(phases, lambda phase: phase.name if len(phases) > _MOST_PHASES else phase.begin)
    most = max([1, *(phase.peak_nbytes for phase in phases)])
    rows = []
    for group in groups:
        name, size = f"{times(group)} {group[0].name}".strip(), max(phase.peak_nbytes for phase in group)
        has_peak = any(phase.begin <= peak < phase.end for phase in group)
        bar = "█" * max(0, round(_BAR * size / most))
        rows.append([name, bar, format_bytes(size), format_bytes(group[-1].end_nbytes), "peak" if has_peak else ""])
    return Table(["phase", "", "at most", "at its end", ""], rows, (2, 3))


def _size_of(group: Sequence[Holder]) -> int:
    return sum(holder.nbytes for holder in group)


def _groups_of(holders: Sequence[Holder]) -> list[list[Holder]]:

    def key(holder: Holder) -> object:
        origin = holder.origin
        operator = origin.operator if origin.line is None else None
        return origin.maker, *map(name_pattern, _words_of(origin)), origin.line, operator, holder.reason

    return sorted(alike(holders, key), key=_size_of, reverse=True)


def _row_of(group: Sequence[Holder]) -> list[str]:
    origin, reason = group[0].origin, group[0].reason
    modules, names = zip(*(_words_of(holder.origin) for holder in group), strict=True)
    sizes: collections.Counter[str] = collections.Counter()
    for holder in group:
        sizes[(holder.origin.operator or "").removeprefix("aten::")] += holder.nbytes
    operators = [name for name, _ in sizes.most_common() if name]
    return [
        format_bytes(_size_of(group)),
        str(sum(holder.count for holder in group)),
        maker_in_words(origin, " ".join(filter(None, (fold_names(modules), fold_names(names))))),
        ", ".join(operators[:2]) + (", ..." if len(operators) > 2 else ""),
        origin.line or "",
        "the program" if reason is None else reason.value,
    ]


def _words_of(origin: Origin) -> tuple[str, str]:
    words = (origin.region or origin.module or "").split(" ", 1)
    return words[0], "".join(words[1:])


@overload
def memory_ledger() -> contextlib.AbstractContextManager[MemoryLedger]: ...


@overload
def memory_ledger(step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> MemoryLedger: ...


def memory_ledger(step: Any = ..., /, *args: Any, **kwargs: Any) -> Any:
    """Records every allocation of a training step or a block, and what made it.

    ``memory_ledger(step, *args)`` runs the step once and returns the ledger. ``with memory_ledger() as ledger:`` records a
    block; read the ledger after it.

    The ledger comes from torch's profiler and adds up to the allocator's bytes exactly. On an accelerator, sizes are the
    rounded blocks of the caching allocator. Older memory counts as ``base_nbytes``; freeing it lowers the sum. Allocations by
    other threads of the program are not recorded, except in a backward that starts here.

    A recorded step computes the same results, more slowly: each call into torch takes some tens of microseconds more, most of
    them at the end, when the ledger is built. The profiler prints lines of its own (``USDT:``, "Memory block of unknown size");
    ``KINETO_LOG_LEVEL=6`` and ``TORCH_CPP_LOG_LEVEL=ERROR`` in the environment silence it. Compiled code is compiled once more.
    No tensor is kept alive. In eval mode ``nn.TransformerEncoder`` does not use its fast path, so results round differently.

    Args:
        step: Runs forward and backward, and the optimizer if wanted. Its result is dropped.
        *args: Arguments of ``step``.
        **kwargs: Keyword arguments of ``step``.

    Returns:
        A :class:`MemoryLedger`: ``peak`` with its ``holders``, ``phases``, ``allocations``, ``changes``, ``to_json()``. If
        several devices allocated, the first accelerator's; ``on("cpu")`` returns the host's.

    Raises:
        TypeError: If ``step`` cannot be called.
        RuntimeError: If a profiler runs on this thread, or another thread records a ledger.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, memory_ledger
        >>> x = torch.ones(4096, requires_grad=True)
        >>> ledger = memory_ledger(lambda: checkpoint(lambda x: x.sin().exp(), x).sum().backward())
        >>> [phase.name for phase in ledger.phases]
        ['forward', 'backward']
        >>> [(holder.nbytes, holder.reason.value) for holder in ledger.peak.holders if holder.reason]
        [(16384, 'backward'), (16384, 'backward'), (16384, 'gradient')]
    """
    if step is ... and not kwargs:  # the default is not None, which `memory_ledger(step())` would pass
        return ledger_of(None)
    if not callable(step):
        advice = "Write `memory_ledger(step, *args)`, not `memory_ledger(step())`, or `with memory_ledger() as ledger: step()`."
        raise wrong(step, "step", "a function to run", advice)
    with ledger_of(None) as ledger:
        step(*args, **kwargs)
    return ledger


@contextlib.contextmanager
def ledger_of(model: torch.nn.Module | None) -> Iterator[MemoryLedger]:
    """Yields the ledger of a block; modules have their names in the model, or else in the outermost called module."""
    giving_way.get(threading.get_ident(), lambda: None)()
    if is_profiling():
        raise RuntimeError(
            "A memory ledger cannot begin while a profiler runs on this thread: torch allows a single profiler for each "
            "thread. First leave the block of the profiler, or of the ledger around this call."
        )
    ledger, marks = MemoryLedger(), Marks()
    older = OlderMemory(marks)
    profile = profile_memory()
    with noting_out_of_memory(ledger.causes_now):
        try:
            with profile, watch(marks, model):
                yield ledger
        finally:
            marks.is_open = False
            older.forget()
            ledger.fill(rows_of(profile.events(), marks), older.sizes)
