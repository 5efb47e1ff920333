"""The tables of traces. Regions alike are one row, as in ``"x12 layers.0-11 Block"``: with figures of one, and a mean time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .formatting import Table, count_of, fold_names, format_bytes, name_pattern

if TYPE_CHECKING:
    from .steps import Drift, RegionTrace, StepTrace

__all__ = ["changes_of", "tables_of_step", "totals_of", "totals_of_region"]

_HEADER = ("region", "dropped", "held", "to host", "recomputes", "ms each", "operators", "again", "line", "kind")
_NUMBERS = range(1, 8)
_MOST = 20  # changes from step to step in a report
_LATEST = 8  # steps of a change


def totals_of(step: StepTrace) -> str:
    """Returns the totals of a step in words."""
    parts = [
        count_of(sum(1 for _ in step.walk()), "region"),
        f"dropped {format_bytes(step.dropped_bytes)}",
        f"held {format_bytes(sum(step.held_bytes.values()))}",
    ]
    if step.offloaded_bytes:
        parts.append(f"to host {format_bytes(step.offloaded_bytes)}")
    late = f", {step.late_recomputes} of earlier steps" if step.late_recomputes else ""
    parts.append(f"{count_of(step.recomputes, 'recompute')} in {step.recompute_seconds * 1e3:.1f} ms{late}")
    if step.operators is not None:
        parts.append(f"{step.operators} operators, {step.recomputed_operators} again")
    return ", ".join(parts)


def totals_of_region(region: RegionTrace) -> str:
    """Returns a region's figures in words."""
    held = format_bytes(sum(region.held_bytes.values()))
    recomputes = count_of(region.recomputes, "recompute")
    return f"{_label([region])}, dropped {format_bytes(region.dropped_bytes)}, held {held}, {recomputes}"


def tables_of_step(regions: Sequence[RegionTrace], held_bytes: dict[str, int]) -> Iterator[Table]:
    """Yields a table of regions with those inside, and one of what they hold.

    Args:
        regions: The regions.
        held_bytes: Bytes by reason.
    """
    rows: list[list[str]] = []
    _add_rows(rows, regions, 0)
    if rows:
        yield Table(_HEADER, rows, _NUMBERS, (0,))
    if held_bytes:
        held = [[format_bytes(nbytes), reason] for reason, nbytes in held_bytes.items()]
        yield Table(["held", "reason"], held, (0,))


def _add_rows(rows: list[list[str]], regions: Sequence[RegionTrace], depth: int) -> None:
    alike: dict[object, list[RegionTrace]] = {}
    for region in regions:
        alike.setdefault(_signature(region), []).append(region)
    for group in alike.values():
        rows.append(_row(group, depth))
        _add_rows(rows, [inner for region in group for inner in region.regions], depth + 1)


def _signature(region: RegionTrace) -> object:
    """Returns the same for regions that one line stands for."""
    return (
        *(name_pattern(region.module or ""), name_pattern(region.name), region.kind),
        *(region.site, region.operators, region.dropped_bytes, tuple(sorted(region.held_bytes.items()))),
        *(region.offloaded_bytes, region.recomputes, region.recomputed_operators),
        tuple(map(_signature, region.regions)),
    )


def _row(group: Sequence[RegionTrace], depth: int) -> list[str]:
    first, count = group[0], len(group)
    recomputes = sum(region.recomputes for region in group)
    seconds = sum(region.recompute_seconds for region in group)
    return [
        f"{'  ' * depth}{f'x{count} ' if count > 1 else ''}{_label(group)}",
        format_bytes(first.dropped_bytes),
        format_bytes(sum(first.held_bytes.values())),
        format_bytes(first.offloaded_bytes) if first.offloaded_bytes else "",
        str(first.recomputes),
        f"{seconds / recomputes * 1e3:.2f}" if recomputes else "",
        _number(first.operators),
        _number(first.recomputed_operators),
        first.site or "",
        first.kind,
    ]


def _number(number: int | None) -> str:
    return "" if number is None else str(number)


def _label(group: Sequence[RegionTrace] | Sequence[Drift]) -> str:
    """Returns modules and name of regions alike, as in ``"layers.0-11 Block"``; once, where a region has its module's name."""
    modules = fold_names(region.module or "" for region in group)
    names = fold_names(region.name for region in group)
    return f"{modules} {names}" if modules and modules != names else names


def changes_of(drift: Sequence[Drift]) -> Iterator[Table]:
    """Yields a table of what changes from step to step, if anything does."""
    alike: dict[object, list[Drift]] = {}
    for change in drift:
        key = name_pattern(change.module or ""), name_pattern(change.name), change.figure, change.values
        alike.setdefault(key, []).append(change)
    rows = [
        [f"{f'x{len(group)} ' if len(group) > 1 else ''}{_label(group)}", group[0].figure, _in_words(group[0])]
        for group in alike.values()
    ]
    if rows:
        more = f"and {len(rows) - _MOST} more" if len(rows) > _MOST else ""
        yield Table(["region", "changes", "from step to step"], rows[:_MOST], (), (0,), "", more)


def _in_words(drift: Drift) -> str:
    values = drift.values[-_LATEST:]
    shown = " ".join(format_bytes(value) if drift.figure.endswith("bytes") else str(value) for value in values)
    return shown if len(values) == len(drift.values) else f"... {shown}"
