"""Traces: what each region dropped, held and computed again, step by step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_hooks._core.events import Observer, Operator, Region, TensorInfo
from ckpt_hooks._core.holdings import Holding, Reason, Saved
from ckpt_hooks._core.misuse import OfThisProcess, checked_flag
from ckpt_hooks._core.settings import observe
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.profiling import profiler_range

from .formatting import Printed, Table, json_of, noting_out_of_memory
from .steps import RegionTrace, StepTrace, largest_of


class _Running(threading.local):
    def __init__(self) -> None:
        self.recomputes: list[tuple[int, float]] = []
        self.ranges: list[tuple[int, Any]] = []


class Trace(OfThisProcess, Observer, Printed):
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
        # Of this step's regions, by number.
        self._entries: dict[int, RegionTrace] = {}
        self._regions: dict[int, Region] = {}
        self._open: set[int] = set()
        self._made: dict[tuple[int, int], str] = {}  # operators, by the region and the storage of their results
        self._billed: set[int] = set()  # storages that some region holds
        self._dropped: dict[int, tuple[int, int, int]] = {}  # by storage: region, position, bytes
        self._freed: dict[int, tuple[int, int, int]] = {}  # likewise, of those that are freed and counted
        self._positions: dict[tuple[int, int], int] = {}  # storages, by region and position
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
                f"step() of a trace was called inside of region {'/'.join(opened[0].path)!r}, where a step cannot end. Call it "
                "outside of regions, after backward."
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

    def largest(self) -> list[str]:
        """Returns lines on the regions of this step that hold most, and live still."""
        living = [self._entries[number] for number, region in self._regions.items() if region.frame() is not None]
        return largest_of([entry for entry in living if entry.held_bytes])

    def _drop(self, number: int, storage: int, nbytes: int) -> None:
        entry, name = self._entries.get(number), self._made.get((number, storage))
        if entry is not None:
            entry.dropped_bytes += nbytes
            if name is not None:
                entry.dropped_by[name] = entry.dropped_by.get(name, 0) + nbytes

    def _hold(self, entry: RegionTrace, reason: Reason, storage: int | None, nbytes: int) -> None:
        """Bills a region for a storage, once a step; memory without one is that of the user's hooks, who knows where."""
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
            # By TorchScript: in the graph alone, so no frame tells that it is held.
            self._hold(entry, saved.fate, storage, tensor.storage_nbytes)

    def let_go(self, region: Region, position: int) -> None:
        storage = self._positions.pop((region.id, position), None)
        if storage is None:
            return
        if self._dropped.get(storage, ())[:2] == (region.id, position):
            del self._dropped[storage]  # backward is done with it
        elif region.id in self._open and storage in self._freed and storage not in self._positions.values():
            # No backward will ask for it, as for an output that a policy kept inside, after the last use.
            number, _, nbytes = self._freed.pop(storage)
            self._drop(number, storage, -nbytes)

    def freed(self, storage: int) -> None:
        found = self._dropped.pop(storage, None)
        if found is not None and storage not in self._billed and graph_task_id() == -1 and found[0] in self._entries:
            self._drop(found[0], storage, found[2])
            self._freed[storage] = found

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
            while ranges:  # regions that were left without an end are inside
                number, opened = ranges.pop()
                opened.__exit__(None, None, None)
                if number == region.id:
                    break


@contextlib.contextmanager
def trace(*, operators: bool = False, profiler_ranges: bool = False) -> Iterator[Trace]:
    """Traces the regions whose forward begins in a block, on this thread: what they drop, hold and compute again.

    Backward may run in the block or behind it. An accelerator's ``torch.OutOfMemoryError`` which leaves the block gets a note:
    the regions, with their lines, that hold most, and what takes that away. Call ``step()`` of the trace at the end of each
    step, to compare steps.

    Args:
        operators: Whether operators are counted, at some 20 us an operator.
        profiler_ranges: Whether forward and recomputes of a region are ranges of ``torch.profiler``, as in
            ``"recompute of region layers.0"``.

    Yields:
        The :class:`Trace`. It grows as regions run.

    Raises:
        TypeError: If an option is not a boolean.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.report import trace
        >>> x = torch.ones(256, requires_grad=True)
        >>> with trace() as found:
        ...     checkpoint(lambda x: x.sin().cos().exp(), x).sum().backward()
        >>> (step,) = found.steps
        >>> step.dropped_bytes, step.recomputes
        (2048, 1)
    """
    found = Trace(
        operators=checked_flag(operators, "operators"),
        profiler_ranges=checked_flag(profiler_ranges, "profiler_ranges"),
    )
    with noting_out_of_memory(found.largest), observe(found):
        yield found
