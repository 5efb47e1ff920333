"""Plans: which results each block keeps. Applied to a model, printed, and taken to other processes."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn import Module

from ckpt_hooks.modules import AppliedCheckpointing, apply_checkpointing
from ckpt_hooks.policies import save_indices
from ckpt_hooks.policies.base import operator_named
from ckpt_hooks.report.formatting import Printed, Table, alike, fold_names, format_bytes, name_pattern, times

__all__ = ["KeptRun", "Plan", "PlannedBlock"]


@dataclasses.dataclass(frozen=True)
class KeptRun:
    """A run of an operator whose result a block keeps.

    Attributes:
        module: The submodule's name in the block; ``""`` for the block itself.
        operator: The operator, as in ``"aten.addmm.default"``.
        number: The number of earlier runs of the operator in the submodule.
        nbytes: The bytes kept.
    """

    module: str
    operator: str
    number: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class PlannedBlock:
    """A block of a plan.

    Attributes:
        name: The block's name in the model.
        kind: Its class.
        kept: The results kept; None without a region, where autograd keeps all.
        kept_bytes: The bytes kept, in all calls.
        recomputed: The part of the block's forward that runs again, by cost.
        recomputed_seconds: The seconds of the operators that run again, as measured in the profile.
        recomputed_bytes: The bytes of the results of these operators, in all calls.
    """

    name: str
    kind: str
    kept: tuple[KeptRun, ...] | None
    kept_bytes: int
    recomputed: float
    recomputed_seconds: float
    recomputed_bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Printed):
    """Which results each block of a model keeps, for a step to fit a budget.

    Made by :func:`ckpt_hooks.planner.plan_memory`. ``print`` shows a table of blocks. Peaks are above the memory in use when a
    step begins.

    Attributes:
        blocks: The blocks.
        budget: The bytes given.
        predicted_peak: The peak predicted from the profile.
        measured_peak: The peak of a step under the plan.
        least_peak: The least peak of any plan, as predicted.
        plain_peak: The peak of a step without regions, as measured.
        recomputed: The part of forward that runs again, by cost: floating-point operations, and ten for each byte moved.
        recomputed_seconds: The seconds of the operators that run again, as measured in the profile.
    """

    blocks: tuple[PlannedBlock, ...]
    budget: int
    predicted_peak: int
    measured_peak: int
    least_peak: int
    plain_peak: int
    recomputed: float
    recomputed_seconds: float
    _model: weakref.ref[Module] | None = dataclasses.field(default=None, compare=False)

    def apply(self, model: Module | None = None) -> AppliedCheckpointing:
        """Makes the blocks of a model regions which keep what the plan says.

        Args:
            model: The model; None for the one that was planned, which the plan holds weakly.

        Returns:
            A handle which undoes, as that of :func:`ckpt_hooks.apply_checkpointing`.

        Raises:
            ValueError: If the model is gone, or has no such blocks.
        """
        found = model if model is not None else None if self._model is None else self._model()
        if found is None:
            raise ValueError(
                "The model of this plan is gone, or the plan comes from a file. Pass a model: `plan.apply(model)`."
            )
        options = {block.name: _options_of(block) for block in self.blocks if block.kept is not None}
        return apply_checkpointing(found, options) if options else AppliedCheckpointing((), ())

    def _headline(self) -> str:
        return (
            f"peak {format_bytes(self.measured_peak)} of {format_bytes(self.budget)}, {format_bytes(self.predicted_peak)} "
            f"predicted; {self.recomputed:.1%} of forward runs again, in {self.recomputed_seconds * 1e3:.1f} ms; from "
            f"{format_bytes(self.least_peak)} at least to {format_bytes(self.plain_peak)} without regions"
        )

    def _tables(self) -> Iterator[Table]:
        def key(block: PlannedBlock) -> object:
            kept = None if block.kept is None else tuple(map(_in_words, block.kept))
            return name_pattern(block.name), block.kind, kept, block.kept_bytes

        rows = []
        for group in alike(self.blocks, key):
            first = group[0]
            kept = "all, no region" if first.kept is None else ", ".join(map(_in_words, first.kept)) or "nothing"
            seconds = sum(block.recomputed_seconds for block in group) / len(group)
            names = fold_names(block.name for block in group)
            again = f"{first.recomputed:.0%}", f"{seconds * 1e3:.2f}", format_bytes(first.recomputed_bytes)
            rows.append([times(group), names, first.kind, *again, format_bytes(first.kept_bytes), kept])
        header = ["", "block", "class", "again", "ms", "bytes", "kept", "results"]
        yield Table(header, rows, (0, 3, 4, 5, 6), (1, 7))

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as values for ``json.dumps``, for :meth:`from_json`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "_model"}
        return {**values, "blocks": [dataclasses.asdict(block) for block in self.blocks]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """Returns the plan of :meth:`to_json`.

        Args:
            values: The values.
        """
        blocks = []
        for block in values["blocks"]:
            kept = None if block["kept"] is None else tuple(KeptRun(**run) for run in block["kept"])
            blocks.append(PlannedBlock(**{**block, "kept": kept}))
        return cls(**{**values, "blocks": tuple(blocks)})


def _options_of(block: PlannedBlock) -> dict[str, Any]:
    policy = None
    if block.kept:
        policy = save_indices([(run.module, operator_named(run.operator), run.number) for run in block.kept])
    return {"recorded": True, "replay_whole": False, "policy": policy}


def _in_words(run: KeptRun) -> str:
    name = run.operator.partition(".")[2].removesuffix(".default")
    number = f" {run.number + 1}" if run.number else ""
    return f"{run.module}:{name}{number}" if run.module else f"{name}{number}"
