"""The memory of a training step, by kind and by block, from a dry run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks.report.ledger import MemoryLedger, ledger_of
from ckpt_hooks.report.printing import (
    Printed,
    Table,
    alike,
    fold_names,
    format_bytes,
    json_of,
    name_pattern,
    times,
    up_to_number,
)
from ckpt_hooks.report.progress import begin_step, shown

from .restoring import as_before, dry, optimizer_state, state_of
from .searching import check_model, check_step


@dataclasses.dataclass(frozen=True)
class BlockActivations:
    """The activations of a block that backward needs.

    Attributes:
        name: The module's name; ``""`` for the model itself.
        kind: The module's class.
        nbytes: Bytes at the end of forward.
    """

    name: str
    kind: str
    nbytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryEstimate(Printed):
    """The estimated memory of a training step, from :func:`ckpt_hooks.estimate_memory`. ``print`` shows a table of blocks.

    Attributes:
        parameters: Bytes of parameters.
        buffers: Bytes of buffers.
        gradients: Bytes of gradients.
        optimizer_state: Bytes of optimizer states, for optimizers that step in the step.
        activations: What backward needs at the end of forward, a :class:`BlockActivations` for each block. With microbatches,
            the largest.
        peak: The peak in bytes, including all of the above.
        peak_phase: The phase of the peak: ``"forward"``, ``"backward"``, ``"optimizer"`` or ``"rest"``.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: tuple[BlockActivations, ...]
    peak: int
    peak_phase: str

    to_json = json_of

    def _headline(self) -> str:
        return f"peak {format_bytes(self.peak)}, in {self.peak_phase}"

    def _tables(self) -> Iterator[Table]:
        activations = sum(block.nbytes for block in self.activations)
        kinds = ("parameters", "buffers", "gradients", "optimizer_state")
        sizes = {kind.replace("_", " "): getattr(self, kind) for kind in kinds} | {"activations": activations}
        yield Table(["", "bytes"], [[kind, format_bytes(size)] for kind, size in sizes.items() if size], (1,))
        groups = alike(self.activations, lambda block: (name_pattern(block.name), block.kind, block.nbytes))
        rows = [
            [times(group), fold_names(block.name for block in group), group[0].kind, format_bytes(group[0].nbytes)]
            for group in groups
        ]
        yield Table(["", "block", "class", "activations"], rows, (0, 3), (1,))


def estimate_memory(model: Module, step: Callable[[Module], Any], *, progress: bool = True) -> MemoryEstimate:
    """Estimates the memory of a training step without allocating it, also for models that fit on no device.

    Runs the step twice on fake tensors, which have shapes but no data, and measures the second run, when gradients and
    optimizer states exist. Restores the model afterwards. To compare batch sizes or microbatches, estimate a step for each.

    For most models on a host the estimated peak is that of the real step to the byte. Workspaces of kernels are included only
    for float32 on a host: bfloat16 matrix products there may need extra memory as large as an operand, and accelerators need
    workspaces. Steps whose shapes depend on data do not run; give Transformers models an ``attention_mask`` of four dimensions.

    Args:
        model: The model. Parameters on the meta device count as on the default device.
        step: Runs one training step, ``step(model)``. It may create an optimizer, or use one of the model's parameters.
        progress: Whether to show a line on the terminal after two seconds, with ``tqdm`` if installed. The logger
            ``"ckpt_hooks"`` is told of each run in any case.

    Returns:
        A :class:`MemoryEstimate`. ``print`` shows it, ``to_json()`` returns its values.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If an operator's result depends on data, such as ``nonzero`` or ``item``, or if the model is compiled.
        RuntimeError: If called inside a region.

    Example:
        >>> import torch
        >>> from ckpt_hooks import estimate_memory
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 4096))
        >>> estimate = estimate_memory(model, lambda model: model(torch.ones(512, 4096)).sum().backward())
        >>> estimate.parameters == estimate.gradients == 2 * (4096 + 1) * 4096 * 4
        True
    """
    check_step(step)
    check_model(model, is_dry=True)
    with shown("estimate_memory", progress), dry(model), as_before(model):
        begin_step(2)
        step(model)
        before = _bytes_of(model.parameters()), _bytes_of(model.buffers()), _bytes_of(_gradients(model))
        states_before = sum(nbytes for _, nbytes in optimizer_state(model).values())
        states: dict[int, int] = {}

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            states[id(optimizer)] = _bytes_of(state_of(optimizer))

        begin_step(2)
        with register_optimizer_step_post_hook(after), ledger_of(model) as ledger:
            step(model)
    parameters, buffers, gradients = before
    made = sum(allocation.nbytes for allocation in ledger.allocations if allocation.is_gradient)
    return MemoryEstimate(
        parameters=parameters,
        buffers=buffers,
        gradients=max(gradients, made),
        optimizer_state=max(states_before, sum(states.values())),
        activations=_activations(model, ledger),
        peak=sum(before) + states_before + ledger.peak.nbytes,
        peak_phase=ledger.peak.phase,
    )


def _gradients(model: Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _activations(model: Module, ledger: MemoryLedger) -> tuple[BlockActivations, ...]:
    modules = dict(model.named_modules())
    ends = [ledger.holders_at(phase.end - 1) for phase in ledger.phases if phase.name == "forward"]
    counted: list[collections.Counter[str]] = []
    for holders in ends:
        sizes: collections.Counter[str] = collections.Counter()
        for holder in holders:
            if holder.reason not in (None, Reason.GRADIENT):
                name = (holder.origin.module or "").rpartition(" ")[0]
                sizes[up_to_number(name) or name.partition(".")[0]] += holder.nbytes
        counted.append(sizes)
    most = max(counted, key=lambda sizes: sizes.total(), default=collections.Counter[str]())
    return tuple(BlockActivations(name, type(modules[name]).__name__, most[name]) for name in modules if most[name])
