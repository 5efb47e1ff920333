"""Plans made from a program's own steps: in the first, blocks keep nothing; the second runs under the plan and is measured.

No extra step runs, so nothing is restored. No step runs without regions, since such a step may not fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.misuse import check_is, checked_part
from ckpt_hooks._core.settings import current_settings, override
from ckpt_hooks._tensors.nested import outer_tensors_in
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.profiling import giving_way, is_profiling
from ckpt_hooks.errors import CheckpointError
from ckpt_hooks.modules import apply_checkpointing
from ckpt_hooks.modules.applying import BudgetedCheckpointing
from ckpt_hooks.modules.selecting import selector_of
from ckpt_hooks.report.printing import format_bytes

from .blocks import Blocks, blocks_of, selected_blocks
from .plan import Plan, plan_of
from .planned import OtherShapes, PlannedRunner, Shapes, is_within, kept_in
from .profiling import ModelHook, OpenStep, Profile
from .ranks import Ranks
from .restoring import trainers_of
from .searching import Room, Search, SearchTerms, accelerator_of, check_cost, check_model, cost_per_second, parsed, too_small

_logger = logging.getLogger("ckpt_hooks")

_CORRECTIONS = 3  # the most corrections of a plan whose measured peak is above the budget; the last may stay above
_OTHER = 0.1  # a fraction: a step whose peak is further off the prediction is unlike the profiled step
_MOST_PLANS = 4  # each for steps of different shapes; calls of further shapes keep nothing, with a warning
_MOST_TRIES = 8  # the most steps to profile; then as for ``_MOST_PLANS``, and a program without any plan is told so
_MOST_MEASURED = 16  # the most steps to measure; a plan whose shapes none of them had stays as predicted
_MOST_FORWARDS = 64  # the most in a step with fewer than two backwards, as in evaluation with gradients: then planning ends
# The most optimizer steps in a step of the program, where optimizers take turns, such as a critic's. An optimizer that steps
# more rarely is left out of the profile.
_MOST_STEPS = 8
_ENOUGH = 2  # backwards to profile in a step that accumulates gradients: a third is like the second


class _Runner(PlannedRunner):
    """Calls a block under the program's present plans; a copy of the runner calls the block without a region."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedRunner, (self._name, None, OtherShapes())


class _Backwards(Observer):
    """Collects the graph tasks of backwards in an open step; observed regions also skip the self-check."""

    def __init__(self) -> None:
        self.tasks: set[int] = set()

    def restored(self, region: Any, position: int, tensor: Any) -> None:
        self.tasks.add(graph_task_id())

    def see(self, result: Any) -> None:
        """Notes the backward of a result, even if the backward reaches no region."""
        add = self.tasks.add
        for node in {tensor.grad_fn for tensor in outer_tensors_in(result) if tensor.grad_fn is not None}:
            node.register_prehook(lambda gradients: add(graph_task_id()))


class _Step:
    """A step of the program under the profiler: from a forward to a step of the last optimizer."""

    def __init__(self, optimizers: set[int], blocks: Mapping[str, Module] | None, device: torch.device | None) -> None:
        self.backwards = _Backwards()
        self.optimizers = optimizers  # by the ``id`` of ``param_groups``, which wrappers of optimizers share
        self.stepped: set[int] = set()
        self.num_steps = self.num_forwards = 0
        self._open = OpenStep(blocks, device)
        self.observers = (*self._open.observers, self.backwards)
        self.end = self._open.end
        self.abandon = weakref.finalize(self, self._open.abandon)  # torch crashes if a profiler stays open

    def has_ended(self, optimizer: Optimizer) -> bool:
        """Notes that an optimizer is about to step, and returns whether it is the step's last."""
        key = id(optimizer.param_groups)
        if key not in self.optimizers:
            return False
        self.stepped.add(key)
        self.num_steps += 1
        if self.stepped < self.optimizers and self.num_steps < _MOST_STEPS:
            self.backwards.tasks.clear()  # other optimizers follow, with backwards of their own
            return False
        return True


