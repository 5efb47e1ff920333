"""Entries of regions in a ledger: when each ran, and ran again, and which storages its backward needs."""

from __future__ import annotations

import dataclasses

__all__ = ["Need", "RegionEntry"]


@dataclasses.dataclass
class Need:
    """A storage which backward needs of a region.

    Attributes:
        allocation: The index of the allocation.
        is_dropped: Whether the region holds no reference to the storage.
        begin: The number of changes before.
        end: The number of changes before its end; None if that was not seen.
    """

    allocation: int
    is_dropped: bool
    begin: int
    end: int | None = None


@dataclasses.dataclass
class RegionEntry:
    """One entry of a region.

    Attributes:
        name: The module and the name of the region, as in ``"layers.0 Block"``.
        path: The names of the regions around and its own, outermost first.
        module: The region's module, or that around; None where unknown.
        site: The entering line; None where unknown.
        is_again: Whether the recompute of a region around entered the region.
        parent: The number of the region around; None without.
        begin: The number of changes before.
        end: The number of changes before the end of forward.
        modules: The number of calls of modules in its forward.
        recomputes: For each recompute, the numbers of changes before its begin and its end.
        needs: The storages which backward needs.
    """

    name: str
    path: tuple[str, ...]
    module: str | None
    site: str | None
    is_again: bool
    parent: int | None
    begin: int
    end: int
    modules: int = 0
    recomputes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    needs: list[Need] = dataclasses.field(default_factory=list)
