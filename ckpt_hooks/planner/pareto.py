"""The front of a plan: the cost of each budget, beside the choices of ``torch.utils.checkpoint``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpt_hooks.report.ledger.pictures import Picture, figure_of, scale_of
from ckpt_hooks.report.printing import Printed, Table, check_path, count_of, format_bytes

from .profiling import BlockCall, OpRun
from .searching import Search
from .simulating import effect_of, peak_of

_BUDGETS = 24  # of a front, from the least peak to the peak without regions; a guard goes down by the same steps


@dataclasses.dataclass(frozen=True)
class ParetoPoint:
    """A choice of what to keep, as predicted from the profile.

    Attributes:
        name: The budget in words, or the choice.
        peak: The peak in bytes, above the memory in use when a step begins.
        recomputed: The part of forward that runs again, by cost.
        recomputed_seconds: The seconds of the operators that run again, as measured in the profile.
        plan: The :class:`Plan`, as predicted; None for choices of torch's.
    """

    name: str
    peak: int
    recomputed: float
    recomputed_seconds: float
    plan: Any = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, repr=False)
class ParetoFront(Printed):
    """Peaks and recomputation of plans for all budgets, from :meth:`ckpt_hooks.planner.Plan.pareto`.

    Attributes:
        plans: The plans, smallest budget first.
        torch: What ``torch.utils.checkpoint`` offers: nothing kept, matrix products kept, every second matrix product kept; on
            all blocks, on the first blocks, or on every n-th.
        chosen: The plan that the front was made from.
        budget: The budget of this plan in bytes.
    """

    plans: tuple[ParetoPoint, ...]
    torch: tuple[ParetoPoint, ...]
    chosen: ParetoPoint
    budget: int

    def plot(self, path: str | os.PathLike[str] | None = None) -> Picture:
        """Draws the part of forward that runs again, by the cost that plans minimize, against the peak.

        The line has steps: for a budget between two plans, the plan with the lower peak is the cheapest.

        Args:
            path: A file to write, as in ``"front.png"`` or ``"front.svg"``; None to write none.

        Returns:
            The picture, which notebooks show.

        Raises:
            ImportError: If matplotlib is absent: ``pip install 'ckpt_hooks[plot]'``.
        """
        if path is not None:
            check_path(path, "front.svg")
        figure = figure_of(7, 4)
        axes = figure.subplots()
        unit, size = scale_of(max(point.peak for point in (*self.plans, *self.torch)))

        def draw(points: Sequence[ParetoPoint], **look: Any) -> None:
            axes.plot([point.peak / size for point in points], [point.recomputed * 100 for point in points], **look)

        crosses = "torch.utils.checkpoint: nothing, products, or half of them kept;\non all blocks, every n-th, or the first n"
        draw(self.torch, linestyle="none", marker="x", color="#d1495b", label=crosses)
        draw(self.plans, marker=".", color="#2a788e", drawstyle="steps-post", label="plans")
        draw([self.chosen], linestyle="none", marker="*", markersize=14, color="black", label="this plan")
        axes.axvline(self.budget / size, color="0.25", linewidth=0.9, linestyle=(0, (1, 2)), label="budget")
        axes.set_xlabel(f"peak of the step, {unit}")
        axes.set_ylabel("forward that runs again, % of its cost")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        picture = Picture(figure)
        if path is not None:
            picture.save(path)
        return picture

    def _headline(self) -> str:
        first, last = self.plans[0], self.plans[-1]
        return (
            f"{count_of(len(self.plans), 'plan')} from {format_bytes(first.peak)}, where {first.recomputed:.1%} of forward "
            f"runs again, to {format_bytes(last.peak)}, where {last.recomputed:.1%} does"
        )

    def _tables(self) -> Iterator[Table]:
        for title, points in (("plans", self.plans), ("torch.utils.checkpoint", self.torch)):
            rows = [
                [format_bytes(point.peak), f"{point.recomputed:.1%}", f"{point.recomputed_seconds * 1e3:.2f}", point.name]
                for point in points
            ]
            yield Table(["peak", "again", "ms", title], rows, (0, 1, 2), (3,))


def step_of(search: Search) -> float:
    """Returns the bytes between two budgets of a front."""
    return max(0, search.plain_peak - search.least_of_all) / (_BUDGETS - 1)


def budgets_of(search: Search) -> Iterator[tuple[int, Search, list[int]]]:
    """Yields budgets from the least to the peak without regions, each with its choice; equal choices once."""
    seen = list[list[int]]()
    least, step = search.least_of_all, step_of(search)
    for number in range(_BUDGETS):
        budget = least + step * number
        source, chosen = search.cheapest(budget)
        if chosen not in seen:
            seen.append(chosen)
            yield int(budget), source, chosen


def points_of_torch(search: Search) -> tuple[ParetoPoint, ...]:
    """Returns the points of usual choices with ``torch.utils.checkpoint``."""
    profile = search.profile
    whole = sum(op.cost for entry in profile.entries for op in entry.ops)

    def point(name: str, keeps: Callable[[BlockCall], list[int]], blocks: frozenset[str]) -> ParetoPoint:
        effects = [effect_of(profile, entry, keeps(entry), is_plain=entry.block not in blocks) for entry in profile.entries]
        # Torch calls the block again, up to the last operator whose result backward needs, and skips what was kept.
        again = [
            entry.ops[at]
            for entry, effect in zip(profile.entries, effects, strict=True)
            for at in sorted({*range(max(effect.again, default=-1) + 1)}.difference(keeps(entry)))
        ]
        cost, seconds = sum(op.cost for op in again), sum(op.seconds for op in again)
        peak = search.ranks.most(peak_of(profile, effects, search.natural))
        return ParetoPoint(name, peak, cost / whole if whole else 0.0, seconds)

    return tuple(
        point(f"{kept} kept, {where}", keeps, blocks)
        for kept, keeps in _POLICIES.items()
        for where, blocks in _selections(search.problem.blocks)
    )


def _is_product(op: OpRun) -> bool:
    name = op.name.removeprefix("aten.").partition(".")[0]
    return op.run is not None and (name in _PRODUCTS or "attention" in name)


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm"})

#: Policies in torch's guide to checkpointing: keep nothing, all matrix products, or every second matrix product.
_POLICIES: dict[str, Callable[[BlockCall], list[int]]] = {
    "nothing": lambda entry: [],
    "products": lambda entry: [at for at, op in enumerate(entry.ops) if _is_product(op)],
    "every second product": lambda entry: [at for at, op in enumerate(entry.ops) if _is_product(op)][::2],
}


def _selections(blocks: Sequence[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yields selections of blocks, each once."""
    count, seen = len(blocks), set[frozenset[str]]()
    for where, selected in (
        ("all blocks", blocks),
        *((f"every {n} blocks", blocks[::n]) for n in (2, 3, 4)),
        *((f"the first {n} blocks", blocks[:n]) for n in dict.fromkeys(round(count * part) for part in (0.25, 0.5, 0.75))),
    ):
        selection = frozenset(selected)
        if selection and selection not in seen:
            seen.add(selection)
            yield where, selection
