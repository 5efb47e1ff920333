"""Traces: what each region dropped, held and computed again, step by step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_hooks._core.descriptions import region_in_words
from ckpt_hooks._core.events import Observer, Operator, Region, TensorInfo, observe
from ckpt_hooks._core.holdings import Holding, Reason, Saved
from ckpt_hooks._core.misuse import OfThisProcess, checked_flag
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.profiling import profiler_range

from .formats import Exported, MemoryEvent, frame_of, snapshot_of
from .printing import (
    REMEDIES,
    Printed,
    Table,
    alike,
    count_of,
    fold_names,
    format_bytes,
    json_of,
    name_pattern,
    noting_out_of_memory,
    times,
)


@dataclasses.dataclass
class RegionTrace:
    """An entry into a region, in forward. A storage counts once in a step, for the first region that reports it.

    Attributes:
        kind: ``"function"`` or ``"recorded"``.
        name: The region's name.
        path: Names of the regions around and its own, outermost first.
        site: The line that entered, such as ``"model.py:12"``; None if unknown.
        module: The module that the region runs, or the module around, by its name in the outermost module, such as
            ``"layers.0"``; None without a module.
        operators: Number of operators in forward, without those of inner regions; None unless counted.
        dropped_bytes: Bytes of storages that were saved for backward and freed before backward.
        held_bytes: Bytes of storages held from the end of forward on, by the value of their :class:`Reason`, without parameters
            and tensors on the host.
        offloaded_bytes: Bytes of tensors moved to the host.
        recomputes: Number of recomputes.
        recomputed_operators: Number of operators in recomputes; None unless counted.
        recompute_seconds: Seconds of recomputes, including inner regions; host time.
        regions: The inner regions.
        policy: The policy in words; None without a policy.
        dropped_by: The share of ``dropped_bytes`` by operator; empty unless operators are counted.
    """

    kind: str
    name: str
    path: tuple[str, ...]
    site: str | None
    module: str | None
    operators: int | None = None
    dropped_bytes: int = 0
    held_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    offloaded_bytes: int = 0
    recomputes: int = 0
    recomputed_operators: int | None = None
    recompute_seconds: float = 0.0
    regions: tuple[RegionTrace, ...] = ()
    policy: str | None = None
    dropped_by: dict[str, int] = dataclasses.field(default_factory=dict)

    to_json = json_of

    def walk(self) -> Iterator[RegionTrace]:
        """Yields the region and all regions inside, each before those inside."""
        yield self
        for region in self.regions:
            yield from region.walk()

    def copy(self) -> RegionTrace:
        """Returns the region as it is now, regions inside included."""
        by_operator = {name: nbytes for name, nbytes in self.dropped_by.items() if nbytes}
        inside = tuple(region.copy() for region in self.regions)
        return dataclasses.replace(self, held_bytes={**self.held_bytes}, dropped_by=by_operator, regions=inside)


@dataclasses.dataclass(repr=False)
class StepTrace(Printed):
    """A training step in a trace: its outermost regions, and totals over all regions.

    Attributes:
        regions: The outermost regions, in order.
        late_recomputes: Recomputes in this step of regions of earlier steps.
        recompute_seconds: Seconds of all recomputes; nested recomputes count once.
        dropped_bytes: Bytes dropped by all regions.
        held_bytes: Bytes held by all regions, by reason, the largest first.
        offloaded_bytes: Bytes moved to the host by all regions.
        recomputes: Number of recomputes, including those of regions of earlier steps.
        operators: Number of operators in forward, in regions; None unless counted.
        recomputed_operators: Number of operators in recomputes of this step's regions; None unless counted.
    """

    regions: tuple[RegionTrace, ...]
    late_recomputes: int
    recompute_seconds: float
    dropped_bytes: int = dataclasses.field(init=False, default=0)
    held_bytes: dict[str, int] = dataclasses.field(init=False)
    offloaded_bytes: int = dataclasses.field(init=False, default=0)
    recomputes: int = dataclasses.field(init=False)
    operators: int | None = dataclasses.field(init=False, default=None)
    recomputed_operators: int | None = dataclasses.field(init=False, default=None)

    to_json = json_of

    def __post_init__(self) -> None:
        self.recomputes, held_bytes = self.late_recomputes, collections.Counter[str]()
        for region in self.walk():
            held_bytes.update(region.held_bytes)
            self.dropped_bytes += region.dropped_bytes
            self.offloaded_bytes += region.offloaded_bytes
            self.recomputes += region.recomputes
            if region.operators is not None and region.recomputed_operators is not None:
                self.operators = (self.operators or 0) + region.operators
                self.recomputed_operators = (self.recomputed_operators or 0) + region.recomputed_operators
        self.held_bytes = dict(held_bytes.most_common())

    def _headline(self) -> str:
        parts = [
            count_of(sum(1 for _ in self.walk()), "region"),
            f"dropped {format_bytes(self.dropped_bytes)}",
            f"held {format_bytes(sum(self.held_bytes.values()))}",
        ]
        if self.offloaded_bytes:
            parts.append(f"to host {format_bytes(self.offloaded_bytes)}")
        late = f", {self.late_recomputes} of earlier steps" if self.late_recomputes else ""
        parts.append(f"{count_of(self.recomputes, 'recompute')} in {self.recompute_seconds * 1e3:.1f} ms{late}")
        if self.operators is not None:
            parts.append(f"{self.operators} operators, {self.recomputed_operators} again")
        return ", ".join(parts)

    def _tables(self) -> Iterator[Table]:
        yield Table(_HEADER, [*_rows_of(self.regions, "")], _NUMBERS, (0,))
        yield Table(["held", "reason"], [[format_bytes(nbytes), reason] for reason, nbytes in self.held_bytes.items()], (0,))

    def scalars(self) -> dict[str, float]:
        """Returns the step as a flat dict of numbers for metric loggers.

        Returns:
            ``recomputes``, ``recompute_seconds``, and in bytes ``dropped``, ``held`` and ``offloaded``: for the step, and for
            each outermost region by its module or name, such as ``dropped/layers.0``.

        Example:
            >>> import torch
            >>> from ckpt_hooks import checkpoint, trace
            >>> x = torch.ones(256, requires_grad=True)
            >>> with trace() as regions:
            ...     checkpoint(torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.Tanh()), x).sum().backward()
            >>> regions.scalars()["dropped"]
            2048
        """
        scalars: dict[str, float] = dict.fromkeys(_SCALARS, 0)
        for root in self.regions:
            tree = [*root.walk()]
            numbers = (
                *(sum(inner.recomputes for inner in tree), root.recompute_seconds, sum(inner.dropped_bytes for inner in tree)),
                *(sum(sum(inner.held_bytes.values()) for inner in tree), sum(inner.offloaded_bytes for inner in tree)),
            )
            for name, number in zip(_SCALARS, numbers, strict=True):
                for key in (name, f"{name}/{root.module or root.name}"):
                    scalars[key] = scalars.get(key, 0) + number
        # These two are not sums: a recompute may run inside another region's recompute, or belong to an earlier step.
        return {**scalars, "recomputes": self.recomputes, "recompute_seconds": self.recompute_seconds}

    def walk(self) -> Iterator[RegionTrace]:
        """Yields all regions, each before those inside."""
        return (inner for region in self.regions for inner in region.walk())


#: The numbers of a step, and of each outermost region.
_SCALARS = ("recomputes", "recompute_seconds", "dropped", "held", "offloaded")

# Tables. Equal regions share a row, as in ``"x12 layers.0-11 Block"``, with the figures of the first and a mean time.

_HEADER = ("region", "dropped", "held", "to host", "recomputes", "ms each", "operators", "again", "line", "kind")
_NUMBERS = range(1, 8)
_LARGEST = 5  # regions in a note


def _rows_of(regions: Sequence[RegionTrace], indent: str) -> Iterator[list[str]]:
    for group in alike(regions, _signature):
        first = group[0]
        recomputes, seconds = first.recomputes * len(group), sum(region.recompute_seconds for region in group)
        yield [
            indent + _label(group),
            format_bytes(first.dropped_bytes),
            format_bytes(sum(first.held_bytes.values())),
            format_bytes(first.offloaded_bytes) if first.offloaded_bytes else "",
            str(first.recomputes),
            f"{seconds / recomputes * 1e3:.2f}" if recomputes else "",
            *("" if number is None else str(number) for number in (first.operators, first.recomputed_operators)),
            first.site or "",
            first.kind,
        ]
        yield from _rows_of([inner for region in group for inner in region.regions], f"{indent}  ")


def _signature(region: RegionTrace) -> object:
    return (
        *(name_pattern(region.module or ""), name_pattern(region.name), region.kind),
        *(region.site, region.operators, region.dropped_bytes, tuple(sorted(region.held_bytes.items()))),
        *(region.offloaded_bytes, region.recomputes, region.recomputed_operators),
        tuple(map(_signature, region.regions)),
    )


def _label(group: Sequence[RegionTrace]) -> str:
    """Returns number, modules and names of equal regions, as in ``"x12 layers.0-11 Block"``."""
    modules = fold_names(region.module or "" for region in group)
    names = fold_names(region.name for region in group)
    return " ".join(filter(None, (times(group), modules if modules != names else "", names)))


class _Running(threading.local):
    def __init__(self) -> None:
        self.recomputes: list[tuple[int, float]] = []
        self.ranges: list[tuple[int, Any]] = []


class Trace(OfThisProcess, Observer, Printed, Exported):
    """What the regions of a block did, step by step: yielded by :func:`trace`. Keeps no tensor and no frame alive."""

    _json = ("steps",)
    to_json = json_of

    def __init__(self, *, operators: bool, profiler_ranges: bool) -> None:
        self.wants_operators = operators
        self._ranges = profiler_ranges
        self._lock = threading.Lock()
        self._running = _Running()
        self._done: list[StepTrace] = []
        self._begin_step()

    def _begin_step(self) -> None:
        self._roots: list[RegionTrace] = []
        # This step's regions, by number.
        self._entries: dict[int, RegionTrace] = {}
        self._regions: dict[int, Region] = {}
        self._open: set[int] = set()
        self._made: dict[tuple[int, int], str] = {}  # operators, by the region and the storage of their results
        self._billed: set[int] = set()  # storages that some region holds
        self._dropped: dict[int, tuple[int, int, int]] = {}  # by storage: region, position, bytes
        self._freed: dict[int, tuple[int, int, int]] = {}  # likewise, for storages freed since, which count as dropped
        # Storages, by region and the position of the tensor among those that the region saved.
        self._positions: dict[tuple[int, int], int] = {}
        self._late, self._seconds = 0, 0.0

    @property
    def steps(self) -> tuple[StepTrace, ...]:
        """The steps so far, each a :class:`StepTrace`; the last may still run."""
        return (*self._done, self._present()) if self._roots or self._late else tuple(self._done)

    def _present(self) -> StepTrace:
        return StepTrace(tuple(region.copy() for region in self._roots), self._late, self._seconds)

    def step(self) -> None:
        """Marks the end of a step: later regions belong to the next one.

        Raises:
            RuntimeError: If a region is open.
        """
        opened = [region for number in sorted(self._open) if (region := self._regions[number]).frame() is not None]
        if opened:
            raise RuntimeError(
                f"step() of a trace was called inside of {region_in_words(opened[0].path)}, where a step cannot end. Call "
                "step() outside of regions, after backward."
            )
        self._done.append(self._present())
        self._begin_step()

    def _headline(self) -> str:
        steps = self.steps
        if not steps:
            return "no region has run"
        totals = steps[-1]._headline()
        return totals if len(steps) == 1 else f"step {len(steps) - 1}: {totals}"

    def _tables(self) -> Iterator[Table]:
        for step in self.steps[-1:]:
            yield from step._tables()

    def to_snapshot(self) -> dict[str, Any]:
        """Returns what regions hold as a dict like ``torch.cuda.memory._snapshot()`` makes.

        Each step allocates what its regions hold, in the order of forward, and frees all of it in the opposite order. The stack
        of each has the reason, the line, and the names of the regions around. A trace knows only bytes: addresses and times
        have no meaning. The snapshot of a :func:`ckpt_hooks.memory_ledger` has those of the step, and all memory.

        Returns:
            ``segments``, and ``device_traces`` with the steps on device 0, whatever device the regions were on.
        """
        events: list[MemoryEvent] = []
        for step in self.steps:
            at, begin = 0, len(events)
            for region in step.walk():
                names = [frame_of(name, "region") for name in (_label([region]), *reversed(region.path[:-1]))]
                for reason, nbytes in region.held_bytes.items():
                    events.append(MemoryEvent(True, at, nbytes, [frame_of(reason, "reason", region.site), *names]))
                    at += nbytes
            events += [event._replace(is_alloc=False) for event in reversed(events[begin:])]
        return snapshot_of(event for event in events if event.nbytes)

    def scalars(self) -> dict[str, float]:
        """Returns the numbers of the latest step; see :meth:`StepTrace.scalars`."""
        return (self.steps or (self._present(),))[-1].scalars()

    def largest(self) -> list[str]:
        """Returns lines on the live regions of this step that hold most."""
        living = [self._entries[number] for number, region in self._regions.items() if region.frame() is not None]

        def key(region: RegionTrace) -> object:
            return name_pattern(region.module or ""), name_pattern(region.name), region.site, tuple(region.held_bytes)

        groups = [
            (sum(sum(region.held_bytes.values()) for region in group), group)
            for group in alike((entry for entry in living if entry.held_bytes), key)
        ]
        lines = []
        for size, group in sorted(groups, key=lambda sized: -sized[0])[:_LARGEST]:
            held_bytes = group[0].held_bytes
            remedy = REMEDIES.get(Reason(max(held_bytes, key=held_bytes.__getitem__)), "")
            words = "  ".join((format_bytes(size), _label(group), group[0].site or "", ", ".join(held_bytes)))
            lines.append(words + (f": {remedy}" if remedy else ""))
        return lines

    def _drop(self, number: int, storage: int, nbytes: int) -> None:
        entry, name = self._entries.get(number), self._made.get((number, storage))
        if entry is not None:
            entry.dropped_bytes += nbytes
            if name is not None:
                entry.dropped_by[name] = entry.dropped_by.get(name, 0) + nbytes

    def _hold(self, entry: RegionTrace, reason: Reason, storage: int | None, nbytes: int) -> None:
        """Counts a storage for a region, once in a step; memory without a storage counts if a user's hooks hold it."""
        if storage not in self._billed and (storage is not None or reason is Reason.HOOKS):
            entry.held_bytes[reason.value] = entry.held_bytes.get(reason.value, 0) + nbytes
            if storage is not None:
                self._billed.add(storage)

    # Events

    def entered(self, region: Region) -> None:
        self._begin_range(region, "forward")
        if region.in_recompute:
            return
        count = 0 if self.wants_operators else None
        place = region.kind, region.path[-1], region.path, region.site, region.module
        entry = self._entries[region.id] = RegionTrace(*place, operators=count, recomputed_operators=count)
        self._regions[region.id] = region
        self._open.add(region.id)
        outer = None if region.parent is None else self._entries.get(region.parent)
        if outer is None:
            self._roots.append(entry)
        else:
            outer.regions += (entry,)

    def exited(self, region: Region, error: BaseException | None) -> None:
        self._end_range(region)
        if region.id in self._entries and (frame := region.frame()) is not None:
            self._entries[region.id].policy = frame.policy_in_words()
        self._open.discard(region.id)

    def ran(self, region: Region, operator: Operator) -> None:
        running = self._running.recomputes
        entry = self._entries.get(running[-1][0] if operator.in_recompute and running else region.id)
        if entry is not None and operator.in_recompute:
            entry.recomputed_operators = (entry.recomputed_operators or 0) + 1
        elif entry is not None:
            entry.operators = (entry.operators or 0) + 1
            for output in () if operator.is_view else operator.outputs:
                if output.storage is not None:
                    self._made.setdefault((region.id, output.storage), operator.name)

    def saved(self, region: Region, saved: Saved, tensor: TensorInfo) -> None:
        storage, entry = tensor.storage, self._entries.get(region.id)
        if storage is None or entry is None:
            return
        if saved.fate is Reason.DROPPED:
            self._dropped.setdefault(storage, (region.id, saved.position, tensor.storage_nbytes))
            self._positions[region.id, saved.position] = storage
        elif saved.fate is Reason.NOT_REPLAYED and saved.position < 0:
            # Saved by TorchScript: only the graph holds the tensor, so the frame's ``held`` does not report it.
            self._hold(entry, saved.fate, storage, tensor.storage_nbytes)

    def let_go(self, region: Region, position: int) -> None:
        storage = self._positions.pop((region.id, position), None)
        if storage is None:
            return
        if self._dropped.get(storage, ())[:2] == (region.id, position):
            del self._dropped[storage]  # backward is done with the tensor
        elif region.id in self._open and storage in self._freed and storage not in self._positions.values():
            # The last handle of the storage died within forward, so no backward will ask for the storage: nothing was dropped.
            number, _, nbytes = self._freed.pop(storage)
            self._drop(number, storage, -nbytes)

    def freed(self, storage: int) -> None:
        dropped = self._dropped.pop(storage, None)
        if dropped is not None and storage not in self._billed and graph_task_id() == -1 and dropped[0] in self._entries:
            self._drop(dropped[0], storage, dropped[2])
            self._freed[storage] = dropped

    def held(self, region: Region, holdings: Sequence[Holding]) -> None:
        entry = self._entries.get(region.id)
        if entry is None:
            return
        for holding in holdings:
            for storage, size in holding.parts or ((holding.storage, holding.storage_nbytes),):
                if holding.reason is not Reason.OFFLOADED:
                    self._hold(entry, holding.reason, storage, holding.nbytes if storage is None else size)

    def moved(self, region: Region, nbytes: int, *, to_host: bool) -> None:
        entry = self._entries.get(region.id)
        if to_host and entry is not None:
            entry.offloaded_bytes += nbytes

    def recomputing(self, region: Region, *, in_order: bool) -> None:
        self._begin_range(region, "recompute")
        self._running.recomputes.append((region.id, time.perf_counter()))

    def recomputed(self, region: Region, error: BaseException | None) -> None:
        running = self._running.recomputes
        while running:
            number, begun = running.pop()
            if number == region.id:
                break
        else:
            return
        seconds = time.perf_counter() - begun
        self._end_range(region)
        entry = self._entries.get(region.id)
        with self._lock:
            if not running:
                self._seconds += seconds
            if entry is not None:
                entry.recomputes += 1
                entry.recompute_seconds += seconds
            elif not region.in_recompute:
                self._late += 1

    # Ranges of the profiler

    def _begin_range(self, region: Region, what: str) -> None:
        if self._ranges:
            opened = profiler_range(f"{what} of region {region.module or '/'.join(region.path)}")
            opened.__enter__()
            self._running.ranges.append((region.id, opened))

    def _end_range(self, region: Region) -> None:
        ranges = self._running.ranges
        if any(number == region.id for number, _ in ranges):
            while ranges:  # ends ranges of regions inside that were left without an exit
                number, opened = ranges.pop()
                opened.__exit__(None, None, None)
                if number == region.id:
                    break


