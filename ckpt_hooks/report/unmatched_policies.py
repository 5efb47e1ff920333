"""Policies that never matched, in a traced step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_hooks._core.holdings import Reason

from .advice import Advice, Waste
from .formatting import alike, fold_names

__all__ = ["unmatched_policies"]


def unmatched_policies(regions: Iterable[Any]) -> tuple[Advice, ...]:
    """Returns the policies by which no region of a step has kept anything.

    Args:
        regions: The regions, each a :class:`RegionTrace`.
    """
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
    """Returns the operator that a policy may mean, and the bytes of its results which regions drop.

    That is the operator with the nearest name to one which the policy names, or else the one with the most bytes.
    """
    sizes: dict[str, int] = {}
    for of in dropped:
        for name, nbytes in of.items():
            sizes[name] = sizes.get(name, 0) + nbytes
    named = [word.strip(",<>") for word in policy.split() if word.startswith("aten.")]
    near = [name for word in named for name in difflib.get_close_matches(word, sizes, 1, 0.5)]
    found = near[0] if near else max(sizes, key=sizes.__getitem__, default=None)
    return found, 0 if found is None else sizes[found]