class Machine:
    """Finds plans while a program trains; hooks of the model hold it, and it holds the model weakly."""

    def __init__(
        self, model: Module, budget: int | float | str, names: list[str], margin: float, cost: str | None, plan: Plan | None
    ) -> None:
        self._budget, self._margin, self._cost = budget, margin, cost
        self._reference = weakref.ref(model)
        # A container without a forward, such as a ModuleList of models made for this call, may have no other owner.
        self._container = model if type(model).forward is Module.forward else None
        self._device = accelerator_of(model)
        self.names = names
        self.plans: list[Plan] = [] if plan is None else [plan, *plan.others]
        self.budget = budget if isinstance(budget, int) else 0 if plan is None else plan.budget  # in bytes; 0 before a profile
        self.peaks: list[int] = []
        self.log: list[str] = []
        self._runners = {name: _Runner(name, {}, self._has_other) for name in names}
        self._say_other = OtherShapes()
        self._next: Literal["profile", "measure"] | None = "profile" if plan is None else "measure"
        self._open: _Step | None = None
        self._optimizers: set[int] = set()
        self._is_profile = False  # whether the open step is to be a profile
        self._seen: dict[str, dict[Shapes, None]] = {}  # by block: shapes of calls in the open step
        self._others: dict[str, dict[Shapes, None]] = {}  # by block: shapes that no plan has, since the latest profile
        self._target = 0.0
        self._searches: list[Search] = []
        self._num_profiled = self._num_measured = self._num_corrected = self._num_steps = 0
        self._has_again = False  # whether a step was profiled again because a peak was off its prediction
        self._has_ended = False  # whether planning was given up
        self._passes_by = False  # whether the rest of a step is ignored because its beginning was profiled
        self._outermost: Module | None = None  # the module whose call is the outermost
        self._depth = self._thread = 0
        self._observing: contextlib.ExitStack = contextlib.ExitStack()
        self._ranks: Ranks | None = None
        self._undo: list[Callable[[], object]] = []
        self._hook(model)
        if plan is not None:
            self._keep()

    @property
    def plan(self) -> Plan | None:
        """The plan in force, with plans of other shapes; None before there is a plan."""
        return dataclasses.replace(self.plans[0], others=self.plans[1:]) if self.plans else None

    @property
    def _model(self) -> Module:
        model = self._reference()
        assert model is not None  # a hook of the model's modules is running, so the model is alive
        return model

    def runners(self) -> dict[str, PlannedRunner]:
        return {**self._runners}

    def _hook(self, model: Module) -> None:
        blocks = Blocks(model, self.names)
        inside = {id(submodule) for name in blocks.members for submodule in model.get_submodule(name).modules()}
        tops = {id(root) for name, root in blocks.roots.items() if name not in blocks.spans}
        begins, ends = ModelHook(self._begins), ModelHook(self._ends)
        for module in model.modules():
            if id(module) in tops or id(module) not in inside:
                for hook in (
                    module.register_forward_pre_hook(begins, prepend=True),
                    module.register_forward_hook(ends, always_call=True),
                ):
                    self._undo.append(hook.remove)
        of_optimizers = register_optimizer_step_pre_hook(_weakly(self._steps))
        self._undo += [of_optimizers.remove, self._abandon]
        weakref.finalize(self, of_optimizers.remove).atexit = False

    def undo(self) -> None:
        for callback in self._undo:
            callback()
        self._undo, self._next = [], None
        for runner in self._runners.values():
            runner.on_call = None
            runner.keep(None)

    def _abandon(self) -> None:
        if self._open is not None:
            self._open.abandon()
            self._open = None
            giving_way.clear()  # of all threads: a process has at most one open profile

    # Hooks: what the program does.

    def _begins(self, module: Module, args: Any) -> None:
        thread = threading.get_ident()
        if self._outermost is not None:
            self._depth += module is self._outermost and thread == self._thread
            return
        self._outermost, self._depth, self._thread = module, 1, thread
        if torch.is_grad_enabled() and graph_task_id() == -1:
            self._forward_begins()
            if self._open is not None:
                observers = (*current_settings().observers, *self._open.observers)
                self._observing.enter_context(override(observers=observers))

    def _ends(self, module: Module, args: Any, result: Any) -> None:
        if module is not self._outermost or threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if not self._depth:
            self._outermost = None
            self._observing.close()
            if self._open is not None:
                self._open.backwards.see(result)

    def _forward_begins(self) -> None:
        if self._open is not None:
            self._open.num_forwards += 1
            if self._open.num_forwards > _MOST_FORWARDS:
                self._abandon()
                self._give_up(
                    f"{_MOST_FORWARDS} forwards ran with at most one backward. Call undo() to evaluate with gradients, or run "
                    "backward earlier"
                )
            if self._open is None or len(self._open.backwards.tasks) < _ENOUGH:
                return
            self._passes_by = bool(self._open.optimizers)  # without any, no step of an optimizer tells where the rest ends
            self._close()
        if self._next is None or self._passes_by:
            return
        model, ranks = self._model, self._together()
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
            self._give_up("the model is compiled, and a compiler keeps other results. Pass the model before torch.compile")
            return
        with ranks.together():
            if not all(ranks.all(not is_profiling())):  # the program itself profiles this step, so a later step is taken
                return
        self._is_profile = self._next == "profile"
        self._seen = {name: {} for name in self.names}
        for runner in self._runners.values():
            runner.on_call = self._is_called
            if self._is_profile:
                runner.keep({})
        blocks = Blocks(model, self.names).roots if self._is_profile else None
        self._fit_in(ranks)
        # Garbage that is freed in the step would lower its peak. Before a measured step little old garbage is left, since the
        # profiled step began with a full collection.
        gc.collect(2 if self._is_profile else 1)
        if self._is_profile or not self._optimizers:  # slow: looks at all objects of the program
            self._optimizers = {id(trainer.param_groups) for trainer in trainers_of(model) if isinstance(trainer, Optimizer)}
        with contextlib.suppress(RuntimeError):  # raised if another thread profiles
            self._open = _Step(self._optimizers, blocks, self._device)
            giving_way[self._thread] = _weakly(self._abandon)

    def _fit_in(self, ranks: Ranks) -> None:
        """Sets the budget to the accelerator's free memory, lowered perhaps by optimizer states that the profiled step made."""
        if self._device is None or isinstance(self._budget, float):
            return
        if self._budget == "auto":
            available = Room(self._device).nbytes()
        else:
            available = max(0, int(self._budget) - torch.accelerator.memory_allocated(self._device))
        with ranks.together():
            available = -ranks.most(-available)
            is_less, self.budget = available < self.budget, available
            if is_less and not self._is_profile and self._searches:
                self._target = self.budget * (1 - self._margin)
                self.plans[-1] = self._chosen()
                self._keep()

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._reference() is None:  # the model is gone; the program holds only the handle
            return
        if graph_task_id() == -1 and self._outermost is not None and threading.get_ident() == self._thread:
            self._outermost = None  # a KeyboardInterrupt ended a forward, and hooks were not called
            self._observing.close()
        self._passes_by = False
        if graph_task_id() == -1 and self._open is not None and self._open.has_ended(optimizer):
            self._close()
        elif self._ranks is not None and not self._ranks.is_alone and self._next is None:
            self._ask_others(optimizer)

    def _ask_others(self, optimizer: Optimizer) -> None:
        """Makes all ranks profile a step if any has met shapes of no plan; ranks ask each other in steps 1, 2, 4, 8, ..."""
        parameters, ranks = {id(parameter) for parameter in self._model.parameters()}, self._together()
        if not any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]):
            return
        self._num_steps += 1
        if not self._num_steps & (self._num_steps - 1):
            with ranks.together():
                if any(ranks.all(any(self._others.values()))) and self._may_profile():
                    self._next = "profile"

    def _is_called(self, block: str, shapes: Shapes) -> None:
        self._seen[block][shapes] = None

    def _has_other(self, block: str, shapes: Shapes) -> None:
        """Notes a call with shapes of no plan: the call keeps nothing, and a later step is profiled."""
        if self._open is not None and self._is_profile:
            return
        if self._has_ended or not self._may_profile():
            if self.plans:
                self._say_other(block, shapes)
            return
        self._others.setdefault(block, {})[shapes] = None
        if self._ranks is None or self._ranks.is_alone:
            self._next = self._next or "profile"

    def _may_profile(self) -> bool:
        return len(self.plans) < _MOST_PLANS and self._num_profiled < _MOST_TRIES

    def _together(self) -> Ranks:
        if self._ranks is None:
            self._ranks = Ranks()
        return self._ranks

    # The end of a step.

    def _close(self) -> None:
        step, self._open = self._open, None
        assert step is not None
        giving_way.clear()
        step.abandon.detach()
        for runner in self._runners.values():
            runner.on_call = None
        peak, profile = step.end()
        ranks = self._together()
        with ranks.together():
            self.peaks.append(ranks.most(peak))
            if profile is None:
                self._measured(self.peaks[-1])
            else:
                self._profiled(profile, self.peaks[-1])

    def _profiled(self, profile: Profile, peak: int) -> None:
        model, ranks = self._model, self._together()
        self._num_profiled += 1
        # No tensor was restored if the program's own profiler began in the step, or no backward ran.
        if not all(ranks.all(profile.has_backward)):
            if self._num_profiled >= _MOST_TRIES:
                self._give_up(
                    "no backward needed a result of a block in any profiled step. Select blocks that take part in the loss"
                )
            return
        self._next, self._others = None, {}
        names = [name for name in self.names if self._seen[name]]
        if all(ranks.all(self._is_known())):
            self._keep()
            self._say("a step of known shapes was profiled")
            return
        try:
            search = self._searched(model, profile, names)
        except CheckpointError as error:
            self._give_up(str(error))
            return
        least = search.least
        if isinstance(self._budget, float):
            self.budget = max(self.budget, search.budget_of(self._budget))
        self._target = self.budget * (1 - self._margin)
        if least > self._target:
            if not self.plans:
                self._next = None
                raise too_small(self.budget, least, 0, self._margin, search.problem, None)
            self._keep()
            warn_user(
                f"A step of other shapes needs at least {format_bytes(least)}, above the budget of "
                f"{format_bytes(self.budget)}, so blocks keep nothing in it. Raise memory_budget, or pass smaller batches."
            )
            return
        self._searches.append(search)
        self.plans.append(self._chosen())
        self._next, self._num_corrected = "measure", 0
        self._keep()
        above = f", above the budget of {format_bytes(self.budget)}: blocks kept nothing in it" if peak > self.budget else ""
        self._say(
            f"step profiled: {format_bytes(peak)} of {format_bytes(search.plain_peak)} without regions{above}; a plan of "
            f"{format_bytes(self.plans[-1].predicted_peak)}, where {self.plans[-1].recomputed:.1%} of forward runs again",
            logging.WARNING if above else logging.INFO,
        )

    def _searched(self, model: Module, profile: Profile, names: list[str]) -> Search:
        ranks = self._together()
        per_second = cost_per_second(ranks, profile, self._cost, self._device)
        shapes = {name: self._seen[name] for name in names}
        blocks = Blocks(model, names)
        return Search(ranks, SearchTerms(per_second, self._margin), profile, blocks, shapes, may_call_again=False)

    def _is_known(self) -> bool:
        known = kept_in(block for plan in self.plans for block in plan.blocks)
        return all(any(is_within(call, most) for most in known.get(name, ())) for name, of in self._seen.items() for call in of)

    def _chosen(self) -> Plan:
        search = self._searches[-1]
        chosen = search.choice(self._target) or search.problem.least
        return plan_of(dataclasses.replace(search.predicted(chosen, self.budget), _model=self._reference))

    def _measured(self, peak: int) -> None:
        plan = self.plans[-1]
        self._num_measured += 1
        if self._num_measured >= _MOST_MEASURED:
            self._next = None
        seen = {(name, shapes) for of_rank in self._together().all(self._seen) for name, of in of_rank.items() for shapes in of}
        if seen != {(block.name, shapes) for block in plan.blocks for shapes in block.shapes}:
            return
        self._say(
            f"step measured: {format_bytes(peak)} of {format_bytes(self.budget)}, {format_bytes(plan.predicted_peak)} predicted"
        )
        is_above, is_off = peak > self.budget * (1 - self._margin), abs(peak / plan.predicted_peak - 1) > _OTHER
        if (is_off and not self._has_again) or (is_above and not self._searches):
            # The profiled step was unlike later steps: the step failed, or made the state of an optimizer.
            self._has_again, self._next = True, "profile"
            self.plans.pop()
            return
        self.plans[-1] = dataclasses.replace(plan, measured_peak=peak, is_measured=True)
        self._next = None
        if is_above and self._num_corrected < _CORRECTIONS:
            self._num_corrected += 1
            self._target = self.budget * (1 - self._margin) + plan.predicted_peak - peak
            self.plans[-1], self._next = self._chosen(), "measure"
            self._keep()

    def _keep(self) -> None:
        kept = kept_in(block for plan in self.plans for block in plan.blocks)
        for name, runner in self._runners.items():
            runner.keep(kept.get(name, {}))

    def _give_up(self, why: str) -> None:
        self._next, self._has_ended = None, True
        self._keep()
        warn_user(f"No plan was made, so blocks keep nothing and are recomputed: {why}")

    def _say(self, line: str, level: int = logging.INFO) -> None:
        self.log.append(line)
        _logger.log(level, line)