@contextlib.contextmanager
def trace(*, operators: bool = False, profiler_ranges: bool = False) -> Iterator[Trace]:
    """Records what regions drop, hold and recompute, for regions whose forward begins in the block on this thread.

    Backward may run in the block or after it. If an accelerator's ``torch.OutOfMemoryError`` leaves the block, it gets a note
    with the regions that hold most, their lines, and what would reduce it. Call ``step()`` at the end of each step to compare
    steps.

    Args:
        operators: Whether to count operators, at some tens of microseconds for each. Without, a trace takes some tens of
            microseconds for each tensor that a region saves.
        profiler_ranges: Whether forward and recomputes appear as ranges of ``torch.profiler``, such as
            ``"recompute of region layers.0"``.

    Yields:
        The :class:`Trace`. It grows as regions run, and keeps no tensor alive.

    Raises:
        TypeError: If an option is not a boolean.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.report import trace
        >>> x = torch.ones(256, requires_grad=True)
        >>> with trace() as regions:
        ...     checkpoint(lambda x: x.sin().cos().exp(), x).sum().backward()
        >>> (step,) = regions.steps
        >>> step.dropped_bytes, step.recomputes
        (2048, 1)
    """
    observer = Trace(
        operators=checked_flag(operators, "operators"), profiler_ranges=checked_flag(profiler_ranges, "profiler_ranges")
    )
    with noting_out_of_memory(observer.largest), observe(observer):
        yield observer
