"""``plan_memory``: the public form of the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from .budgets import Budget
from .plan import Plan
from .searching import searched

__all__ = ["plan_memory"]


def plan_memory(
    model: Module,
    step: Callable[[Module], Any],
    memory_budget: Budget,
    *,
    blocks: Any = None,
    total: bool = False,
    margin: float = 0.0,
    tolerance: float = 0.01,
    cost: str = "operations",
) -> Plan:
    """Finds which activations to keep, for a training step to fit a budget at the least recomputation.

    Runs the step once as it is, once with every block a recorded region that keeps nothing, and once under the plan, up to
    three times where the prediction was off. The plan that is returned has been measured. Afterwards everything is as before:
    parameters, buffers, gradients, optimizers, attributes, hooks and random streams, after an exception too. Copies for that
    lie on the host, as large as parameters, buffers, gradients and optimizer states together.

    Args:
        model: The model.
        step: Runs one training step up to the gradients, ``step(model)``; an optimizer's step in it is welcome.
        memory_budget: The peak allowed: bytes, words such as ``"20GiB"``, or a part from 0.0, the least peak of any plan, to
            1.0, that of no regions.
        blocks: The modules whose calls may be regions, as :func:`ckpt_hooks.apply_checkpointing` takes them; None to find
            them.
        total: Whether the budget is for all memory in use, not only for what the step adds.
        margin: The part of the budget that the measured step leaves free, as 0.03, for a model whose operators depend on data,
            such as a mixture of experts: with other data of the same shapes it takes other memory.
        tolerance: How far below the budget the measured peak may stay, as a part of it, before another plan is tried.
        cost: What is to be the least: ``"operations"`` that run again, and ten for each byte that these move, the same in each
            run; or ``"seconds"`` as the profile measures them on the host, for steps on the host.

    Returns:
        The :class:`Plan`. ``plan.apply()`` makes the regions, ``print(plan)`` shows them.

    Raises:
        BudgetTooSmallError: If no plan fits.
        TypeError: If an argument is of another kind.
        ValueError: If the step runs no backward, a block is never called or checkpointed already, there are no blocks, or the
            model is compiled.

    Example:
        >>> import torch
        >>> from ckpt_hooks.planner import plan_memory
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)) for _ in range(4)]
        >>> model, x = torch.nn.Sequential(*layers), torch.ones(512, 64)
        >>> plan = plan_memory(model, lambda model: model(x).sum().backward(), 0.5, blocks=["*"])
        >>> plan.measured_peak <= plan.budget
        True
        >>> with plan.apply():
        ...     model(x).sum().backward()
    """
    options = {"blocks": blocks, "total": total, "margin": margin, "tolerance": tolerance, "cost": cost}
    return Plan(**searched(model, step, memory_budget, **options))
