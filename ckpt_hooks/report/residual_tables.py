"""The tables of reports on saved tensors, and of what a region holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_hooks._core.holdings import Holding, Reason
from ckpt_hooks._core.words import kind_in_words

from .formatting import Printed, Table, count_of, fold_names, format_bytes, name_pattern

if TYPE_CHECKING:
    from .entries import Residual, SavedResiduals

__all__ = ["PrintedHoldings", "headline_of", "tables_of"]

_MAX_ROWS = 60


def headline_of(report: SavedResiduals) -> str:
    """Returns the totals of a report in words."""
    most = "" if report.is_dropped_exact else "at most "
    dropped = f"; regions dropped {most}{format_bytes(report.dropped_bytes)}" if report.dropped else ""
    return (
        f"backward holds {format_bytes(report.total_bytes)} in {count_of(len(report.tensors), 'storage')}, "
        f"{format_bytes(report.added_bytes)} of this for backward alone{dropped}"
    )


def tables_of(report: SavedResiduals, max_rows: int = _MAX_ROWS) -> Iterator[Table]:
    """Yields the tables of a report: totals by reason, then rows with the largest first. Layers alike share a row.

    Args:
        report: The report.
        max_rows: The number of rows of a table; the rest is summed up.
    """
    counts: dict[str, int] = {}
    for entry in report.tensors:
        counts[entry.reason.value] = counts.get(entry.reason.value, 0) + 1
    rows = [[format_bytes(nbytes), str(counts[reason]), reason] for reason, nbytes in report.by_reason.items()]
    if rows:
        yield Table(["bytes", "storages", "reason"], rows, (0, 1))
        yield _table(report.tensors, max_rows)
    if report.dropped:
        yield _table(report.dropped, max_rows, "dropped, and brought back in backward:")


class PrintedHoldings(Printed):
    """A region, which prints as a table of what it holds."""

    _name: str

    def kept(self) -> list[Holding]:
        """Returns each tensor that the region holds."""
        raise NotImplementedError

    def _headline(self) -> str:
        sizes: dict[object, int] = {}
        for holding in self.kept():
            parts = holding.parts or ((holding.storage, holding.storage_nbytes),)
            sizes.update((storage, size) if storage is not None else (id(holding), holding.nbytes) for storage, size in parts)
        holds = f"{format_bytes(sum(sizes.values()))} in {count_of(len(sizes), 'storage')}" if sizes else "nothing"
        return f"{self._name!r} holds {holds}"

    def _tables(self) -> Iterator[Table]:
        groups: list[list[Holding]] = []
        for holding in self.kept():
            before = groups[-1][0] if groups else None
            if before is not None and (before.description, before[:3]) == (holding.description, holding[:3]):
                groups[-1].append(holding)
            else:
                groups.append([holding])
        rows = [
            [
                format_bytes(group[0].nbytes * len(group)),
                f"x{len(group)}" if len(group) > 1 else "",
                group[0].description,
                group[0].reason.value,
                group[0].why,
            ]
            for group in groups
        ]
        if rows:
            yield Table(["bytes", "", "tensor", "reason", "why"], rows, (0, 1), (4,))


_COLUMNS = ("bytes", "", "tensor", "reason", "module or name", "line", "operator", "region", "saved by", "why")


def _table(entries: Sequence[Residual], max_rows: int, title: str = "") -> Table:
    """Returns a table of entries: a row for each group of entries alike, the largest groups first."""
    groups: dict[Any, list[Residual]] = {}
    patterns: dict[str | None, str | None] = {None: None}
    for entry in entries:
        for name in (entry.module, entry.name):
            if name not in patterns:
                patterns[name] = name_pattern(name or "")
        key = (
            entry.nbytes,
            entry.shape,
            entry.dtype,
            entry.reason,
            entry.operator,
            entry.site,
            patterns[entry.module],
            patterns[entry.name],
            tuple(map(name_pattern, entry.region)) if entry.region else (),
            entry.saved_by,
            entry.why,
            tuple((view.shape, view.reason, view.saved_by) for view in entry.views) if entry.views else (),
        )
        group = groups.get(key)
        if group is None:
            groups[key] = [entry]
        else:
            group.append(entry)
    ordered = sorted(groups.values(), key=lambda group: -group[0].nbytes * len(group))
    rows: list[list[str]] = []
    for group in ordered[:max_rows]:
        rows += _rows_of(group)
    rest = [entry for group in ordered[max_rows:] for entry in group]
    more = f"and {len(rest)} more, {format_bytes(sum(entry.nbytes for entry in rest))}" if rest else ""
    return Table(_COLUMNS, rows, (0, 1), range(4, len(_COLUMNS)), title, more)


def _rows_of(group: Sequence[Residual]) -> list[list[str]]:
    """Returns a row for entries alike, and one for each other shape or reason of tensors in their storages."""
    first = group[0]
    times = f"x{len(group)}" if len(group) > 1 else ""
    size = format_bytes(first.nbytes * len(group)) if first.nbytes or first.dtype is not None else "?"
    alike: dict[tuple[str, Reason], list[Residual]] = {(_kind_of(first), first.reason): list(group)}
    for view in [view for entry in group for view in entry.views]:
        alike.setdefault((_kind_of(view), view.reason), []).append(view)
    (members, *views) = alike.values()
    operator = (first.operator or "").removeprefix("aten.").removesuffix(".default")
    # The name of a parameter has its module in it.
    place = fold_names(entry.name for entry in group if entry.name is not None)
    place = place or fold_names(entry.module for entry in group if entry.module is not None)
    rows = [[size, times, _kind_of(first), first.reason.value, place, first.site or "", operator, *_cells_of(members)]]
    rows += [["", "", f"  as {_kind_of(view[0])}", view[0].reason.value, "", "", "", *_cells_of(view)] for view in views]
    return rows


def _cells_of(entries: Sequence[Residual]) -> list[str]:
    region = fold_names("/".join(entry.region) for entry in entries)
    saved_by = dict.fromkeys(name for entry in entries for name in entry.saved_by)
    return [region, ", ".join(saved_by), entries[0].why if entries[0].reason in _IN_WORDS else ""]


#: Reasons which need more words.
_IN_WORDS = frozenset({Reason.HOOKS, Reason.CTX, Reason.NAME, Reason.NOT_REPLAYED, Reason.UNSEEN})


def _kind_of(entry: Residual) -> str:
    return "?" if entry.dtype is None else kind_in_words((entry.dtype, entry.shape))
