"""Makes modules of a model regions, and undoes the change."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

from torch.nn import Module
from typing_extensions import Self, Unpack

from ckpt_hooks._core.descriptions import text_of
from ckpt_hooks._core.misuse import Misuse, OfThisProcess, check_module, checked_flag
from ckpt_hooks._options import checked_name
from ckpt_hooks.policies.base import Policy, PolicyLike
from ckpt_hooks.report.printing import Printed, Table, alike, count_of, fold_names, name_pattern, times

from .forward import (
    ModuleKeywords,
    RegionForward,
    RegionRunner,
    check_forward,
    checked_runner,
    own_switches,
    region_forward_for,
    region_forward_of,
)
from .selecting import SelectLike, kept_plain, selected_of, span
from .spans import RegionSpan, check_spans, span_in

AModule = TypeVar("AModule", bound=Module)


def checkpoint_module(
    module: AModule,
    *,
    policy: PolicyLike | None = None,
    recorded: bool = False,
    name: str | None = None,
    **options: Unpack[ModuleKeywords],
) -> AModule:
    """Makes each call of a module a region. Changes the module in place and returns it.

    Parameters, buffers, submodules and names stay, so state dicts and optimizers work as before. Copies and pickles of the
    module are checkpointed too. Hooks of the module run once, outside of the region. Calls without gradients are plain.

    Args:
        module: The module. It may share parameters, appear several times in a model, and call itself.
        policy: The outputs to keep: a policy of :mod:`ckpt_hooks.policies` or its name (``"dots_saveable"``), a list of
            operators, or a function.
        recorded: Whether backward replays operators, as :class:`ckpt_hooks.checkpoint_region` does, instead of calling
            ``forward`` again, as :func:`ckpt_hooks.checkpoint` does.
        name: The region's name in errors. None means the name of the class.
        **options: Other options of :func:`ckpt_hooks.checkpoint`, or of :class:`ckpt_hooks.checkpoint_region` if ``recorded``.
            ``chunks``, ``dim`` and other options of :func:`ckpt_hooks.checkpoint_chunks` cut the first argument into slices,
            each a region.

    Returns:
        The module itself.

    Raises:
        TypeError: If ``module`` is not a module, or a flag, a name or a policy has a value of another kind.
        ValueError: If the module is checkpointed already or has no ``forward``, or an option is unknown or invalid.

    Note:
        Setting ``module.forward`` afterwards removes the region, unless the new function calls the old ``module.forward``. A
        copy made by copying ``__dict__`` by hand runs the forward of the original; ``copy.copy`` is fine.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint_module
        >>> block = checkpoint_module(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()))
        >>> block(torch.ones(2, 4)).sum().backward()
    """
    check_module(module, "module", "For a function, write `checkpoint`.")
    name = checked_name(name) or type(module).__qualname__
    runner = checked_runner(checkpoint_module, recorded, {"policy": policy, "name": name, **options})
    _check_free(module, name)
    region_forward_for(module).run = runner
    return module


def remove_checkpointing(module: Module) -> None:
    """Makes calls of a module and of all modules inside it plain again.

    Undoes :func:`checkpoint_module` and :func:`apply_checkpointing`, also for copies. Graphs of earlier forwards recompute as
    before if no region was inside another.

    Args:
        module: The module, checkpointed or not.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint_module, remove_checkpointing
        >>> block = checkpoint_module(torch.nn.Linear(4, 4))
        >>> remove_checkpointing(block)
    """
    check_module(module, "module", "Pass the module whose calls are to be plain.")
    for part in module.modules():
        forward = region_forward_of(part)
        if forward is not None:
            forward.remove()


class AppliedRegion(NamedTuple):
    """A region that :func:`apply_checkpointing` made.

    Attributes:
        name: The module's name in the model.
        kind: The module's class.
        form: ``"checkpoint"`` or ``"checkpoint_region"``; with ``" x8"`` for eight slices.
        policy: The policy; None keeps nothing.
    """

    name: str
    kind: str
    form: str
    policy: PolicyLike | None


class AppliedCheckpointing(OfThisProcess, Printed):
    """The regions that :func:`apply_checkpointing` made: a sequence of :class:`AppliedRegion` that prints as a table.

    As a context manager it undoes itself at the end of the block. It can be entered once and holds no module. ``kept`` names
    the modules that ``keep_first`` and ``keep_last`` left plain.
    """

    def __init__(
        self, regions: Iterable[AppliedRegion], undo: Iterable[Callable[[], object]], kept: Iterable[str] = ()
    ) -> None:
        self.regions, self.kept = tuple(regions), tuple(kept)
        self._undo: tuple[Callable[[], object], ...] | None = tuple(undo)

    def undo(self) -> None:
        """Makes the calls plain calls again. Modules that other calls made regions stay regions. A second call does nothing."""
        for step in self._undo or ():
            step()
        self._undo = None

    def __enter__(self) -> Self:
        if self._undo is None:
            raise Misuse.UNDONE.error(
                kind=RuntimeError, name="This handle", call="`with apply_checkpointing(...):` or `with plan.apply():`"
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def __iter__(self) -> Iterator[AppliedRegion]:
        return iter(self.regions)

    def __len__(self) -> int:
        return len(self.regions)

    def _headline(self) -> str:
        return count_of(len(self), "region") + (f", {fold_names(self.kept)} kept" if self.kept else "")

    def _tables(self) -> list[Table]:
        cells = [(region.name, *region[1:3], _in_words(region.policy)) for region in self]
        groups = alike(cells, lambda row: (name_pattern(row[0]), *row[1:]))
        rows = [(times(group), fold_names(row[0] for row in group), *group[0][1:]) for group in groups]
        return [Table(["", "module", "class", "region", "policy"], rows, (0,), (1, 2, 4))]


class PlannedWhileTraining:
    """A handle whose plan is made while the model trains, by ``_machine``, a Machine of the planner."""

    _machine: Any  # None without a budget
    _no_plan: str  # the error while there is no plan

    @property
    def plan(self) -> Any:
        """The :class:`ckpt_hooks.planner.Plan` in force, of a ``memory_budget``; None until the first step has ended."""
        return self._machine and self._machine.plan

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as values for ``json.dumps``, for ``plan`` of a later run.

        Raises:
            ValueError: If there is no plan yet.
        """
        if self.plan is None:
            raise ValueError(self._no_plan)
        values: dict[str, Any] = self.plan.to_json()
        return values


