"""A ledger: the memory of a step at each moment, and its peak. Plain values, no tensors."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

from ckpt_hooks.report.advice import Advice, table_of_advice
from ckpt_hooks.report.formatting import Printed, Table, count_of, format_bytes
from ckpt_hooks.report.pictures.panels import panels
from ckpt_hooks.report.pictures.picture import Picture

from .allocations import Origin
from .data import LedgerData
from .holders import maker_in_words, table_of_holders, table_of_phases
from .wastes import wastes_of

__all__ = ["MemoryLedger"]


class MemoryLedger(LedgerData, Printed):
    """The memory of one device in a step: every allocation, with the operator and module that made the allocation.

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
    def advice(self) -> tuple[Advice, ...]:
        """Wastes that the step shows, each an :class:`Advice` with the bytes that following it gives; the largest first."""
        return wastes_of(self)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Picture:
        """Draws the memory of the step, by blocks of the model; see :func:`ckpt_hooks.report.compare`.

        Args:
            path: A file to write, as in ``"step.png"`` or ``"step.svg"``; None to write none.

        Returns:
            The :class:`Picture`, which notebooks show.

        Raises:
            ImportError: If matplotlib is absent: ``pip install 'ckpt_hooks[plot]'``.
        """
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
