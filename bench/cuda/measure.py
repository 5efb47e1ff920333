"""Times and memory of several ways to run one program on a device, and the table of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from train_charlm import peak_bytes

Step = Callable[[], object]

#: The row that others are compared with.
REFERENCE = "torch"


@dataclass
class Row:
    """What one way to run a program takes.

    Attributes:
        table: The program.
        name: The way.
        figures: Microseconds, bytes and ratios to the row ``torch`` of the same table, by the names of :data:`COLUMNS`.
        exact: Whether gradients are bitwise those without checkpointing; None where that was not asked.
        note: What else there is to say, as that it ran out of memory.
    """

    table: str
    name: str
    figures: dict[str, float] = field(default_factory=dict)
    exact: bool | None = None
    note: str = ""


_MIB = 2**20
#: Titles and formats: of microseconds or bytes a step, and of what divides them in the table.
COLUMNS: dict[str, tuple[str, str, float]] = {
    "wall_us": ("us a step", ",.1f", 1),
    "wall_ratio": ("of torch's", ".3f", 1),
    "host_us": ("us of host", ",.1f", 1),
    "host_ratio": ("of torch's", ".3f", 1),
    "peak_bytes": ("peak MiB", ",.2f", _MIB),
    "peak_ratio": ("of torch's", ".3f", 1),
    "active_bytes": ("active MiB", ",.0f", _MIB),
    "reserved_bytes": ("reserved MiB", ",.0f", _MIB),
    "python_bytes": ("Python bytes", ",.0f", 1),
}


@dataclass(frozen=True)
class Bench:
    """Where and how long to measure.

    Attributes:
        device: The device.
        rounds: How often each way runs in turn, at most.
        seconds: After how long a table has no more rounds, if it has had half of them.
        slice_seconds: How long a way runs in one round, at least one step.
        is_tiny: Whether programs are to be as small as they can, since nobody looks at the figures.
    """

    device: torch.device
    rounds: int = 15
    seconds: float = 6.0
    slice_seconds: float = 0.03
    is_tiny: bool = False

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.get_device_module(self.device).synchronize()

    def times(self, steps: Mapping[str, Step]) -> dict[str, tuple[float, float]]:
        """Times steps in turn; returns for each the median seconds until the device is done, and until the host is.

        The latter is what the host takes to tell the device what to do. The device is idle when a slice begins.
        """
        for step in steps.values():
            for _ in range(2):
                step()
        counts = {name: max(1, round(self.slice_seconds / self._slice(step, 2)[0])) for name, step in steps.items()}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        order, end = list(steps), perf_counter() + self.seconds
        for number in range(self.rounds):
            if 2 * number >= self.rounds and perf_counter() > end:
                break
            for name in order:
                found[name].append(self._slice(steps[name], counts[name]))
            order.append(order.pop(0))
        return {name: (median(wall for wall, _ in all_), median(host for _, host in all_)) for name, all_ in found.items()}

    def _slice(self, step: Step, count: int) -> tuple[float, float]:
        gc.collect(0)
        self.synchronize()
        start = perf_counter()
        for _ in range(count):
            step()
        told = perf_counter()
        self.synchronize()
        return (perf_counter() - start) / count, (told - start) / count

    def memory(self, step: Step) -> dict[str, float]:
        """Measures the bytes of tensors at the worst moment of a step beyond those before it, and what the allocator had."""
        found: dict[str, float] = {"peak_bytes": peak_bytes(step, self.device)}
        if self.device.type == "cuda":
            self.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            step()
            self.synchronize()
            found["active_bytes"] = torch.cuda.memory_stats(self.device).get("active_bytes.all.peak", 0)
            found["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return found

    def table(self, name: str, steps: Mapping[str, Step], *, has_memory: bool = True) -> list[Row]:
        """Measures ways to run a program; those that run out of memory say so, and the others go on."""
        rows = {key: Row(name, key) for key in steps}
        able: dict[str, Step] = {}
        for key, step in steps.items():
            try:
                step()
                if has_memory:
                    rows[key].figures.update(self.memory(step))
                able[key] = step
            except torch.OutOfMemoryError:
                rows[key].note = "out of memory"
            self._tidy_up()
        for key, (wall, host) in self.times(able).items():
            rows[key].figures.update(wall_us=wall * 1e6, host_us=host * 1e6)
        return compared(list(rows.values()))

    def _tidy_up(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def compared(rows: list[Row]) -> list[Row]:
    """Adds the ratios to the row ``torch``, or to that of the same name with ``torch`` in the place of its first word."""
    by_name = {row.name: row for row in rows}
    for row in rows:
        own = f"{REFERENCE}, {row.name.partition(', ')[2]}"
        other = by_name.get(own) or by_name.get(REFERENCE)
        for key in ("wall", "host", "peak"):
            unit = "bytes" if key == "peak" else "us"
            mine, theirs = row.figures.get(f"{key}_{unit}"), other.figures.get(f"{key}_{unit}") if other else None
            if mine is not None and theirs:
                row.figures[f"{key}_ratio"] = mine / theirs
    return rows


def table_of(rows: list[Row]) -> str:
    """Lays out rows, those of one program below its name."""
    width = max([30, *(len(row.name) + 2 for row in rows)])
    lines = ["  ".join([f"{'':<{width}}", *(f"{title:>12}" for title, _, _ in COLUMNS.values()), " exact"])]
    table = None
    for row in rows:
        if row.table != table:
            table = row.table
            lines += ["", table]
        cells = [f"{row.figures[key] / unit:{form}}" if key in row.figures else "-" for key, (_, form, unit) in COLUMNS.items()]
        exact = {None: "", True: "   yes", False: "    NO"}[row.exact]
        lines.append("  ".join([f"  {row.name:<{width - 2}}", *(f"{cell:>12}" for cell in cells), exact, row.note]).rstrip())
    return "\n".join(lines)


def as_dict(row: Row) -> dict[str, Any]:
    """Returns a row for JSON."""
    return {"table": row.table, "name": row.name, **row.figures, "exact": row.exact, "note": row.note}
