"""Entries of reports, plain values without tensors: where memory comes from, why it is held, and what takes it away."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ckpt_hooks._core.holdings import Reason

from .formatting import Table, format_bytes, json_of


class Maker(str, enum.Enum):
    """What made an allocation. Of several, the first in this list counts."""

    #: The recompute of a region.
    RECOMPUTE = "recompute"
    #: Forward of a region.
    REGION = "region"
    #: A node of backward.
    BACKWARD = "backward"
    #: Forward of a module, outside of regions.
    MODULE = "module"
    #: An optimizer.
    OPTIMIZER = "optimizer"
    #: None of these.
    OUTSIDE = "outside"


class Origin(NamedTuple):
    """Where memory comes from.

    Attributes:
        maker: The maker.
        region: The innermost region, by module and name, as in ``"layers.0 Block"``; None outside. Of a node of backward, the
            region in whose forward the node was made.
        module: The innermost called module, by its name in the outermost one and its class, as in ``"layers.0.mlp Linear"``;
            None outside. Of a node of backward, the module in whose forward the node was made.
        operator: The outermost operator, as in ``"aten::linear"``; None outside of operators.
        node: The running node of backward, as in ``"AddmmBackward0"``; None outside of backward.
        optimizer: The running call of an optimizer, as in ``"AdamW.step"``; None outside.
        line: The line of the program which called into torch, or else which entered the region, as in ``"model.py:12"``; None
            where unknown.
    """

    maker: Maker = Maker.OUTSIDE
    region: str | None = None
    module: str | None = None
    operator: str | None = None
    node: str | None = None
    optimizer: str | None = None
    line: str | None = None


#: Where nothing is known.
NOWHERE = Origin()


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
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
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
        return json_of(self)


class Waste(str, enum.Enum):
    """A kind of waste."""

    #: A region alone holds a tensor which needs no gradient, for the recompute; a closure's tensor is held with a copy.
    HELD_INPUT = "input held for recompute"
    #: A region drops nothing, or next to nothing.
    SAVES_NOTHING = "drops nothing"
    #: A policy by which no region has kept anything.
    UNMATCHED_POLICY = "policy matches nothing"
    #: A result of forward which the program, and not the graph, holds in backward.
    HELD_OUTSIDE = "result held in backward"
    #: Results for all parameters at once, in a step of an optimizer.
    FOREACH = "optimizer on lists"


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
        is_at_most: Whether ``peak_nbytes`` is a bound: something else may hold the memory, or take its place.
    """

    waste: Waste
    where: str
    count: int
    site: str | None
    peak_nbytes: int
    recomputed_nbytes: int
    code: str
    is_at_most: bool = False

    to_json = json_of


def table_of_advice(advice: Sequence[Advice]) -> Table:
    """Returns a table of advice."""
    rows = [
        [
            f"{'at most ' * one.is_at_most}{format_bytes(one.peak_nbytes)}" if one.peak_nbytes else "",
            format_bytes(one.recomputed_nbytes) if one.recomputed_nbytes else "",
            one.waste.value,
            f"x{one.count} {one.where}" if one.count > 1 else one.where,
            one.site or "",
            one.code,
        ]
        for one in advice
    ]
    return Table(["less peak", "less again", "advice", "region", "line", "write"], rows, (0, 1), (3, 5))


#: What takes away memory that is held for a reason; None for what the program alone holds.
REMEDIES: dict[Reason | None, str] = {
    None: "delete it once it is used, with the list or attribute that has it",
    Reason.SAVED: "checkpoint_region() around the lines that use it",
    Reason.HOOKS: "no saved-tensor hooks around it, or hooks that keep less",
    Reason.CTX: "ctx.save_for_backward in the autograd.Function",
    Reason.NOT_REPLAYED: "a plain checkpoint(function, *args), which calls it again",
    Reason.INPUT: "offload_inputs=True, or one region around several of these",
    Reason.POLICY: "a policy that keeps less, or offloads it",
    Reason.NAME: "a policy without this name, or one that offloads it",
    Reason.STATE: "make it inside of the region, or pass it as an argument",
    Reason.RANDOM_STATE: "preserve_rng_state=False, where nothing is drawn",
    Reason.RECOMPUTED: "smaller regions",
    Reason.GRADIENT: "the optimizer's step in hooks of backward, with zero_grad()",
    Reason.BACKWARD: "fewer samples at a time",
}
