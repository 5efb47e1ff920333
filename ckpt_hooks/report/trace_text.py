"""Traces in plain text."""

from __future__ import annotations

from collections.abc import Sequence

from .formatting import fold_names, format_bytes, format_table, name_pattern
from .steps import Drift, RegionTrace, StepTrace
from .tracing import Trace

__all__ = ["format_trace", "print_trace"]

_HEADER = ("region", "kind", "line", "operators", "dropped", "held", "to host", "recomputes", "operators again", "ms each")
_NUMBERS = range(3, len(_HEADER))
_MOST = 20  # changes from step to step in a report
_LATEST = 8  # steps of a change


def format_trace(trace: Trace) -> str:
    """Returns a trace as text: the regions of the latest step, totals, and what changes from step to step.

    Regions alike are one line, as in ``"x12 layers.0-11 Block"``. Figures are those of one of them, times a mean.

    Args:
        trace: The trace.

    Returns:
        The text, of several lines.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.report import format_trace, trace
        >>> x = torch.ones(256, requires_grad=True)
        >>> with trace() as found:
        ...     checkpoint(lambda x: x.sin().cos().exp(), x).sum().backward()
        >>> "dropped 2.0 KiB" in format_trace(found)
        True
    """
    steps = trace.steps
    if not steps:
        return "no region has run"
    step = steps[-1]
    lines = [_totals(step) if len(steps) == 1 else f"step {len(steps) - 1}: {_totals(step)}"]
    rows: list[list[str]] = []
    _add_rows(rows, step.regions, 0)
    lines += format_table(_HEADER, rows, _NUMBERS)
    if held := step.held_bytes:
        lines += ["held, by reason:", *(f"  {format_bytes(nbytes):>10}  {reason}" for reason, nbytes in held.items())]
    return "\n".join(lines + _changes(trace.drift if len(steps) > 1 else ()))


def print_trace(trace: Trace) -> None:
    """Prints a trace, as :func:`format_trace` words it.

    Args:
        trace: The trace.

    Example:
        >>> from ckpt_hooks.report import print_trace, trace
        >>> with trace() as found:
        ...     pass
        >>> print_trace(found)
        no region has run
    """
    print(format_trace(trace))  # noqa: T201


def _totals(step: StepTrace) -> str:
    count = sum(1 for _ in step.walk())
    parts = [
        f"{count} region{'' if count == 1 else 's'}",
        f"dropped {format_bytes(step.dropped_bytes)}",
        f"held {format_bytes(sum(step.held_bytes.values()))}",
    ]
    if step.offloaded_bytes:
        parts.append(f"to host {format_bytes(step.offloaded_bytes)}")
    times = f"{step.recomputes} recompute{'' if step.recomputes == 1 else 's'} in {step.recompute_seconds * 1e3:.1f} ms"
    late = f", {step.late_recomputes} of earlier steps" if step.late_recomputes else ""
    parts.append(times + late)
    if step.operators is not None:
        parts.append(f"{step.operators} operators, {step.recomputed_operators} again")
    return ", ".join(parts)


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
        *(name_pattern(region.module or ""), region.name, region.kind),
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
        first.kind,
        first.site or "",
        _number(first.operators),
        format_bytes(first.dropped_bytes),
        format_bytes(sum(first.held_bytes.values())),
        format_bytes(first.offloaded_bytes) if first.offloaded_bytes else "",
        str(first.recomputes),
        _number(first.recomputed_operators),
        f"{seconds / recomputes * 1e3:.2f}" if recomputes else "",
    ]


def _number(number: int | None) -> str:
    return "" if number is None else str(number)


def _label(group: Sequence[RegionTrace] | Sequence[Drift]) -> str:
    """Returns modules and name of regions alike, as in ``"layers.0-11 Block"``."""
    modules = fold_names(region.module or "" for region in group)
    return f"{modules} {group[0].name}" if modules else group[0].name


def _changes(drift: Sequence[Drift]) -> list[str]:
    alike: dict[object, list[Drift]] = {}
    for change in drift:
        key = name_pattern(change.module or ""), change.name, change.figure, change.values
        alike.setdefault(key, []).append(change)
    lines = [
        f"  {f'x{len(group)} ' if len(group) > 1 else ''}{_label(group)}: {group[0].figure} {_in_words(group[0])}"
        for group in alike.values()
    ]
    more = [] if len(lines) <= _MOST else [f"  and {len(lines) - _MOST} more"]
    return ["changes from step to step:", *lines[:_MOST], *more] if lines else []


def _in_words(drift: Drift) -> str:
    values = drift.values[-_LATEST:]
    shown = " ".join(format_bytes(value) if drift.figure.endswith("bytes") else str(value) for value in values)
    return shown if len(values) == len(drift.values) else f"... {shown}"
