"""Advice: a waste, its bytes, and a line of code to write; policies that never matched in a traced step."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_hooks._core.holdings import Reason

from .formatting import Table, alike, fold_names, format_bytes


class Waste(str, enum.Enum):
    """A kind of waste."""

    #: A region alone holds a tensor which needs no gradient, for the recompute; a closure's tensor is held with a copy.
    HELD_INPUT = "input held for recompute"
    #: A region drops nothing, or next to nothing.
    SAVES_NOTHING = "drops nothing"
    #: A region around one leaf, which drops nothing or next to nothing.
    LEAF = "region around a leaf"
    #: A policy by which no region has kept anything.
    UNMATCHED_POLICY = "policy matches nothing"
    #: A result of a region which something outside holds in backward.
    HELD_OUTSIDE = "result held from outside"
    #: Regions in regions in regions.
    NESTED = "nested three times"


@dataclasses.dataclass(frozen=True)
class Advice:
    """A waste, and what following the advice gives.

    Attributes:
        waste: The kind.
        where: The regions, as in ``"layers.0-11 Block"``.
        count: Their number.
        site: The line which entered them, or which made the result; None where unknown.
        peak_nbytes: How much lower the peak of the step is without the waste; 0 where that is not known.
        recomputed_nbytes: The bytes which are no longer computed again.
        code: A line of code to write.
    """

    waste: Waste
    where: str
    count: int
    site: str | None
    peak_nbytes: int
    recomputed_nbytes: int
    code: str

    def to_json(self) -> dict[str, Any]:
        """Returns the advice as values for ``json.dumps``."""
        return {**dataclasses.asdict(self), "waste": self.waste.value}


def table_of_advice(advice: Sequence[Advice]) -> Iterator[Table]:
    """Yields a table of advice, if there is any."""
    rows = [
        [
            format_bytes(one.peak_nbytes) if one.peak_nbytes else "",
            format_bytes(one.recomputed_nbytes) if one.recomputed_nbytes else "",
            one.waste.value,
            f"x{one.count} {one.where}" if one.count > 1 else one.where,
            one.site or "",
            one.code,
        ]
        for one in advice
    ]
    if rows:
        yield Table(["less peak", "less again", "advice", "region", "line", "write"], rows, (0, 1), (3, 5))


def unmatched_policies(regions: Iterable[Any]) -> tuple[Advice, ...]:
    """Returns the policies by which no :class:`RegionTrace` of a step has kept anything."""
    found = []
    for group in alike((region for region in regions if region.policy), lambda region: region.policy):
        kept = sum(region.held_bytes.get(reason.value, 0) for region in group for reason in (Reason.POLICY, Reason.NAME))
        dropped = sum(region.dropped_bytes for region in group)
        words = group[0].policy or ""
        if kept or not dropped or any(region.offloaded_bytes for region in group) or words.startswith("<nothing_saveable"):
            continue
        operator, nbytes = _nearest(words, [region.dropped_by for region in group])
        code = f"policy=[torch.ops.{operator}]" if operator else "name operators that run: trace(operators=True) lists them"
        where = fold_names(dict.fromkeys(region.module or region.name for region in group))
        found.append(Advice(Waste.UNMATCHED_POLICY, f"{where}, {words}", len(group), group[0].site, 0, nbytes, code))
    return tuple(found)


def _nearest(policy: str, dropped: Iterable[Mapping[str, int]]) -> tuple[str | None, int]:
    """Returns the operator that a policy may mean, by name or else by bytes, and the bytes which regions drop."""
    sizes: dict[str, int] = {}
    for of in dropped:
        for name, nbytes in of.items():
            sizes[name] = sizes.get(name, 0) + nbytes
    named = [word.strip(",<>") for word in policy.split() if word.startswith("aten.")]
    near = [name for word in named for name in difflib.get_close_matches(word, sizes, 1, 0.5)]
    found = near[0] if near else max(sizes, key=sizes.__getitem__, default=None)
    return found, 0 if found is None else sizes[found]