class BudgetedCheckpointing(PlannedWhileTraining, AppliedCheckpointing):
    """The regions of :func:`ckpt_hooks.apply_checkpointing` with ``memory_budget``, planned while the model trains.

    Prints as the plan, once there is one. As a context manager, undoes itself at the end of the block. Holds no module; and the
    plan is made whether or not the program holds this object.

    Attributes:
        plan: The :class:`ckpt_hooks.planner.Plan` in force, with plans of other shapes in its ``others``; None until the first
            step has ended.
        budget: The budget in bytes; for a fraction, 0 until the first step has ended.
        peaks: The peak of each step that was profiled or measured.
        log: A line for each such step, as the logger ``"ckpt_hooks"`` gets it.
    """

    _no_plan = "There is no plan yet. Train a step first: the plan is made when the step ends."

    def __init__(self, machine: Any, regions: AppliedCheckpointing) -> None:
        super().__init__(regions, [machine.undo, regions.undo])
        self._machine = machine

    @property
    def budget(self) -> int:
        return self._machine.budget  # type: ignore[no-any-return]

    @property
    def peaks(self) -> tuple[int, ...]:
        return tuple(self._machine.peaks)

    @property
    def log(self) -> tuple[str, ...]:
        return tuple(self._machine.log)

    def _headline(self) -> str:
        words = f"{count_of(len(self), 'block')}, no plan before the first step has ended"
        return words if self.plan is None else str(self.plan._headline())

    def _tables(self) -> list[Table]:
        plan = self.plan
        return super()._tables() if plan is None else [*plan._tables()]


