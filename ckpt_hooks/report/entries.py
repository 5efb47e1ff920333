"""The entries of a report on saved tensors: each storage once, with its tensors, and totals by reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ckpt_hooks._core.holdings import Reason

from .formatting import Printed, Table
from .residual_tables import headline_of, tables_of

__all__ = ["Reason", "Residual", "SavedResiduals"]


#: Reasons of memory that is there without backward, too.
THERE_ANYWAY = frozenset({Reason.ARGUMENT, Reason.PARAMETER, Reason.OUTSIDE})


class Residual(NamedTuple):
    """A storage which backward holds, by one of its tensors.

    Attributes:
        reason: The reason for holding.
        nbytes: The size of the storage in bytes, each storage once; for one of several ``views``, the size of the tensor. 0
            where hooks of the user's do not show the memory.
        shape: The sizes of the tensor; None for a nested tensor, and where unknown.
        dtype: Its dtype; None where unknown.
        device: Its device; None where unknown.
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
        return headline_of(self)

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


def order_of(reasons: Sequence[Reason]) -> int:
    """Returns the place of the reason that counts among several for one storage."""
    return min(range(len(reasons)), key=lambda place: _ORDER[reasons[place]])


_ORDER = {reason: place for place, reason in enumerate(Reason)}
