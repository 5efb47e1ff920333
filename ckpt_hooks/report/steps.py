"""What a trace found: steps, their regions, and tables. Plain values, no tensors."""

from __future__ import annotations

import collections
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_hooks._core.holdings import Reason

from .entries import REMEDIES, Advice, Waste, table_of_advice
from .formatting import Printed, Table, alike, count_of, fold_names, format_bytes, json_of, name_pattern, times


@dataclasses.dataclass
class RegionTrace:
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
        policy: The policy on outputs to keep, in words; None without a policy.
        dropped_by: The part of ``dropped_bytes`` that each operator made; empty unless operators are counted.
    """

    kind: str
    name: str
    path: tuple[str, ...]
    site: str | None
    module: str | None
    operators: int | None = None
    dropped_bytes: int = 0
    held_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    offloaded_bytes: int = 0
    recomputes: int = 0
    recomputed_operators: int | None = None
    recompute_seconds: float = 0.0
    regions: tuple[RegionTrace, ...] = ()
    policy: str | None = None
    dropped_by: dict[str, int] = dataclasses.field(default_factory=dict)

    to_json = json_of

    def walk(self) -> Iterator[RegionTrace]:
        """Yields the region and all regions inside, each before those inside."""
        yield self
        for region in self.regions:
            yield from region.walk()

    def copy(self) -> RegionTrace:
        """Returns the region as it is now, regions inside included."""
        by_operator = {name: nbytes for name, nbytes in self.dropped_by.items() if nbytes}
        inside = tuple(region.copy() for region in self.regions)
        return dataclasses.replace(self, held_bytes={**self.held_bytes}, dropped_by=by_operator, regions=inside)


@dataclasses.dataclass(repr=False)
class StepTrace(Printed):
    """One step: its outermost regions, and totals over these and the regions inside.

    Attributes:
        regions: The outermost regions, in order.
        late_recomputes: Recomputes, in this step, of regions of earlier steps.
        recompute_seconds: The seconds of all recomputes of the step; one inside another counts once.
        dropped_bytes: The bytes dropped by all regions.
        held_bytes: The bytes held by all regions, by reason; the largest first.
        offloaded_bytes: The bytes moved to the host by all regions.
        recomputes: The number of recomputes, of regions of earlier steps too.
        operators: The number of operators in forward, in regions; None unless asked for.
        recomputed_operators: The number of operators in recomputes of this step's regions; None unless asked for.
        advice: Policies by which no region has kept anything, each an :class:`Advice`; with operators counted, the one to name.
    """

    regions: tuple[RegionTrace, ...]
    late_recomputes: int
    recompute_seconds: float
    dropped_bytes: int = dataclasses.field(init=False, default=0)
    held_bytes: dict[str, int] = dataclasses.field(init=False)
    offloaded_bytes: int = dataclasses.field(init=False, default=0)
    recomputes: int = dataclasses.field(init=False)
    operators: int | None = dataclasses.field(init=False, default=None)
    recomputed_operators: int | None = dataclasses.field(init=False, default=None)
    advice: tuple[Advice, ...] = dataclasses.field(init=False)

    to_json = json_of

    def __post_init__(self) -> None:
        self.recomputes, held = self.late_recomputes, collections.Counter[str]()
        for region in self.walk():
            held.update(region.held_bytes)
            self.dropped_bytes += region.dropped_bytes
            self.offloaded_bytes += region.offloaded_bytes
            self.recomputes += region.recomputes
            if region.operators is not None and region.recomputed_operators is not None:
                self.operators = (self.operators or 0) + region.operators
                self.recomputed_operators = (self.recomputed_operators or 0) + region.recomputed_operators
        self.held_bytes = dict(held.most_common())
        self.advice = unmatched_policies(
            Asked(
                region.policy,
                any(region.held_bytes.get(reason.value) for reason in _KEPT) or region.offloaded_bytes > 0,
                *(region.dropped_bytes, region.module or region.name, region.site, region.dropped_by),
            )
            for region in self.walk()
        )

    def _headline(self) -> str:
        parts = [
            count_of(sum(1 for _ in self.walk()), "region"),
            f"dropped {format_bytes(self.dropped_bytes)}",
            f"held {format_bytes(sum(self.held_bytes.values()))}",
        ]
        if self.offloaded_bytes:
            parts.append(f"to host {format_bytes(self.offloaded_bytes)}")
        late = f", {self.late_recomputes} of earlier steps" if self.late_recomputes else ""
        parts.append(f"{count_of(self.recomputes, 'recompute')} in {self.recompute_seconds * 1e3:.1f} ms{late}")
        if self.operators is not None:
            parts.append(f"{self.operators} operators, {self.recomputed_operators} again")
        return ", ".join(parts)

    def _tables(self) -> Iterator[Table]:
        yield Table(_HEADER, [*_rows_of(self.regions, "")], _NUMBERS, (0,))
        yield Table(["held", "reason"], [[format_bytes(nbytes), reason] for reason, nbytes in self.held_bytes.items()], (0,))
        yield table_of_advice(self.advice)

    def walk(self) -> Iterator[RegionTrace]:
        """Yields all regions, each before those inside."""
        return (inner for region in self.regions for inner in region.walk())


_KEPT = (Reason.POLICY, Reason.NAME)


class Asked(NamedTuple):
    """What a region did under its policy."""

    policy: str | None
    keeps: bool  # or moves to the host
    dropped_bytes: int
    where: str
    site: str | None
    dropped_by: Mapping[str, int] = {}  # by operator, where these are counted


def unmatched_policies(regions: Iterable[Asked]) -> tuple[Advice, ...]:
    """Returns advice on policies by which no region has kept anything."""
    found = []
    for group in alike((region for region in regions if region.policy), lambda region: region.policy):
        words, dropped = group[0].policy or "", sum(region.dropped_bytes for region in group)
        if not dropped or any(region.keeps for region in group) or words.startswith("<nothing_saveable"):
            continue
        operator, nbytes = _nearest(words, [region.dropped_by for region in group])
        code = f"policy=[torch.ops.{operator}]" if operator else "name operators that run: trace(operators=True) lists them"
        where = fold_names(dict.fromkeys(region.where for region in group))
        found.append(Advice(Waste.UNMATCHED_POLICY, f"{where}, {words}", len(group), group[0].site, 0, nbytes, code))
    return tuple(found)


def _nearest(policy: str, dropped: Iterable[Mapping[str, int]]) -> tuple[str | None, int]:
    """Returns the operator that a policy may mean, by name or else by bytes, and the bytes which regions drop."""
    sizes: collections.Counter[str] = collections.Counter()
    for of in dropped:
        sizes.update(of)
    named = [word.strip(",<>") for word in policy.split() if word.startswith("aten.")]
    near = [name for word in named for name in difflib.get_close_matches(word, sizes, 1, 0.5)]
    found = near[0] if near else max(sizes, key=sizes.__getitem__, default=None)
    return found, 0 if found is None else sizes[found]


# Tables. Regions alike are one row, as in ``"x12 layers.0-11 Block"``: with figures of one, and a mean time.

_HEADER = ("region", "dropped", "held", "to host", "recomputes", "ms each", "operators", "again", "line", "kind")
_NUMBERS = range(1, 8)
_LARGEST = 5  # regions in a note


def largest_of(regions: Sequence[RegionTrace]) -> list[str]:
    """Returns lines on the regions that hold most, each with its line, the reasons, and what takes the largest part away."""

    def size(group: Sequence[RegionTrace]) -> int:
        return sum(sum(region.held_bytes.values()) for region in group)

    def key(region: RegionTrace) -> object:
        return name_pattern(region.module or ""), name_pattern(region.name), region.site, tuple(region.held_bytes)

    lines = []
    for group in sorted(alike(regions, key), key=size, reverse=True)[:_LARGEST]:
        held = group[0].held_bytes
        remedy = REMEDIES.get(Reason(max(held, key=held.__getitem__)), "")
        words = format_bytes(size(group)), _label(group), group[0].site or "", ", ".join(held)
        lines.append("  ".join(words) + (f": {remedy}" if remedy else ""))
    return lines


def _rows_of(regions: Sequence[RegionTrace], indent: str) -> Iterator[list[str]]:
    for group in alike(regions, _signature):
        first = group[0]
        recomputes, seconds = first.recomputes * len(group), sum(region.recompute_seconds for region in group)
        yield [
            indent + _label(group),
            format_bytes(first.dropped_bytes),
            format_bytes(sum(first.held_bytes.values())),
            format_bytes(first.offloaded_bytes) if first.offloaded_bytes else "",
            str(first.recomputes),
            f"{seconds / recomputes * 1e3:.2f}" if recomputes else "",
            *("" if number is None else str(number) for number in (first.operators, first.recomputed_operators)),
            first.site or "",
            first.kind,
        ]
        yield from _rows_of([inner for region in group for inner in region.regions], f"{indent}  ")


def _signature(region: RegionTrace) -> object:
    return (
        *(name_pattern(region.module or ""), name_pattern(region.name), region.kind),
        *(region.site, region.operators, region.dropped_bytes, tuple(sorted(region.held_bytes.items()))),
        *(region.offloaded_bytes, region.recomputes, region.recomputed_operators),
        tuple(map(_signature, region.regions)),
    )


def _label(group: Sequence[RegionTrace]) -> str:
    """Returns number, modules and name of regions alike, as in ``"x12 layers.0-11 Block"``; a name that both have once."""
    modules = fold_names(region.module or "" for region in group)
    names = fold_names(region.name for region in group)
    return " ".join(filter(None, (times(group), modules if modules != names else "", names)))
