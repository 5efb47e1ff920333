"""Plans: which results each block keeps. Applied to a model, printed, and taken to other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from ckpt_hooks._core.misuse import checked_bytes, unknown_error, wrong
from ckpt_hooks._core.settings import set_self_check
from ckpt_hooks._torch.functions import OPERATORS
from ckpt_hooks.modules import AppliedCheckpointing, apply_checkpointing
from ckpt_hooks.modules.selecting import ByKey, Key, SelectLike, selector_of
from ckpt_hooks.policies.base import operator_named
from ckpt_hooks.report.printing import Printed, Table, alike, fold_names, format_bytes, json_of, name_pattern, times
from ckpt_hooks.report.progress import shown

from .blocks import ends_of, names_in
from .guard import Guard
from .pareto import ParetoFront, ParetoPoint, budgets_of, points_of_torch, step_of
from .planned import (
    KeptRun,
    PlanData,
    PlannedBlock,
    PlannedChunks,
    PlannedRunner,
    chunk,
    chunks_in_words,
    runners_of,
    shapes_in_words,
)
from .ranks import Ranks
from .searching import COSTS, MOST_MEASURED, Budget, Cost, PlanOptions, Search, as_often, check_model, check_step, searched

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(PlanData, Printed):
    """Which results each block of a model keeps so that a step fits a budget. Made by :func:`ckpt_hooks.plan_memory`.

    ``print`` shows a table of blocks. Peaks are above the memory in use when a step begins; with several ranks, the largest of
    any rank. A pickled plan is its :meth:`to_json`, without profile and model. All ranks of the plan's group call its methods
    together.

    A plan applies to calls whose tensors are in no dimension larger than in the measured step; :meth:`add` measures steps of
    other shapes. A call uses the plan of the smallest shapes that fit. A call that fits none keeps nothing, with one warning. A
    mixture's experts share a plan up to the most tokens that any of them got.

    Attributes:
        blocks: The blocks.
        budget: The budget in bytes.
        predicted_peak: The peak predicted from the profile.
        measured_peak: The peak of a step under the plan, or the predicted peak if ``is_measured`` is False.
        next_peak: The smallest predicted peak of a plan in which a single block has a cheaper option.
        least_peak: The smallest predicted peak of any plan.
        plain_peak: The predicted peak of a step without regions.
        recomputed: The fraction of forward that runs again, by cost: floating-point operations, and ten for each byte moved.
        recomputed_seconds: Seconds of the operators that run again, as measured in the profile.
        region_seconds: Approximate seconds that recorded regions add to forward; 0 with ``cost="operations"``.
        margin: The fraction of the budget that the measured step had to leave free.
        cost: What the plan minimizes: ``"operations"`` or ``"seconds"``.
        outside_bytes: Bytes at the peak from outside of all blocks, without gradients of parameters.
        outside_module: The module that made the most of ``outside_bytes``, with its class; ``""`` outside of modules.
        is_measured: Whether a step ran under the plan.
        chunks: The modules that run in chunks, with the number of slices.
        others: Plans of other shapes for the same budget.
    """

    others: list[Plan] = dataclasses.field(default_factory=list, hash=False)

    def apply(self, model: Module | None = None, *, group: ProcessGroup | None = None) -> AppliedCheckpointing:
        """Makes the blocks of a model regions that keep what the plan says.

        Args:
            model: The model, also in wrappers (DDP, FSDP, PEFT). None means the planned model, which the plan holds weakly.
            group: The process group whose ranks apply a plan from a file together. None means all ranks, or the group that the
                plan was made for.

        Returns:
            A handle with ``undo()``, as from :func:`ckpt_hooks.apply_checkpointing`.

        Raises:
            CheckpointError: If the plan of another rank differs, or :meth:`apply` fails there.
            ValueError: If the model is gone, or has no such blocks.
        """
        ranks = self._ranks() if group is None else Ranks(group)
        with ranks.together(), contextlib.ExitStack() as undo:
            model, runners = self._model_for(model, "apply"), self.runners()
            names, inside = names_in(model, [*runners, *(cut.name for cut in self.chunks)]), dict(model.named_modules())
            if missing := [end for name in names.values() for end in ends_of(name) if end not in inside]:
                raise wrong(
                    model, "model", f"a model with a module {missing[0]!r}", "Pass the planned model, or a copy.", ValueError
                )
            chunked = chunk(model, self.chunks, names)
            undo.callback(chunked.undo)
            regions = apply_checkpointing(model, {selector_of(names[name]): runner for name, runner in runners.items()})
            undo.callback(regions.undo)
            ranks.agree(self._facts())
            undo.pop_all()
        return AppliedCheckpointing([*regions, *chunked], [regions.undo, chunked.undo])

    def _ranks(self) -> Ranks:
        return Ranks() if self._search is None else self._search.ranks

    def _facts(self) -> dict[str, Any]:
        """Returns the parts of a plan that have to be equal on all ranks, by name."""
        facts: dict[str, Any] = {"the chunks of the plan": self.chunks}
        for number, plan in enumerate((self, *self.others)):
            for block in plan.blocks:
                kept = None if block.kept is None else [(run.module, run.operator, run.number) for run in block.kept]
                where = f", in plan {number} of other shapes" if number else ""
                facts[f"what block {block.name!r} keeps{where}, and its shapes"] = (
                    kept,
                    block.recorded,
                    block.parts,
                    block.shapes,
                    block.around,
                )
        return facts

    def add(self, step: Callable[[Module], Any], model: Module | None = None, *, progress: bool = True) -> Plan:
        """Measures a step of other shapes and finds a plan for it, with the same blocks and budget.

        The next :meth:`apply` uses it for calls of these shapes.

        Args:
            step: Runs one training step, as for :func:`ckpt_hooks.plan_memory`.
            model: The model, without regions of a plan. None means the planned model.
            progress: Whether to show a progress line, as for :func:`ckpt_hooks.plan_memory`.

        Returns:
            The plan of the step, which is also in ``others``.

        Raises:
            BudgetTooSmallError: If no plan fits.
            ValueError: If the model is gone, or its blocks are regions now.
        """
        plan = self._measured(self.budget, step, model, "add", progress)
        self.others.append(plan)
        return plan

    def _measured(self, budget: Budget, step: Any, model: Module | None, method: str, progress: bool) -> Plan:
        """Returns a plan with the same blocks, from a profile of a step."""
        ranks = self._ranks()
        with ranks.together():
            model = self._model_for(model, method)
            names = names_in(model, [block.name for block in self.blocks] + [cut.name for cut in self.chunks])
            plan_names = {there: name for name, there in names.items()}
            chunks = {names[cut.name]: {**cut._options, "chunks": (cut.chunks,)} for cut in self.chunks}
            blocks = [selector_of(names[block.name]) for block in self.blocks]
            plan_options = PlanOptions(blocks, margin=self.margin, cost=self.cost, chunks=chunks)
            with shown(f"plan.{method}", progress):
                plan = plan_of(searched(model, step, budget, ranks, plan_options))
        return dataclasses.replace(
            plan,
            blocks=tuple(
                dataclasses.replace(block, name=plan_names[block.name], around=plan_names.get(block.around, ""))
                for block in plan.blocks
            ),
            chunks=self.chunks,
        )

    def replan(
        self,
        memory_budget: Budget,
        step: Callable[[Module], Any] | None = None,
        model: Module | None = None,
        *,
        progress: bool = True,
    ) -> Plan:
        """Finds a plan for another budget from the same profile, much faster than :func:`ckpt_hooks.plan_memory`.

        A plan from a file has no profile: it needs a step and the model, and profiles the step as :meth:`add` does.

        Args:
            memory_budget: The largest peak, as for :func:`ckpt_hooks.plan_memory`.
            step: A step that measures and corrects the plan. None leaves the peak predicted.
            model: The model, without regions of a plan. None means the planned model.
            progress: Whether to show a progress line, as for :func:`ckpt_hooks.plan_memory`.

        Returns:
            The plan, for the shapes of the profile only.

        Raises:
            BudgetTooSmallError: If no plan fits.
            ValueError: If the plan comes from a file and there is no step, or the model is gone.
        """
        if self._search is None and step is not None:
            return self._measured(memory_budget, step, model, "replan", progress)
        search = self._profiled("replan")
        with search.ranks.together():
            search.ranks.agree({"memory_budget": memory_budget})
            if step is None:
                return plan_of(dataclasses.replace(search.plan(memory_budget), _model=self._model))
            check_step(step)
            model = self._model_for(model, "replan")
            with shown("plan.replan", progress), as_often(model, step, search.ranks, MOST_MEASURED) as step:
                return plan_of(search.plan(memory_budget, model, step))

    def pareto(self) -> ParetoFront:
        """Finds what other budgets would cost, from the profile that the plan holds.

        Returns:
            The :class:`ParetoFront`. ``plot()`` draws recomputation against peak for all budgets, for torch's choices and for
            this plan. The ``plan`` of each point in ``plans`` can be applied, or measured by :meth:`replan`.

        Raises:
            ValueError: If the plan comes from a file.
        """
        search = self._profiled("pareto")
        with search.ranks.together():
            points = [
                _point(f"of {format_bytes(budget)}", self._at(budget, source, chosen))
                for budget, source, chosen in budgets_of(search)
            ]
            choices = points_of_torch(search)
        points.sort(key=lambda point: point.peak)
        return ParetoFront(tuple(points), choices, _point("this plan", self), self.budget)

    def _at(self, budget: int, search: Search, chosen: Sequence[int]) -> Plan:
        """Returns another choice from the same profile, as predicted."""
        data = search.predicted(chosen, budget)
        return plan_of(dataclasses.replace(data, least_peak=self.least_peak, _model=self._model, _search=self._search))

    def _tighter(self) -> Plan | None:
        """Returns the plan whose budget is a step of the front lower; None if no plan has a lower peak."""
        search = self._profiled("guard")
        budget = max(search.least_of_all, int(self.predicted_peak - step_of(search)))
        tighter = self._at(budget, *search.cheapest(budget))
        return tighter if tighter.predicted_peak < self.predicted_peak else None

    def guard(self, model: Module | None = None, *, limit: int | str | None = None) -> Guard:
        """Keeps training when memory runs out: undoes the step and runs it again under a tighter plan.

        In the block the model is under the plan, and ``guard(step, batch)`` runs a step. If the step raises
        ``torch.OutOfMemoryError`` or exceeds ``limit``, then parameters, buffers, gradients, optimizers and random states are
        restored, the next tighter plan of the front replaces the plan until the end of the block, the logger ``"ckpt_hooks"``
        is told, and the step runs again. Any other exception also undoes the step, and propagates.

        Cost: each step copies buffers and gradients to the host, and each ``optimizer.step()`` inside of it what it writes to.
        To avoid that, keep the optimizer's step outside and call ``zero_grad()`` before.

        Not restored: parameters written through ``.data``, schedulers and scalers created in the block, and state outside of
        the model and its optimizers, such as averaged weights, metrics and the program's own generators.

        Ranks that planned together run guarded steps together, and the limit applies to each. If one of several ranks runs
        out of memory, the error is raised there, and a CheckpointError on the others: the step cannot run again, since ranks
        may wait in a collective.

        Args:
            model: The model, also in wrappers. None means the planned model.
            limit: The most that a step may take above the memory in use when it begins: bytes, or a string such as ``"20GiB"``.
                Runs each step in a :func:`ckpt_hooks.memory_ledger`, which is slow: for hosts and tests. None reacts to errors
                of the device only.

        Returns:
            The :class:`Guard`, for a ``with`` statement.

        Raises:
            ValueError: If the plan comes from a file, or the model is gone.

        Example:
            >>> import torch
            >>> from ckpt_hooks import plan_memory
            >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
            >>> plan = plan_memory(model, lambda model: model(torch.ones(512, 64)).sum().backward(), 1.0)
            >>> with plan.guard(limit="2MiB") as guard:
            ...     for batch in (torch.ones(256, 64), torch.ones(512, 64)):
            ...         guard(lambda batch: model(batch).sum().backward(), batch)
        """
        limit, search = None if limit is None else checked_bytes(limit, "limit"), self._profiled("guard")
        model = self._model_for(model, "guard")
        check_model(model)
        return Guard(self, search.ranks, model, limit)

    def _profiled(self, method: str) -> Search:
        if self._search is None:
            raise ValueError(
                "This plan has no profile, since it comes from a file. To profile a step, write "
                f"`plan = plan.replan(plan.budget, step, model)`, and then `plan.{method}(...)`."
            )
        search: Search = self._search
        return search

    def _model_for(self, model: Module | None, method: str) -> Module:
        model = model if model is not None else None if self._model is None else self._model()
        if model is None:
            arguments = {"apply": "model", "guard": "model", "add": "step, model"}.get(method, "budget, step, model")
            raise ValueError(
                f"The model of this plan is gone, or the plan comes from a file. Pass a model: `plan.{method}({arguments})`."
            )
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_json, (self.to_json(),)

    def __deepcopy__(self, memo: object) -> Plan:
        return dataclasses.replace(self, others=[*self.others])

    def runners(self) -> dict[str, PlannedRunner]:
        """Returns a function for each block, by the block's name, which calls the block as the plan says."""
        return runners_of(block for plan in (self, *self.others) for block in plan.blocks)

    def _headline(self) -> str:
        seconds = (self.recomputed_seconds + self.region_seconds) * 1e3
        added = f", {seconds:.1f} ms predicted" if seconds else ""
        chunks = f"; {chunks_in_words(self.chunks)}" if self.chunks else ""
        words = f"{format_bytes(self.predicted_peak)} predicted" if self.is_measured else "predicted, not measured"
        return (
            f"peak {format_bytes(self.measured_peak)} of {format_bytes(self.budget)}, {words}; "
            f"{self.recomputed:.1%} of forward runs again{added}{chunks}; from "
            f"{format_bytes(self.least_peak)} at least to {format_bytes(self.plain_peak)} without regions"
        )

    def _tables(self) -> Iterator[Table]:
        def key(block: PlannedBlock) -> object:
            kept = None if block.kept is None else tuple(map(_in_words, block.kept))
            is_around = block.name in inside
            return name_pattern(block.name), block.kind, kept, block.kept_bytes, is_around, block.recorded, block.parts

        rows = []
        inside = {block.around for block in self.blocks if block.around and block.kept is not None}
        for group in alike([block for block in self.blocks if not block.around], key):
            first = group[0]
            kept = (
                "nothing, blocks inside are regions"
                if first.name in inside
                else "all, no region"
                if first.kept is None
                else f"all but in {', '.join(first.parts)}{'' if first.recorded else ', called again'}"
                if first.parts
                else "nothing, called again"
                if not first.recorded
                else ", ".join(map(_in_words, first.kept)) or "nothing"
            )
            seconds = sum(block.recomputed_seconds for block in group) / len(group)
            names = fold_names(block.name for block in group)
            in_ms = f"{seconds * 1e3:.2f}" if self.recomputed_seconds else ""
            again = f"{first.recomputed:.0%}", in_ms, format_bytes(first.recomputed_bytes)
            rows.append([times(group), names, first.kind, *again, format_bytes(first.kept_bytes), kept])
        header = ["", "block", "class", "again", "ms", "bytes", "kept", "results"]
        yield Table(header, rows, (0, 3, 4, 5, 6), (1, 7), rest=" ".join(filter(None, (self._free(), self._outside()))))
        for plan in self.others:
            first = plan.blocks[0]
            (table,) = plan._tables()
            yield table._replace(title=f"where {first.name} gets {shapes_in_words(first.shapes[0])}: {plan._headline()}")

    def _free(self) -> str:
        free = int(self.budget * (1 - self.margin)) - self.measured_peak
        if free < self.budget * _CLOSE or self.next_peak <= self.budget:
            return ""
        return (
            f"{format_bytes(free)} of the budget stay free: with a cheaper option for any block, the peak would be "
            f"{format_bytes(self.next_peak)} or more."
        )

    def _outside(self) -> str:
        if self.outside_bytes < self.measured_peak / 2:
            return ""
        most = self.outside_module or "the step"
        return (
            f"{format_bytes(self.outside_bytes)} of the peak are outside of all blocks, mostly in {most}, and no plan of these "
            "blocks lowers them. A module with both the head and the loss takes less memory in chunks of rows: "
            "`plan_memory(..., chunks={'head': (1, 4, 8)})` chooses their number."
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as values for ``json.dumps``, for :meth:`from_json`."""
        return {"version": _VERSION, **json_of(self), "others": [plan.to_json() for plan in self.others]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """Returns the plan of :meth:`to_json`.

        Args:
            values: The values, all of which are checked. Nothing is imported for them.

        Raises:
            ValueError: If a value is none of a plan, is missing or unknown, or comes from a newer version; or TypeError.
        """
        try:
            plan: Plan = _read(values, "plan", "Plan")
        except RecursionError:  # the values nest ``others`` a thousand levels deep
            raise wrong(values, "plan", "a plan whose `others` have no `others`", _ADVICE, ValueError) from None
        return plan


#: The fraction of a budget that may stay free without a remark.
_CLOSE = 0.005

#: The version of plans in files, which changes if the meaning of a field does.
_VERSION = 1
_ADVICE = "Write files by `json.dumps(plan.to_json())` with this version of ckpt_hooks, and read them by `json.loads`."
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _is_operator(name: Any) -> bool:
    with contextlib.suppress(Exception):  # torch has many errors for names that it does not know
        return isinstance(name, str) and name.count(".") in (0, 2) and isinstance(operator_named(name), OPERATORS)
    return False


#: The test of a single value, and words for valid values: by the field's type, or by the field's name if that allows fewer.
_LEAVES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: type(value) is int and 0 <= value < 2**63, "an integer from 0"),
    "float": (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a number from 0"),
    "dim": (lambda value: type(value) is int, "an integer"),
    "str": (lambda value: type(value) is str, "a string"),
    "bool": (lambda value: type(value) is bool, "True or False"),
    "cost": (lambda value: value in COSTS, f"one of {COSTS}"),
    "margin": (lambda value: type(value) in (int, float) and 0 <= value < 1, "a fraction from 0.0 to below 1.0"),
    "operator": (_is_operator, "a registered operator"),
    "version": (lambda value: type(value) is int and value == _VERSION, str(_VERSION)),
    "dtype": (lambda value: type(value) is str and value in _DTYPES, "the name of a dtype of torch"),
}


_SHAPES = "tuple[tuple[Tensor, ...], ...]"
_OBJECTS: dict[str, Any] = {kind.__name__: kind for kind in (Plan, PlannedBlock, PlannedChunks, KeptRun)}


def _read(value: Any, at: str, kind: str) -> Any:
    """Returns a value of a file, checked and converted to the annotation ``kind`` of its field."""
    if kind in _LEAVES:
        test, wanted = _LEAVES[kind]
        if not test(value):
            raise wrong(value, at, wanted, _ADVICE, ValueError)
        return value
    if kind.endswith(" | None"):
        return None if value is None else _read(value, at, kind.removesuffix(" | None"))
    if kind in _OBJECTS:
        return _read_object(value, at, _OBJECTS[kind])
    is_tensor, is_whole = kind == "Tensor", bool(value) or kind not in ("tuple[PlannedBlock, ...]", _SHAPES)
    if not isinstance(value, (list, tuple)) or not is_whole or (is_tensor and len(value) != 2):
        raise wrong(value, at, "a dtype and a shape" if is_tensor else "a list", _ADVICE, ValueError)
    if is_tensor:
        shape = _read(value[1], f"{at}[1]", "tuple[int, ...] | None")
        return _DTYPES[_read(value[0], f"{at}[0]", "dtype")], None if shape is None else torch.Size(shape)
    inner = kind.partition("[")[2].removesuffix("]").removesuffix(", ...")
    entries = [_read(member, f"{at}[{place}]", inner) for place, member in enumerate(value)]
    return entries if kind.startswith("list") else tuple(entries)


def _read_object(value: Any, at: str, made: Any) -> Any:
    fields = {field.name: field.name if field.name in _LEAVES else str(field.type) for field in dataclasses.fields(made)}
    fields = {name: _SHAPES if name == "shapes" else kind for name, kind in fields.items() if name[0] != "_"}
    if not isinstance(value, Mapping):
        raise wrong(value, at, "an object", _ADVICE, ValueError)
    if made is Plan:
        value = {**value}
        _read(value.pop("version", None), f"{at}.version", "version")
    if missing := [name for name in fields if name not in value]:
        raise wrong(value, at, f"an object with {', '.join(missing)}", _ADVICE, ValueError)
    if unknown := [name for name in value if name not in fields]:
        raise unknown_error(unknown, fields, at, _ADVICE)
    return made(**{name: _read(value[name], f"{at}.{name}", kind) for name, kind in fields.items()})


def plan_of(data: PlanData) -> Plan:
    """Returns the result of a search as a plan."""
    return Plan(**{field.name: getattr(data, field.name) for field in dataclasses.fields(data)})


def _point(name: str, plan: Plan) -> ParetoPoint:
    return ParetoPoint(name, plan.measured_peak, plan.recomputed, plan.recomputed_seconds, plan)


def _in_words(run: KeptRun) -> str:
    name = run.operator.partition(".")[2].removesuffix(".default")
    number = f" {run.number + 1}" if run.number else ""
    return f"{run.module}:{name}{number}" if run.module else f"{name}{number}"


_Counts = Sequence[int] | Mapping[str, Any]


def plan_memory(
    model: Module,
    step: Callable[[Module], Any],
    memory_budget: Budget,
    *,
    blocks: SelectLike | None = None,
    total: bool = False,
    margin: float = 0.0,
    tolerance: float = 0.01,
    cost: Cost | None = None,
    chunks: Mapping[Key, _Counts] | ByKey[_Counts] | None = None,
    group: ProcessGroup | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> Plan:
    """Finds which activations to keep so that a training step fits a memory budget with the least recomputation.

    Use it to have a plan before training starts. :func:`ckpt_hooks.apply_checkpointing` with ``memory_budget`` plans from the
    steps that run anyway.

    Runs the step once with every block as a recorded region that keeps nothing, then under the plan, again if the prediction
    was off: at most seven steps without ``chunks``. No step runs without regions, since it may not fit. The returned plan was
    measured. Where operators are small, blocks may be called again as by :func:`ckpt_hooks.checkpoint`, which one more step
    verifies.

    Restores parameters, buffers, gradients, optimizers, attributes, hooks and random states afterwards, also after an
    exception. The copies for that lie on the host and are as large as these tensors together.

    Args:
        model: The model.
        step: Runs one training step up to the gradients, ``step(model)``. It may include an optimizer step.
        memory_budget: The largest peak: bytes, a string such as ``"20GiB"``, or a fraction from 0.0, the smallest peak of any
            plan, to 1.0, the peak without regions. ``"auto"`` takes 95% of the accelerator's free or unused memory.
        blocks: The modules whose calls may be regions, as :func:`ckpt_hooks.apply_checkpointing` takes them: classes, name
            patterns, numbers of layers (``[0, -1]``, ``range(4, 8)``, ``slice(4, None)``), spans, a predicate, or a mapping
            from these to None. None finds modules with at most a quarter of the model's leaf modules, runs of layers, and spans
            around these if they lower the peak.
        total: Whether the budget covers all memory in use, not only what the step adds.
        margin: The fraction of the budget to leave free, such as 0.03, for steps whose memory varies: mixtures of experts, or
            collectives whose threads free memory late.
        tolerance: How far the measured peak may be below the budget, or above its prediction, as a fraction, before another
            plan is tried.
        cost: What to minimize. ``"seconds"``: measured seconds of the operators that run again, plus about what regions add.
            ``"operations"``: the same plan in each run; counts ten for each byte moved, a thousand for each number drawn on a
            host, and three million for each recorded operator. None chooses seconds on a host where measurements agree.
        chunks: Modules whose calls may be cut into slices, as by :func:`ckpt_hooks.checkpoint_chunks`, with the numbers to
            choose from: ``{"head": (1, 4, 8)}`` or ``{"layers.*.mlp": {"chunks": (1, 4, 8), "dim": 1}}``. A module with an
            integer attribute ``chunks`` gets it set; others are cut along ``dim``. Each number takes one or two steps more.
            Results of chunks round differently, so none are used unless given here. A block itself cannot be cut.
        group: The process group whose ranks plan together. None means all, where ``torch.distributed`` is initialized. Ranks
            share a plan for the largest peak and the slowest rank. An exception on a rank is an error on all; a rank that waits
            in a collective is released after five seconds by closing its process's connections. Missing ranks are an error
            after the group's timeout. A group of only some ranks runs the maximum number of steps, as pipeline stages must.
        dry_run: Whether to run on fake tensors, which allocates nothing; the plan's peak is then a prediction. Parameters may
            be on the meta device. Blocks are recorded, never called again. Limits are those of
            :func:`ckpt_hooks.estimate_memory`.
        progress: Whether to show a line on the terminal after two seconds, with ``tqdm`` if installed. The logger
            ``"ckpt_hooks"`` is told of each step in any case.

    Returns:
        The :class:`Plan`. ``plan.apply()`` makes the regions, ``print(plan)`` shows them.

    Raises:
        BudgetTooSmallError: If no plan fits.
        CheckpointError: If another rank fails, or has other arguments, blocks or operators.
        TypeError: If an argument is of another kind.
        ValueError: If a value is invalid, the step runs no backward, there are no blocks, a block is never called or
            checkpointed already, the model is compiled, or a dry run meets an operator whose result depends on data.
        RuntimeError: If called inside a region.

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
    options = PlanOptions(blocks, total, margin, tolerance, cost, chunks, dry_run)
    ranks = Ranks(group)
    # The self-check would add its time to the measured seconds.
    with ranks.together(), set_self_check(False), shown("plan_memory", progress):
        return plan_of(searched(model, step, memory_budget, ranks, options))
