"""What a trace found: steps, their regions, and what changes from step to step. Plain values, no tensors."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .formatting import Printed, Table
from .trace_tables import tables_of_step, totals_of, totals_of_region

__all__ = ["Drift", "RegionTrace", "StepTrace", "drift_of"]


@dataclasses.dataclass(frozen=True, repr=False)
class RegionTrace(Printed):
    """One entry of a region, in forward.

    A storage counts once a step, for the first region which reports it.

    Attributes:
        kind: ``"function"`` or ``"recorded"``.
        name: The region's name.
        path: The names of the regions around and its own, outermost first.
        site: The entering line of the user's program, as in ``"model.py:12"``; None where unknown.
        module: The module run by the region, or else the module around, by its name in the outermost called module, as in
            ``"layers.0"``; None without a module.
        operators: The number of operators in forward, without those of regions inside; None unless asked for.
        dropped_bytes: The size of the storages saved for backward and freed all the same, before backward.
        held_bytes: The size of the storages held from the end of forward on, by the value of their :class:`Reason`. Parameters
            and tensors on the host are left out.
        offloaded_bytes: The size of tensors moved to the host.
        recomputes: The number of recomputes.
        recomputed_operators: The number of operators in recomputes; None unless asked for.
        recompute_seconds: The seconds of recomputes, regions inside included; on devices the time of the host alone.
        regions: The regions inside.
    """

    kind: str
    name: str
    path: tuple[str, ...]
    site: str | None
    module: str | None
    operators: int | None
    dropped_bytes: int
    held_bytes: dict[str, int]
    offloaded_bytes: int
    recomputes: int
    recomputed_operators: int | None
    recompute_seconds: float
    regions: tuple[RegionTrace, ...]

    def _headline(self) -> str:
        return totals_of_region(self)

    def _tables(self) -> Iterator[Table]:
        return tables_of_step([self], self.held_bytes)

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as values for ``json.dumps``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "path": list(self.path), "regions": [region.to_json() for region in self.regions]}

    def walk(self) -> Iterator[RegionTrace]:
        """Yields the region and all regions inside, each before those inside."""
        yield self
        for region in self.regions:
            yield from region.walk()


@dataclasses.dataclass(frozen=True, repr=False)
class StepTrace(Printed):
    """One step: its outermost regions, and totals.

    Attributes:
        regions: The outermost regions, in order.
        late_recomputes: Recomputes, in this step, of regions of earlier steps.
        recompute_seconds: The seconds of all recomputes of the step; one inside another counts once.
    """

    regions: tuple[RegionTrace, ...]
    late_recomputes: int
    recompute_seconds: float

    def _headline(self) -> str:
        return totals_of(self)

    def _tables(self) -> Iterator[Table]:
        return tables_of_step(self.regions, self.held_bytes)

    def walk(self) -> Iterator[RegionTrace]:
        """Yields all regions, each before those inside."""
        for region in self.regions:
            yield from region.walk()

    @property
    def dropped_bytes(self) -> int:
        """The bytes dropped by all regions."""
        return sum(region.dropped_bytes for region in self.walk())

    @property
    def held_bytes(self) -> dict[str, int]:
        """The bytes held by all regions, by reason; the largest first."""
        found: collections.Counter[str] = collections.Counter()
        for region in self.walk():
            found.update(region.held_bytes)
        return dict(found.most_common())

    @property
    def offloaded_bytes(self) -> int:
        """The bytes moved to the host by all regions."""
        return sum(region.offloaded_bytes for region in self.walk())

    @property
    def recomputes(self) -> int:
        """The number of recomputes, of regions of earlier steps too."""
        return self.late_recomputes + sum(region.recomputes for region in self.walk())

    @property
    def operators(self) -> int | None:
        """The number of operators in forward, in regions; None unless asked for."""
        return _sum([region.operators for region in self.walk()])

    @property
    def recomputed_operators(self) -> int | None:
        """The number of operators in recomputes of this step's regions; None unless asked for."""
        return _sum([region.recomputed_operators for region in self.walk()])

    def to_json(self) -> dict[str, Any]:
        """Returns the step as values for ``json.dumps``."""
        return {
            "dropped_bytes": self.dropped_bytes,
            "held_bytes": self.held_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "recomputes": self.recomputes,
            "late_recomputes": self.late_recomputes,
            "recompute_seconds": self.recompute_seconds,
            "operators": self.operators,
            "recomputed_operators": self.recomputed_operators,
            "regions": [region.to_json() for region in self.regions],
        }


@dataclasses.dataclass(frozen=True)
class Drift:
    """A figure of a region which changes from step to step.

    Attributes:
        name: The region's name.
        module: The region's module; None without one.
        figure: The name of an attribute of :class:`RegionTrace`, or ``"entries"`` for the number of such regions.
        values: The figure in each step.
    """

    name: str
    module: str | None
    figure: str
    values: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the drift as values for ``json.dumps``."""
        return {**dataclasses.asdict(self), "values": list(self.values)}


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


_FIGURES = ("dropped_bytes", "held_bytes", "offloaded_bytes", "recomputes", "operators", "recomputed_operators")


def drift_of(steps: Sequence[StepTrace]) -> tuple[Drift, ...]:
    """Returns the figures which change from step to step, summed over entries of the same region.

    Args:
        steps: The steps.
    """
    sums: dict[tuple[Any, ...], list[collections.Counter[str]]] = {}
    for number, step in enumerate(steps):
        for region in step.walk():
            key = region.name, region.module, region.path, region.site, region.kind
            counts = sums.setdefault(key, [collections.Counter() for _ in steps])[number]
            counts["entries"] += 1
            for figure in _FIGURES:
                value = getattr(region, figure)
                counts[figure] += sum(value.values()) if isinstance(value, dict) else value or 0
    return tuple(
        Drift(key[0], key[1], figure, values)
        for key, counts in sums.items()
        for figure in ("entries", *_FIGURES)
        if len(set(values := tuple(count[figure] for count in counts))) > 1
    )
