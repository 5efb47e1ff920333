"""What is in use at a moment of a step: storages by origin and reason, and tables of these and of phases."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks.report.formatting import Table, alike, count_of, fold_names, format_bytes, name_pattern

from .allocations import Allocation, Maker, Origin
from .phases import Phase

__all__ = ["Holder", "LedgerPeak", "holders_at", "maker_in_words", "table_of_holders", "table_of_phases"]

_MOST = 10  # rows of holders
_MOST_PHASES = 6  # rows of phases, else phases of one name share a row
_BAR = 24  # characters


@dataclasses.dataclass(frozen=True)
class Holder:
    """Storages of one origin, held for one reason.

    Attributes:
        nbytes: Their bytes.
        count: Their number.
        origin: Where they come from.
        reason: The reason of the use; None where the program alone holds the storages.
    """

    nbytes: int
    count: int
    origin: Origin
    reason: Reason | None

    def to_json(self) -> dict[str, Any]:
        """Returns the holder as values for ``json.dumps``."""
        return {
            "nbytes": self.nbytes,
            "count": self.count,
            **self.origin._asdict(),
            "reason": None if self.reason is None else self.reason.value,
        }


@dataclasses.dataclass(frozen=True)
class LedgerPeak:
    """The moment with the most memory in use.

    Attributes:
        nbytes: The bytes in use, above those in use when the ledger began.
        total_nbytes: All bytes in use.
        older_nbytes: Those from before the ledger.
        change: The index of the change that led there; -1 for the begin.
        phase: The phase, as in ``"backward"``.
        origin: Where the last allocation before comes from; None at the begin.
        holders: The storages in use which were allocated in the ledger, by origin and reason, the largest first.
    """

    nbytes: int
    total_nbytes: int
    older_nbytes: int
    change: int
    phase: str
    origin: Origin | None
    holders: tuple[Holder, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the peak as values for ``json.dumps``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        origin = None if self.origin is None else self.origin._asdict()
        return {**values, "origin": origin, "holders": [holder.to_json() for holder in self.holders]}


def holders_at(allocations: Sequence[Allocation], change: int) -> tuple[Holder, ...]:
    """Returns what is in use after a change, the largest first.

    Args:
        allocations: The allocations of a ledger.
        change: The index of the change.
    """
    sizes: collections.Counter[tuple[Origin, Reason | None]] = collections.Counter()
    counts: collections.Counter[tuple[Origin, Reason | None]] = collections.Counter()
    for allocation in allocations:
        if allocation.is_alive_at(change):
            key = allocation.origin, allocation.reason_at(change)
            sizes[key] += allocation.nbytes
            counts[key] += 1
    return tuple(Holder(nbytes, counts[key], *key) for key, nbytes in sizes.most_common())


def table_of_phases(phases: Sequence[Phase], peak: int) -> Table:
    """Returns a table of phases, with a bar for the most bytes in use in each.

    Args:
        phases: The phases.
        peak: The index of the change that led to the peak.
    """
    groups = [[phase] for phase in phases]
    if len(groups) > _MOST_PHASES:
        groups = alike(phases, lambda phase: phase.name)
    most = max(1, *(phase.peak_nbytes for phase in phases))
    rows = []
    for group in groups:
        name = group[0].name if len(group) == 1 else f"x{len(group)} {group[0].name}"
        size = max(phase.peak_nbytes for phase in group)
        has_peak = any(phase.begin <= peak < phase.end for phase in group)
        bar = "█" * max(0, round(_BAR * size / most))
        rows.append([name, bar, format_bytes(size), format_bytes(group[-1].end_nbytes), "peak" if has_peak else ""])
    return Table(["phase", "", "at most", "at its end", ""], rows, (2, 3))


def table_of_holders(holders: Sequence[Holder], most: int = _MOST) -> Table:
    """Returns a table of what is in use, by region or module, and line.

    Args:
        holders: What is in use.
        most: The number of rows at most.
    """

    def key(holder: Holder) -> object:
        origin = holder.origin
        return (
            *(origin.maker, *map(name_pattern, _words_of(origin)), origin.line),
            *(origin.operator if origin.line is None else None, holder.reason),
        )

    groups = alike(holders, key)
    groups.sort(key=lambda group: -sum(holder.nbytes for holder in group))
    rows = [
        [
            format_bytes(sum(holder.nbytes for holder in group)),
            str(sum(holder.count for holder in group)),
            _group_in_words(group),
            _operators_of(group),
            group[0].origin.line or "",
            "the program" if (reason := group[0].reason) is None else reason.value,
        ]
        for group in groups[:most]
    ]
    left = sum(holder.nbytes for group in groups[most:] for holder in group)
    rest = f"and {format_bytes(left)} in {count_of(len(groups) - most, 'more row')}" if left else ""
    header = ["at the peak", "storages", "made by", "operator", "line", "held by"]
    return Table(header, rows, (0, 1), (2, 3), "", rest)


def _operators_of(group: Sequence[Holder]) -> str:
    sizes: collections.Counter[str] = collections.Counter()
    for holder in group:
        sizes[holder.origin.operator or ""] += holder.nbytes
    names = [name.removeprefix("aten::") for name, _ in sizes.most_common() if name]
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")


def _words_of(origin: Origin) -> tuple[str, str]:
    """Returns the module and the name of the region of an origin, or the name and the class of its module."""
    words = (origin.region or origin.module or "").split(" ", 1)
    return words[0], "".join(words[1:])


def _group_in_words(group: Sequence[Holder]) -> str:
    modules, names = zip(*(_words_of(holder.origin) for holder in group), strict=True)
    return _in_words(group[0].origin, " ".join(filter(None, (fold_names(modules), fold_names(names)))))


def maker_in_words(origin: Origin) -> str:
    """Returns what made an allocation in words, as in ``"recompute of layers.0 Block"``."""
    return _in_words(origin, origin.region or origin.module or "")


def _in_words(origin: Origin, where: str) -> str:
    maker = origin.maker
    if maker is Maker.REGION:
        return where if where == "region" else f"region {where}"
    if maker is Maker.RECOMPUTE:
        return f"recompute of {where}"
    if maker is Maker.BACKWARD:
        return f"backward of {where}" if where else f"backward ({origin.node})"
    if maker is Maker.OPTIMIZER:
        return origin.optimizer or "an optimizer"
    return where or "code outside of modules"
