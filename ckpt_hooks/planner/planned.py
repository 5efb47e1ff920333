"""Planned blocks: the results each keeps, and the functions which call blocks so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .shapes import OtherShapes, PlannedRunner, Runs, Shapes

__all__ = ["KeptRun", "PlannedBlock", "runners_of"]


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
        kind: The class.
        kept: The results kept; None without a region, where autograd keeps all.
        kept_bytes: The bytes kept, in all calls.
        recomputed: The part of the block's forward that runs again, by cost.
        recomputed_seconds: The seconds of the operators that run again, as measured in the profile.
        recomputed_bytes: The bytes of the results of these operators, in all calls.
        shapes: The shapes of its calls, each once: dtype and shape of each tensor in the arguments.
    """

    name: str
    kind: str
    kept: tuple[KeptRun, ...] | None
    kept_bytes: int
    recomputed: float
    recomputed_seconds: float
    recomputed_bytes: int
    shapes: tuple[Shapes, ...]


def runners_of(blocks: Iterable[PlannedBlock]) -> dict[str, PlannedRunner]:
    """Returns a function for each block, by the block's name, which calls the block as planned.

    Args:
        blocks: The blocks, of several plans maybe. Of two for the same shapes, the latter counts.
    """
    kept: dict[str, dict[Shapes, Runs | None]] = {}
    for block in blocks:
        runs = None if block.kept is None else tuple((run.module, run.operator, run.number) for run in block.kept)
        kept.setdefault(block.name, {}).update(dict.fromkeys(block.shapes, runs))
    on_other = OtherShapes()
    return {name: PlannedRunner(name, by_shapes, on_other) for name, by_shapes in kept.items()}
