"""The memory of a training step, from shapes alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.misuse import check_module
from ckpt_hooks._torch.tensors import storage_of
from ckpt_hooks.report.formatting import Printed, Table, alike, fold_names, format_bytes, json_of, name_pattern, times
from ckpt_hooks.report.ledger import MemoryLedger, memory_ledger

from .blocks import Blocks, blocks_of
from .restoring import as_before, optimizer_state
from .searching import check_model, check_step


@dataclasses.dataclass(frozen=True)
class EstimatedBlock:
    """What backward holds of a block.

    Attributes:
        name: The block, as in ``"layers.0"``; ``""`` for what is outside of all blocks.
        kind: Its class.
        nbytes: The bytes of its results which backward holds, at the moment when it holds the most of the model.
    """

    name: str
    kind: str
    nbytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryEstimate(Printed):
    """The memory of a training step, as predicted. ``print`` shows a table.

    Made by :func:`ckpt_hooks.estimate_memory`.

    Attributes:
        peak: The most bytes in use: of the model, of what a step finds there, and of what it adds.
        step_peak: The most bytes that the step adds to what it finds.
        parameters: The bytes of the parameters.
        buffers: The bytes of the buffers.
        gradients: The bytes of the gradients of all parameters which train.
        optimizer: The bytes of the states of optimizers after the step.
        activations: The bytes of results which backward holds, at the moment when these are the most.
        blocks: These by block, each an :class:`EstimatedBlock`.
    """

    peak: int
    step_peak: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    blocks: tuple[EstimatedBlock, ...]

    to_json = json_of

    def _headline(self) -> str:
        return f"peak {format_bytes(self.peak)} predicted, {format_bytes(self.step_peak)} of which the step adds"

    def _tables(self) -> Iterator[Table]:
        names = ("parameters", "buffers", "gradients", "optimizer", "activations")
        yield Table(["bytes", "of"], [[format_bytes(getattr(self, name)), name] for name in names if getattr(self, name)], (0,))
        rows = [
            [format_bytes(sum(one.nbytes for one in group)), times(group), _names_of(group), group[0].kind]
            for group in alike(self.blocks, lambda one: (name_pattern(one.name), one.kind, one.nbytes))
        ]
        yield Table(["activations", "", "block", "class"], rows, (0, 1), (2,))


def estimate_memory(model: Module, step: Callable[[Module], Any]) -> MemoryEstimate:
    """Predicts the memory of a training step from shapes alone, of a model that need not fit, or be there.

    The step runs once on fake tensors, which take no memory and have no values. A model on the meta device counts as one on the
    default device. Steps with another batch, sequence or number of microbatches are further calls. Everything is as before
    afterwards, random streams too, after an exception as well. What is known of memory within operators is told by
    :func:`ckpt_hooks.plan_memory`, under ``dry_run``, which finds what to recompute in the same way.

    Args:
        model: The model, with parameters on any device.
        step: Runs one training step up to the gradients, ``step(model)``; an optimizer's step in it is welcome. Tensors from
            outside may be real.

    Returns:
        The :class:`MemoryEstimate`.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If the step asks for values, as by ``item()`` or a boolean mask, or the model is compiled.

    Example:
        >>> import torch
        >>> from ckpt_hooks import estimate_memory
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 4096))
        >>> found = estimate_memory(model, lambda model: model(torch.ones(64, 4096)).sum().backward())
        >>> found.parameters, found.activations
        (134250496, 3145728)
    """
    from .dry import dry  # which makes a fake mode, for those who ask for one

    check_module(model, "model", "Pass the model, then the step.")
    check_step(step)
    with dry(model):
        check_model(model)
        with as_before(model):
            before = _bytes_of(optimizer_state(model)), sum(_sizes(one.grad for one in model.parameters()).values())
            ledger = memory_ledger(lambda: step(model))
            optimizer = _bytes_of(optimizer_state(model))
        parameters, buffers = _sizes(model.parameters()), _sizes(model.buffers())
        trained = _sizes(one for one in model.parameters() if one.requires_grad)
        own = sum({**parameters, **buffers}.values())
        blocks = _blocks_of(model, ledger)
    return MemoryEstimate(
        peak=own + sum(before) + ledger.peak.nbytes,
        step_peak=ledger.peak.nbytes,
        parameters=sum(parameters.values()),
        buffers=sum(buffers.values()),
        gradients=sum(trained.values()),
        optimizer=optimizer,
        activations=sum(one.nbytes for one in blocks),
        blocks=blocks,
    )


def _names_of(group: Iterable[EstimatedBlock]) -> str:
    return fold_names(one.name for one in group) or "outside of blocks"


def _blocks_of(model: Module, ledger: MemoryLedger) -> tuple[EstimatedBlock, ...]:
    names = [name for name, _ in model.named_children()]
    with contextlib.suppress(ValueError):  # none that a plan could choose from
        names = blocks_of(model, ledger)
    kinds, sizes = Blocks(model, names).kinds, dict.fromkeys([*names, ""], 0)
    members = [(f"{inner}.", name) for name in names for inner in Blocks(model, [name]).members]
    most, at = 0, -1
    saved = [one for one in ledger.allocations if any(hold.reason is Reason.SAVED for hold in one.holds)]
    changes = [(one.born, one.nbytes) for one in saved] + [(one.freed, -one.nbytes) for one in saved if one.freed is not None]
    live = 0
    for change, nbytes in sorted(changes):
        live += nbytes
        if live > most:
            most, at = live, change
    for one in saved:
        if one.born <= at and (one.freed is None or at < one.freed):
            inner = (one.origin.module or "").rpartition(" ")[0]
            sizes[next((name for start, name in members if f"{inner}.".startswith(start)), "")] += one.nbytes
    return tuple(EstimatedBlock(name, kinds.get(name, ""), size) for name, size in sizes.items() if name or size)


def _bytes_of(states: dict[int, tuple[str, int]]) -> int:
    return sum(nbytes for _, nbytes in states.values())


def _sizes(tensors: Iterable[Tensor | None]) -> dict[int | None, int]:
    """Returns the bytes of storages."""
    return {storage_of(one): one.untyped_storage().nbytes() for one in tensors if one is not None}
