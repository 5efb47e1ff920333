"""The entries of a report on saved tensors: each storage once, with its tensors, totals by reason, and tables."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ckpt_hooks._core.descriptions import kind_in_words
from ckpt_hooks._core.holdings import Holding, Reason

from .formatting import Printed, Table, alike, count_of, fold_names, format_bytes, name_pattern, times

#: Reasons of memory that is there without backward, too.
THERE_ANYWAY = frozenset({Reason.ARGUMENT, Reason.PARAMETER, Reason.OUTSIDE})


class Residual(NamedTuple):
    """A storage which backward holds, by one of its tensors.

    Attributes:
        reason: The reason for holding.
        nbytes: The size of the storage in bytes, each storage once; for one of several ``views``, the size of the tensor. 0
            where hooks of the user's do not show the memory.
        shape: The sizes of the tensor; None for a nested tensor, and where unknown.
        dtype: The dtype; None where unknown.
        device: The device; None where unknown.
        why: The reason in more words, if there are any.
        name: The name of a parameter or a buffer, or the place of an argument.
        operator: The operator which made the storage, as in ``"aten.mm.default"``; None where unknown.
        site: The line of the user's program which ran the operator, as in ``"model.py:12"``, or entered the region.
        module: The innermost module around, by its name in the outermost called module.
        region: The names of the region and of the regions around, outermost first; empty outside of regions.
        saved_by: The names of the nodes which saved the tensor, as in ``"MulBackward0"``.
        views: All tensors in the storage, if several, each with its own reason.
    """

    reason: Reason
    nbytes: int
    shape: torch.Size | None
    dtype: torch.dtype | None
    device: torch.device | None
    why: str = ""
    name: str | None = None
    operator: str | None = None
    site: str | None = None
    module: str | None = None
    region: tuple[str, ...] = ()
    saved_by: tuple[str, ...] = ()
    views: tuple[Residual, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as values for ``json.dumps``."""
        return {
            **self._asdict(),
            "reason": self.reason.value,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "device": None if self.device is None else str(self.device),
            "region": list(self.region),
            "saved_by": list(self.saved_by),
            "views": [view.to_json() for view in self.views],
        }


@dataclass(frozen=True, repr=False)
class SavedResiduals(Printed):
    """The memory which backward holds. Prints as :func:`ckpt_hooks.format_saved_residuals` writes it.

    Attributes:
        tensors: An entry for each storage, in the order of forward.
        dropped: An entry for each storage that a region has dropped, which takes no memory until backward.
        is_dropped_exact: Whether the storages of all dropped tensors are known. If not, an entry is a tensor as one node saved
            it, and ``dropped_bytes`` is an upper bound.
    """

    tensors: tuple[Residual, ...]
    dropped: tuple[Residual, ...]
    is_dropped_exact: bool = True

    @cached_property
    def by_reason(self) -> dict[str, int]:
        """The bytes for each reason, in the order of :class:`Reason`."""
        found: dict[Reason, int] = {}
        for entry in self.tensors:
            found[entry.reason] = found.get(entry.reason, 0) + entry.nbytes
        return {reason.value: found[reason] for reason in Reason if reason in found}

    @cached_property
    def total_bytes(self) -> int:
        """The bytes of all storages."""
        return sum(self.by_reason.values())

    @cached_property
    def added_bytes(self) -> int:
        """The bytes without arguments, parameters and memory from before: memory that backward alone keeps from being freed."""
        return sum(entry.nbytes for entry in self.tensors if entry.reason not in THERE_ANYWAY)

    @cached_property
    def dropped_bytes(self) -> int:
        """The bytes of dropped tensors."""
        return sum(entry.nbytes for entry in self.dropped)

    def _headline(self) -> str:
        most = "" if self.is_dropped_exact else "at most "
        dropped = f"; regions dropped {most}{format_bytes(self.dropped_bytes)}" if self.dropped else ""
        return (
            f"backward holds {format_bytes(self.total_bytes)} in {count_of(len(self.tensors), 'storage')}, "
            f"{format_bytes(self.added_bytes)} of this for backward alone{dropped}"
        )

    def _tables(self) -> Iterator[Table]:
        return tables_of(self)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as values for ``json.dumps``."""
        return {
            "total_bytes": self.total_bytes,
            "added_bytes": self.added_bytes,
            "by_reason": self.by_reason,
            "dropped_bytes": self.dropped_bytes,
            "is_dropped_exact": self.is_dropped_exact,
            "tensors": [entry.to_json() for entry in self.tensors],
            "dropped": [entry.to_json() for entry in self.dropped],
        }


def tables_of(report: SavedResiduals, max_rows: int = 60) -> Iterator[Table]:
    """Yields totals by reason, then rows with the largest first, in which layers alike share one."""
    counts = collections.Counter(entry.reason.value for entry in report.tensors)
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
        raise NotImplementedError

    def _headline(self) -> str:
        sizes: dict[object, int] = {}
        for holding in self.kept():
            parts = holding.parts or ((holding.storage, holding.storage_nbytes),)
            sizes.update((storage, size) if storage is not None else (id(holding), holding.nbytes) for storage, size in parts)
        holds = f"{format_bytes(sum(sizes.values()))} in {count_of(len(sizes), 'storage')}" if sizes else "nothing"
        return f"{self._name!r} holds {holds}"

    def _tables(self) -> Iterator[Table]:
        neighbours = itertools.groupby(self.kept(), lambda holding: (holding.description, holding[:3]))
        groups = [list(group) for _, group in neighbours]
        rows = [
            [
                format_bytes(group[0].nbytes * len(group)),
                times(group),
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
    pattern = functools.cache(name_pattern)

    def key(entry: Residual) -> object:
        return (
            entry.nbytes,
            entry.shape,
            entry.dtype,
            entry.reason,
            entry.operator,
            entry.site,
            entry.module and pattern(entry.module),
            entry.name and pattern(entry.name),
            tuple(map(pattern, entry.region)),
            entry.saved_by,
            entry.why,
            tuple((view.shape, view.reason, view.saved_by) for view in entry.views),
        )

    ordered = sorted(alike(entries, key), key=lambda group: -group[0].nbytes * len(group))
    rows: list[list[str]] = []
    for group in ordered[:max_rows]:
        rows += _rows_of(group)
    rest = [entry for group in ordered[max_rows:] for entry in group]
    more = f"and {len(rest)} more, {format_bytes(sum(entry.nbytes for entry in rest))}" if rest else ""
    return Table(_COLUMNS, rows, (0, 1), range(4, len(_COLUMNS)), title, more)


def _rows_of(group: Sequence[Residual]) -> list[list[str]]:
    """Returns a row for entries alike, and one for each other shape or reason of tensors in their storages."""
    first = group[0]
    size = format_bytes(first.nbytes * len(group)) if first.nbytes or first.dtype is not None else "?"
    (members, *views) = alike(
        [*group, *(view for entry in group for view in entry.views)], lambda one: (_kind_of(one), one.reason)
    )
    operator = (first.operator or "").removeprefix("aten.").removesuffix(".default")
    # The name of a parameter has its module in it.
    place = fold_names(entry.name for entry in group if entry.name is not None)
    place = place or fold_names(entry.module for entry in group if entry.module is not None)
    rows = [[size, times(group), _kind_of(first), first.reason.value, place, first.site or "", operator, *_cells_of(members)]]
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
