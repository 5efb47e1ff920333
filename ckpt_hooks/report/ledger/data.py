"""The data of a ledger: allocations, changes, entries of regions, phases, and the peak."""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ckpt_hooks._core.holdings import Reason

from .allocations import Allocation, Change, Hold, Maker, RowReader
from .holders import Holder, LedgerPeak, holders_at
from .phases import Phase, phases_of
from .regions import RegionEntry
from .rows import Row

__all__ = ["LedgerData"]


class LedgerData:
    """The memory of one device in a step; see :class:`MemoryLedger` for the attributes."""

    device: str
    base_nbytes: int
    allocations: Sequence[Allocation]
    changes: Sequence[Change]
    devices: Sequence[str]
    entries: Mapping[int, RegionEntry]

    def __getattr__(self, name: str) -> Any:
        if name in LedgerData.__annotations__:
            raise RuntimeError(f"{name!r} of a ledger was read while its block runs. Read it when the block has ended.")
        return object.__getattribute__(self, name)  # which raises

    def fill(self, rows: Sequence[Row], differentiable: Set[int], older: Mapping[int, int], device: str | None = None) -> None:
        """Takes the rows of the step.

        Args:
            rows: The rows.
            differentiable: The runs of operators which made a node of autograd.
            older: The sizes of older storages on the host, by address.
            device: The device whose memory counts; None for the first accelerator, or else the host.
        """
        devices = list(dict.fromkeys(str(row.device) for row in rows if row.mark is None)) or ["cpu"]
        self.device = device or next((name for name in devices if name != "cpu"), "cpu")
        is_on_host = self.device == "cpu"
        replay = RowReader(older if is_on_host else {}, self.device, differentiable)
        replay.run(rows)
        first = next((row for row in rows if row.mark is None and str(row.device) == self.device), None)
        self.base_nbytes = sum(older.values()) if is_on_host or first is None else first.total - first.nbytes
        self.allocations, self.changes, self.entries = tuple(replay.allocations), tuple(replay.changes), replay.entries
        self.devices, self._taken = tuple(devices), (rows, differentiable, older)
        for allocation in self.allocations:
            _note_backward(allocation, self.phases)

    @functools.cached_property
    def peak(self) -> LedgerPeak:
        """The moment with the most memory in use; the first of several."""
        at = max(range(len(self.changes)), key=lambda change: self.changes[change].live, default=-1)
        if at >= 0 and self.changes[at].live <= 0:
            at = -1
        live = self.changes[at].live if at >= 0 else 0
        holders = self.holders_at(at)
        new = sum(holder.nbytes for holder in holders)
        number = self.changes[at].allocation if at >= 0 else None
        phase = next((phase.name for phase in self.phases if phase.begin <= at < phase.end), "forward")
        origin = None if number is None else self.allocations[number].origin
        return LedgerPeak(live, self.base_nbytes + live, self.base_nbytes + live - new, at, phase, origin, holders)

    def holders_at(self, change: int) -> tuple[Holder, ...]:
        """Returns what is in use after a change, of what was allocated in the ledger; the largest first.

        Args:
            change: The index of the change.
        """
        return holders_at(self.allocations, change)

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, each a :class:`Phase`, in order."""
        return phases_of(self.changes)


def _note_backward(allocation: Allocation, phases: Sequence[Phase]) -> None:
    """Notes a result which a backward made, used and freed."""
    if allocation.origin.maker in _IN_BACKWARD and allocation.freed is not None:
        phase = phases[bisect.bisect_right(phases, allocation.born, key=operator.attrgetter("begin")) - 1]
        if phase.name == "backward" and allocation.freed < phase.end:
            reason = _IN_BACKWARD[allocation.origin.maker]
            allocation.holds.append(Hold(reason, None, None, allocation.born, allocation.freed))


_IN_BACKWARD = {Maker.RECOMPUTE: Reason.RECOMPUTED, Maker.BACKWARD: Reason.BACKWARD}