def machine_of(
    model: Module, memory_budget: Any, select: Any = None, *, margin: Any = None, cost: Any = None, plan: Any = None
) -> Machine:
    """Returns the machine that plans for a model, with hooks on the model; its ``runners`` have to call the blocks."""
    if memory_budget == "auto":
        Room(accelerator_of(model))
    budget = memory_budget if memory_budget == "auto" else parsed(memory_budget)
    margin = checked_part(0.0 if margin is None else margin, "margin", "Pass 0.03, say.", is_below=True)
    check_cost(cost)
    check_model(model)
    if plan is not None:
        plan = Plan.from_json(plan) if isinstance(plan, Mapping) else plan
        check_is(plan, Plan, "plan", "a Plan, or the result of an earlier to_json()", "Leave out plan to make a new plan.")
        names = [*dict.fromkeys(block.name for variant in (plan, *plan.others) for block in variant.blocks)]
        if plan.chunks or any(block.around for block in plan.blocks):
            raise ValueError(
                "The plan has spans around blocks, or chunks, which memory_budget does not support. Write `plan.apply()`."
            )
    else:
        names = blocks_of(model) if select is None else selected_blocks(model, select)
    return Machine(model, budget, names, margin, cost, plan)


def checkpoint_within(model: Module, *args: Any, **options: Any) -> BudgetedCheckpointing:
    """Makes the blocks of a model regions whose plan is made while the model trains; see :func:`apply_checkpointing`."""
    machine = machine_of(model, *args, **options)
    try:
        regions = apply_checkpointing(model, {selector_of(name): runner for name, runner in machine.runners().items()})
    except BaseException:
        machine.undo()
        raise
    return BudgetedCheckpointing(machine, regions)


def _weakly(method: Any) -> Callable[..., None]:
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (bound := reference()) is not None:
            bound(*args)

    return call