class PlanLike(Protocol):
    """The planner's Plan, which this layer may not import; ``predicted_peak`` tells a plan from a handle."""

    @property
    def predicted_peak(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...


@overload
def apply_checkpointing(
    model: Module,
    select: SelectLike,
    *,
    memory_budget: None = None,
    margin: None = None,
    cost: None = None,
    plan: None = None,
    policy: PolicyLike | None = None,
    recorded: bool = False,
    keep_first: int = 0,
    keep_last: int = 0,
    **options: Unpack[ModuleKeywords],
) -> AppliedCheckpointing: ...


@overload
def apply_checkpointing(
    model: Module,
    select: SelectLike | None = None,
    *,
    memory_budget: float | str,
    margin: float | None = None,
    cost: Literal["seconds", "operations"] | None = None,
    plan: PlanLike | Mapping[str, Any] | None = None,
    policy: None = None,
    recorded: Literal[False] = False,
    keep_first: Literal[0] = 0,
    keep_last: Literal[0] = 0,
) -> BudgetedCheckpointing: ...


def apply_checkpointing(
    model: Module,
    select: SelectLike | None = None,
    *,
    memory_budget: float | str | None = None,
    margin: float | None = None,
    cost: Literal["seconds", "operations"] | None = None,
    plan: PlanLike | Mapping[str, Any] | None = None,
    policy: PolicyLike | None = None,
    recorded: bool = False,
    keep_first: int = 0,
    keep_last: int = 0,
    **options: Any,
) -> AppliedCheckpointing:
    """Checkpoints the modules of a model that you select, or as many as a memory budget requires.

    Without ``memory_budget`` each selected module becomes a region, as :func:`checkpoint_module` makes it. With
    ``memory_budget`` the library measures training steps as they run and chooses what each block keeps, for the least
    recomputation:

    - in the first step blocks keep nothing, and the step is profiled;
    - when the optimizer is about to step, the plan is made; the second step is measured and may correct the plan;
    - calls of larger shapes keep nothing until a step with these shapes was profiled.

    No extra step runs. All ranks of ``torch.distributed`` share one plan. Copies and pickles of a model under a budget run
    plain; call :func:`remove_checkpointing` on them before another ``apply_checkpointing``. Warns if the model's own
    checkpointing (Transformers, diffusers, timm) is on or gets switched on, since both would recompute.

    Args:
        model: The model.
        select: The modules; required without ``memory_budget``. With it, the blocks whose calls may be regions; None finds
            blocks: modules with at most a quarter of the model's leaf modules, or runs of layers. Forms:

            - module classes, or a predicate ``(name, module) -> bool``: selects the outermost matches;
            - :func:`every` for every n-th layer;
            - numbers of layers: ``[0, 1, -1]``, ``range(4, 8)``, ``slice(4, None)``. Layers are the entries of each outermost
              ``torch.nn.ModuleList``, or of the model if that is a ``Sequential`` or ``ModuleList`` itself. Each list is
              counted by itself;
            - :class:`span` for a recorded region from one layer to another;
            - name patterns and spans, one or several. ``*`` stands for a part of a name between dots, ``**`` for any number of
              parts. Selects all matches, also inside each other, but neither the model itself nor lists of modules;
            - a mapping from name patterns, classes, numbers, ranges and spans to a policy, or to options such as
              ``{"policy": ..., "recorded": True}``. The first matching key decides. Several classes select the outermost
              matches. ``{"chunks": 8, "dim": 1}`` cuts the first argument of a call into slices, as
              :func:`ckpt_hooks.checkpoint_chunks` does.
        memory_budget: The largest peak of a step. Bytes or a string such as ``"20 GiB"``: on a host above the memory in use
            when the step begins, on an accelerator in total. A fraction from 0.0, the smallest peak of any plan, to 1.0, the
            peak without regions. ``"auto"``: the accelerator's free memory. Cannot be combined with ``policy``, ``recorded``,
            ``keep_first``, ``keep_last`` or ``options``.
        margin: The fraction of the budget to leave free, such as 0.03, for steps whose memory varies.
        cost: What the plan minimizes: ``"seconds"`` measured on the host, or ``"operations"``, which repeat exactly. None
            chooses seconds on a host where measurements agree, otherwise operations.
        plan: A plan of an earlier run, or the result of its handle's ``to_json()``. Training starts under it.
        policy: The outputs to keep, as for :func:`checkpoint_module`. Not together with a mapping.
        recorded: Whether backward replays operators instead of calling ``forward`` again.
        keep_first: The number of selected modules to leave plain, counted from the first. They keep their activations.
        keep_last: The same from the last. Backward starts with these, so a region there rarely lowers the peak.
        **options: Other options, as for :func:`checkpoint_module`.

    Returns:
        A handle that lists the regions, prints as a table and has ``undo()``. With ``memory_budget`` it also has ``plan`` and
        ``to_json()``.

    Raises:
        BudgetTooSmallError: If no plan fits. Raised by the optimizer's step before it changes anything.
        TypeError: If ``select``, ``plan``, ``memory_budget``, a flag, a name or a policy has a value of another kind.
        ValueError: If a number or ``determinism_check`` is invalid, of whatever kind, if nothing is selected, ``keep_first``
            and ``keep_last`` leave no region, a module is checkpointed already or has no ``forward``, an option is unknown or
            invalid, or options exclude each other. No module is changed then.

    Example:
        >>> import torch
        >>> from ckpt_hooks import apply_checkpointing
        >>> from ckpt_hooks.policies import dots_saveable
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
        >>> print(apply_checkpointing(model, {"0": None, "1.*": dots_saveable}))
        3 regions
        <BLANKLINE>
         module  class   region      policy
         0       Linear  checkpoint
         1.0     Linear  checkpoint  dots_saveable
         1.1     Tanh    checkpoint  dots_saveable
    """
    check_module(model, "model", "Pass the model, then the selection.")
    planning = {"margin": margin, "cost": cost, "plan": plan}
    if memory_budget is not None:
        refused = {"policy": policy is not None, "recorded": recorded, "keep_first": keep_first, "keep_last": keep_last}
        check_none(refused | dict.fromkeys(options, True))
        applied: AppliedCheckpointing = planner().checkpoint_within(model, memory_budget, select, **planning)
        return applied
    check_none({name: value is not None for name, value in planning.items()}, "without memory_budget. Pass it too.")
    if policy is not None and isinstance(select, Mapping):
        raise ValueError("apply_checkpointing got policy, but select is a mapping. Write the policy into the mapping instead.")
    selected = selected_of(model, select, policy, "select")
    kept = {name: selected.pop(name) for name in kept_plain(list(selected), keep_first, keep_last)}
    names = {name: name or type(model).__qualname__ for name in selected}
    runners = {name: _runner_for(names[name], target, recorded, options, value) for name, (target, value) in selected.items()}
    spans = {name: span_in(model, target) for name, (target, _) in selected.items() if isinstance(target, span)}
    regions, parts = list[AppliedRegion](), list[tuple[RegionForward, object]]()
    for name, (module, _) in selected.items():
        kind = type(module).__name__
        if name in spans:
            kind = spans[name].kind
        else:
            _check_free(module, names[name])
        runner = runners[name]
        form = "checkpoint_region" if runner.recorded else "checkpoint"
        if runner.chunks is not None:
            how = runner.chunks
            form += f" x{how.chunks}" if how.chunk_size is None else f" by {how.chunk_size} rows"
        regions.append(AppliedRegion(name, kind, form, runner.policy))
    made = {name: RegionSpan(modules, runners[name]) for name, modules in spans.items()}
    check_spans([(made[name], modules) for name, modules in spans.items()])
    switches = own_switches(model, selected)
    for switch in switches.values():
        switch.look(runs=False)
    for name, (module, _) in selected.items():
        if name in spans:
            parts += [(forward, made[name]) for forward in made[name].put(spans[name])]
        else:
            forward = region_forward_for(module)
            forward.run, forward.own_switch = runners[name], switches.get(name)
            parts.append((forward, runners[name]))
    return AppliedCheckpointing(regions, [functools.partial(_remove, weakref.ref(part), what) for part, what in parts], kept)


def planner() -> Any:
    """Returns the module that makes plans while a model trains: a higher floor, and loaded only for a budget."""
    from ckpt_hooks.planner import online

    return online


def check_none(options: Mapping[str, Any], why: str = "with memory_budget, since the plan decides. Leave these out.") -> None:
    """Raises if one of the options has a value; ``why`` ends the message."""
    if excluded := [name for name, value in options.items() if value]:
        raise ValueError(f"{', '.join(excluded)} cannot be used {why}")


def _remove(reference: weakref.ref[RegionForward], what: object) -> None:
    if (forward := reference()) is not None:
        forward.remove(what)


def _runner_for(name: str, target: Module | span, recorded: Any, common: dict[str, Any], value: Any) -> RegionRunner:
    """Returns the runner of a selected module or span; ``value`` is its policy, its options, or a runner."""
    if isinstance(value, RegionRunner):
        return value
    its_options = value if isinstance(value, Mapping) else {"policy": value}
    options = {"recorded": recorded, "policy": None, **common, **its_options}
    where = f", for {name!r}," if its_options is value else ""
    is_recorded = checked_flag(options.pop("recorded"), "recorded") or isinstance(target, span)
    runner = checked_runner(apply_checkpointing, is_recorded, options, of=name, where=where)
    if isinstance(target, span) and runner.chunks is not None:
        raise ValueError(f"{name!r} is a span, whose arguments cannot be cut into chunks. Select the modules in it instead.")
    return runner


def _check_free(module: Module, name: str) -> None:
    if (forward := region_forward_of(module)) is not None and forward.run is not None:
        raise ValueError(f"{name!r} is checkpointed already. Call `remove_checkpointing(model)` first.")
    check_forward(module, name)


def _in_words(policy: Any) -> str:
    if policy is None:
        return ""
    if isinstance(policy, str):
        return policy
    return (isinstance(policy, Policy) and policy.title) or str(getattr(policy, "__qualname__", None) or text_of(policy))
