"""A ledger: the memory of a step at each moment, and its peak. Plain values, no tensors."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import operator
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks.report.advice import Advice, advice_on_ledger, table_of_advice
from ckpt_hooks.report.formatting import Printed, Table, count_of, format_bytes

from .allocations import Allocation, Change, Hold, Maker, Origin, Replay
from .holders import Holder, LedgerPeak, holders_at, maker_in_words, table_of_holders, table_of_phases
from .phases import Phase, phases_of
from .regions import RegionEntry
from .rows import Row

if TYPE_CHECKING:
    from ckpt_hooks.report.pictures.picture import Picture

__all__ = ["MemoryLedger"]


class MemoryLedger(Printed):
    """The memory of one device in a step: every allocation, and what made it.

    ``print`` shows peak, phases, and the largest holders at the peak. In a block, the ledger can be read when the block has
    ended.

    Attributes:
        device: The device, as in ``"cpu"``.
        base_nbytes: The bytes in use when the ledger began: of the tensors that Python knew, for the host; as the allocator
            counts, for an accelerator.
        allocations: The allocations, each an :class:`Allocation`, in the order of time.
        changes: Allocations and frees, each a :class:`Change`, in the order of time. ``live`` of each is the sum so far.
        devices: All devices which have allocated.
        entries: The entries of regions, each a :class:`RegionEntry`, by number, in order.
    """

    device: str
    base_nbytes: int
    allocations: Sequence[Allocation]
    changes: Sequence[Change]
    devices: Sequence[str]
    entries: Mapping[int, RegionEntry]

    def __getattr__(self, name: str) -> Any:
        if name in MemoryLedger.__annotations__:
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
        replay = Replay(older if is_on_host else {}, self.device, differentiable)
        replay.run(rows)
        first = next((row for row in rows if row.mark is None and str(row.device) == self.device), None)
        self.base_nbytes = sum(older.values()) if is_on_host or first is None else first.total - first.nbytes
        self.allocations, self.changes, self.entries = tuple(replay.allocations), tuple(replay.changes), replay.entries
        self.devices, self._taken = tuple(devices), (rows, differentiable, older)
        for allocation in self.allocations:
            _note_backward(allocation, self.phases)

    def on(self, device: str) -> MemoryLedger:
        """Returns the ledger of another device, as in ``"cpu"``, with the host's memory.

        Raises:
            ValueError: If the device has allocated nothing.
        """
        if device not in self.devices:
            raise ValueError(
                f"nothing was allocated on device {device!r}, but on {', '.join(self.devices)}. Name one of these."
            )
        other = MemoryLedger()
        other.fill(*self._taken, device)
        return other

    def largest_now(self) -> list[str]:
        """Returns lines on what is in use at the end, the largest first."""
        table = table_of_holders(self.holders_at(len(self.changes) - 1), 3)
        return ["  ".join(filter(None, (size, f"x{count}", *others))) for size, count, *others in table.rows]

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

    @functools.cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Wastes that the step shows, each an :class:`Advice` with the bytes that following it gives; the largest first."""
        return advice_on_ledger(self)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Picture:
        """Draws the memory of the step, by blocks of the model; see :func:`ckpt_hooks.report.compare`.

        Args:
            path: A file to write, as in ``"step.png"`` or ``"step.svg"``; None to write none.

        Returns:
            The :class:`Picture`, which notebooks show.

        Raises:
            ImportError: If matplotlib is absent: ``pip install 'ckpt_hooks[plot]'``.
        """
        from ckpt_hooks.report.pictures.panels import panels

        picture = panels({"": self})
        if path is not None:
            picture.save(path)
        return picture

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
        if self.changes:
            yield table_of_phases(self.phases, peak.change)
        if peak.holders:
            table = table_of_holders(peak.holders)
            notes = [table.rest] if table.rest else []
            notes += [f"{format_bytes(peak.older_nbytes)} from before"] if peak.older_nbytes else []
            freed = self.base_nbytes - peak.older_nbytes
            notes += [f"{format_bytes(freed)} from before are freed by then"] if freed else []
            yield table._replace(rest=", ".join(notes))
        yield from table_of_advice(self.advice)

    def to_json(self) -> dict[str, Any]:
        """Returns the ledger as values for ``json.dumps``: each origin once, allocations with the index of theirs."""
        origins: dict[Origin, int] = {}
        rows = [
            {
                "nbytes": one.nbytes,
                "origin": origins.setdefault(one.origin, len(origins)),
                "born": one.born,
                "freed": one.freed,
                "is_gradient": one.is_gradient,
                "holds": [[hold.reason.value, hold.region, hold.begin, hold.end] for hold in one.holds],
            }
            for one in self.allocations
        ]
        return {
            "device": self.device,
            "base_nbytes": self.base_nbytes,
            "peak": self.peak.to_json(),
            "advice": [one.to_json() for one in self.advice],
            "phases": [dataclasses.asdict(phase) for phase in self.phases],
            "origins": [origin._asdict() for origin in origins],
            "allocations": rows,
            "changes": [[change.time, change.allocation, change.nbytes, change.live] for change in self.changes],
        }


def _note_backward(allocation: Allocation, phases: Sequence[Phase]) -> None:
    """Notes that a backward has used what it made, and freed before its end."""
    if allocation.origin.maker in _IN_BACKWARD and allocation.freed is not None:
        phase = phases[bisect.bisect_right(phases, allocation.born, key=operator.attrgetter("begin")) - 1]
        if phase.name == "backward" and allocation.freed < phase.end:
            reason = _IN_BACKWARD[allocation.origin.maker]
            allocation.holds.append(Hold(reason, None, None, allocation.born, allocation.freed))


_IN_BACKWARD = {Maker.RECOMPUTE: Reason.RECOMPUTED, Maker.BACKWARD: Reason.BACKWARD}
