"""``plan_memory``: profile, solve, measure, correct."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from ckpt_hooks._core.misuse import checked_flag, described_as
from ckpt_hooks.errors import BudgetTooSmallError
from ckpt_hooks.modules import apply_checkpointing
from ckpt_hooks.report.ledger.recording import memory_ledger

from .blocks import blocks_of
from .budgets import Budget, parsed
from .choosing import Problem, choose, options_of
from .cuts import choices_of, lasting_in
from .plan import KeptRun, Plan, PlannedBlock
from .profiling import Profile, profile_step
from .restoring import as_before
from .simulating import natural_ends, peak_of

__all__ = ["plan_memory"]

_CORRECTIONS = 3
_COSTS = ("operations", "seconds")


def plan_memory(
    model: Module,
    step: Callable[[Module], Any],
    memory_budget: Budget,
    *,
    blocks: Any = None,
    total: bool = False,
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
    budget = parsed(memory_budget)
    checked_flag(total, "total")
    if cost not in _COSTS:
        raise ValueError(f"cost={cost!r} is none. Pass 'operations' or 'seconds'.")
    _check(model, step)
    base = memory_ledger(_nothing).base_nbytes if total else 0  # before copies lie on the host, which may be the device
    with as_before(model):
        plain = memory_ledger(lambda: step(model))
    if not any(phase.name == "backward" for phase in plain.phases):
        raise ValueError("The step ran no backward. Pass a step which does: `lambda model: model(x).sum().backward()`.")
    found = blocks_of(model, blocks, plain)
    options = {name: {"recorded": True, "replay_whole": False} for name in found}
    with as_before(model), apply_checkpointing(model, options):
        profile = profile_step(lambda: step(model), found)
    called = {entry.block for entry in profile.entries}
    if missing := [name for name in found if name not in called]:
        raise ValueError(
            f"The step never calls {', '.join(map(repr, missing))} with gradients. Leave it out of blocks, or have the step "
            "call it."
        )
    if cost == "seconds":
        profile.cost_by_seconds()
    natural = natural_ends(profile)
    firsts = {
        entry.block: (entry, lasting) for entry, lasting in reversed([*zip(profile.entries, lasting_in(profile), strict=True)])
    }
    choices = {name: choices_of(profile, *firsts[name]) for name in found}
    problem = Problem(profile, options_of(profile, choices), natural)
    least = problem.peak(problem.least())
    if isinstance(budget, float):
        budget = int(least + budget * max(0.0, plain.peak.nbytes - least))
    elif total:
        budget -= base
    if least > budget:
        raise _too_small(budget, int(least), base, problem)
    return _corrected(model, step, profile, problem, natural, budget, plain.peak.nbytes, tolerance)


def _check(model: Any, step: Any) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"model should be a torch.nn.Module, but got {described_as(model)}. Pass the model, then the step.")
    if not callable(step):
        raise TypeError(f"step should be a function of the model, but got {described_as(step)}. Write `lambda model: ...`.")
    if any(getattr(one, "_compiled_call_impl", None) is not None or hasattr(one, "_orig_mod") for one in model.modules()):
        raise ValueError(
            "The model is compiled, and a compiler has a plan of its own: torch._functorch.config.activation_memory_budget, "
            "which gives wrong gradients with dropout below 1.0 (https://github.com/pytorch/pytorch/issues/190758). Pass the "
            "model before torch.compile."
        )


def _nothing() -> None:
    pass


def _too_small(budget: int, least: int, base: int, problem: Problem) -> BudgetTooSmallError:
    bottleneck = problem.bottleneck()
    there = "outside of any block" if bottleneck is None else f"in block {bottleneck!r}"
    return BudgetTooSmallError(
        f"No plan fits {budget + base} bytes: the least peak is {least + base} bytes, {there}. Raise the budget, or pass "
        "smaller blocks, a smaller batch, or more of the model as blocks.",
        budget=budget + base,
        minimum=least + base,
        bottleneck=bottleneck,
    )


def _corrected(
    model: Module,
    step: Callable[[Module], Any],
    profile: Profile,
    problem: Problem,
    natural: Sequence[int],
    budget: int,
    plain: int,
    tolerance: float,
) -> Plan:
    """Returns the plan measured, after corrections of the target by what the prediction was off."""
    target, best, seen = float(budget), None, list[list[int]]()
    for _ in range(_CORRECTIONS):
        chosen = choose(problem, target)
        if chosen is None or chosen in seen:
            break
        seen.append(chosen)
        effects = [effect for of, option in zip(problem.options, chosen, strict=True) for effect in of[option].effects]
        predicted = peak_of(profile, effects, natural)
        plan = _plan(model, profile, problem, chosen, budget, predicted, plain)
        with as_before(model), plan.apply():
            measured = memory_ledger(lambda: step(model)).peak.nbytes
        if measured <= budget and (best is None or plan.recomputed < best.recomputed):
            best = _measured(plan, measured)
        if budget * (1 - tolerance) <= measured <= budget:
            break
        target = budget + predicted - measured
    if best is None:
        raise _too_small(budget, int(problem.peak(problem.least())), 0, problem)
    return best


def _measured(plan: Plan, measured: int) -> Plan:
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return Plan(**{**values, "measured_peak": measured})


def _plan(
    model: Module, profile: Profile, problem: Problem, chosen: Sequence[int], budget: int, predicted: int, plain: int
) -> Plan:
    blocks, modules = [], dict(model.named_modules())
    forward = again = seconds = 0.0
    for name, of, number in zip(problem.blocks, problem.options, chosen, strict=True):
        option = of[number]
        entries = [entry for entry in profile.entries if entry.block == name]
        whole = sum(op.cost for entry in entries for op in entry.ops)
        ran = [entry.ops[at] for entry, effect in zip(entries, option.effects, strict=True) for at in effect.again]
        took = sum(op.seconds for op in ran)
        made = sum(profile.allocations[number].nbytes for op in ran for number in op.fresh)
        kept = None
        if option.choice.kept is not None:
            kept = tuple(_kept(profile, entries[0], at) for at in option.choice.kept)
        size = sum(run.nbytes for run in kept or ()) * len(entries)
        share = option.cost / whole if whole else 0.0
        blocks.append(PlannedBlock(name, type(modules[name]).__name__, kept, size, share, took, made))
        forward, again, seconds = forward + whole, again + option.cost, seconds + took
    return Plan(
        blocks=tuple(blocks),
        budget=budget,
        predicted_peak=predicted,
        measured_peak=predicted,
        least_peak=int(problem.peak(problem.least())),
        plain_peak=plain,
        recomputed=again / forward if forward else 0.0,
        recomputed_seconds=seconds,
        _model=weakref.ref(model),
    )


def _kept(profile: Profile, entry: Any, at: int) -> KeptRun:
    op = entry.ops[at]
    size = sum(profile.allocations[number].nbytes for number in op.fresh)
    return KeptRun(op.run.module, op.run.operator, op.run.number, size)
