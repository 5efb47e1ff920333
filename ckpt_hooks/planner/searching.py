"""The search for a plan: find blocks, profile, solve, measure, correct."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.descriptions import format_path, region_in_words
from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.misuse import check_callable, check_module, checked_bytes, checked_flag, checked_part, wrong
from ckpt_hooks.errors import BudgetTooSmallError
from ckpt_hooks.modules.forward import RegionRunner
from ckpt_hooks.modules.selecting import SelectLike
from ckpt_hooks.report.ledger import memory_ledger
from ckpt_hooks.report.ledger.data import maker_in_words
from ckpt_hooks.report.printing import format_bytes
from ckpt_hooks.report.progress import begin_step, has_peak

from .blocks import Blocks, blocks_of, check_chunked, ends_of, outside_of, selected_blocks, with_spans_around
from .choosing import Problem, block_options, choices_of, choose, lasting_in
from .planned import Chunking, KeptRun, PlanData, PlannedBlock, PlannedRunner, Shapes, applied, chunkings_of, runners_of
from .profiling import Profile, profile_step
from .ranks import Ranks
from .restoring import as_before, dry, dry_mode, optimizer_state
from .simulating import natural_ends, peak_of

# The most plans measured before the least plan. Predicted peaks are within 0.1% for most models, but up to 4% off with custom
# autograd functions, since a replay makes all results of such a function at once.
_CORRECTIONS = 3
_OFF = 1e-3  # the predicted peak without regions may be too low by this fraction
#: The most steps run to measure a plan: corrections, a check of blocks that backward calls again, the least plan if none fits.
MOST_MEASURED = _CORRECTIONS + 2
_SPREAD = 0.5  # a fraction: where measured seconds vary more, counted operations predict costs better


class PlanOptions(NamedTuple):
    """Options of :func:`ckpt_hooks.plan_memory`."""

    blocks: SelectLike | None = None
    total: bool = False
    margin: float = 0.0
    tolerance: float = 0.01
    cost: Cost | None = None
    chunks: Any = None
    dry_run: bool = False


def searched(
    model: Module, step: Callable[[Module], Any], memory_budget: Budget, ranks: Ranks, options: PlanOptions
) -> PlanData:
    """Returns the plan that fits; all ranks search together."""
    blocks, total, margin, tolerance, cost, chunks, dry_run = options
    if checked_flag(dry_run, "dry_run"):
        for value, name, wanted in ((memory_budget, "memory_budget", "auto"), (cost, "cost", "seconds")):
            if value == wanted:
                advice = f"A dry run measures no device and no time: leave out dry_run, or pass another {name}."
                raise wrong(value, name, "a value for fake tensors", advice, ValueError)
        check_model(model, is_dry=True)
        with dry(model):
            plan = searched(model, step, memory_budget, ranks, options._replace(dry_run=False))
        return dataclasses.replace(plan, is_measured=False, predicted_peak=plan.measured_peak)
    # Check all arguments first: a profile takes a whole step.
    if memory_budget != "auto":
        parsed(memory_budget)
    checked_flag(total, "total")
    check_cost(cost)
    margin = checked_part(margin, "margin", "Pass 0.03, say.", is_below=True)
    tolerance = checked_part(tolerance, "tolerance", "Pass 0.01, say.")
    check_model(model)
    check_step(step)
    device = accelerator_of(model)
    if memory_budget == "auto":
        Room(device)
    selected = None if blocks is None else selected_blocks(model, blocks)
    chunkings = chunkings_of(model, {} if chunks is None else chunks)
    arguments = {"memory_budget": memory_budget, "total": total, "margin": margin, "tolerance": tolerance, "cost": cost}
    ranks.agree({**arguments, "chunks": chunkings, "blocks": selected})
    base = memory_ledger(lambda: None).base_nbytes if total else 0  # measured before copies of the model lie on the host
    most = 2 * len(chunkings) + MOST_MEASURED
    with as_often(model, step, ranks, most) as step:
        terms = SearchTerms(None, margin, device, ranks.most(base))
        check_chunked(selected or (), {cut.name for cut in chunkings[-1] if cut.chunks > 1 and not cut.is_attribute})
        names = selected or ranks.first(lambda: blocks_of(model, {cut.name for cut in chunkings[0]}))
        around = with_spans_around(names) if selected is None else []
        kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        ranks.agree({f"block {name!r}": [*map(kinds.get, ends_of(name))] for name in names})
        searches: list[Search] = []
        for chunking in chunkings:
            parts = profiled(model, step, names, chunking, is_selected=selected is not None)
            if not searches:
                terms = terms._replace(per_second=cost_per_second(ranks, parts[0], cost, device))
            searches.append(Search(ranks, terms, *parts, chunks=chunking))
            # A span raises if the model calls its layers in another order: then only blocks are searched.
            nested = ranks.attempt(functools.partial(profiled, model, step, around, chunking)) if around else None
            if nested is not None:
                spans = Search(ranks, terms, *nested, chunks=chunking)
                if spans.least < searches[-1].least:
                    searches.append(spans)
        searches[0].others = searches[1:]
        return searches[0].plan(memory_budget, model, step, tolerance)


def cost_per_second(ranks: Ranks, profile: Profile, cost: str | None, device: torch.device | None) -> float | None:
    """Returns the operations that take a second, for costs by seconds; None for costs by operations."""
    # The host cannot measure a device's time, and a dry run has no times.
    is_by_seconds = cost == "seconds" or (cost is None and device is None and dry_mode.get() is None)
    if not is_by_seconds or (cost is None and max(ranks.all(profile.spread())) > _SPREAD):
        return None
    return max(ranks.all(profile.cost_per_second()))


@contextlib.contextmanager
def as_often(model: Module, step: Callable[[Module], Any], ranks: Ranks, most: int) -> Iterator[Callable[[Module], Any]]:
    """Yields the step, counted; if the group has only some of all ranks, adds runs at the end, up to ``most`` in all."""
    # Groups that plan separately, such as pipeline stages, meet in collectives of the step, so all run the step equally often.
    runs = 0

    def counted(model: Module) -> Any:
        nonlocal runs
        runs += 1
        begin_step(most)
        return step(model)

    yield counted
    for _ in range(most - runs if ranks.is_part else 0):
        with as_before(model):
            step(model)
        ranks.all(None)


def profiled(
    model: Module, step: Callable[[Module], Any], names: Sequence[str], chunking: Chunking, *, is_selected: bool = False
) -> tuple[Profile, Blocks, dict[str, dict[Shapes, None]]]:
    """Profiles a step whose blocks keep nothing, on this rank; returns arguments of :class:`Search`."""
    blocks = Blocks(model, names)
    shapes: dict[str, dict[Shapes, None]] = {name: {} for name in names}
    runners = {name: PlannedRunner(name, {}, lambda name, key: shapes[name].update({key: None})) for name in names}
    with as_before(model), applied(model, runners, chunking):
        before = optimizer_state(model)
        profile = profile_step(lambda: step(model), blocks.roots)
        if dry_mode.get() is None:
            _warn_of_cold(before, optimizer_state(model))
    missing = [name for name in names if not shapes[name]]
    if len(missing) < len(names) and not profile.has_backward:
        raise ValueError(
            "The step ran no backward, at least not on this thread. Pass a step which does: `lambda model: "
            "model(x).sum().backward()`."
        )
    if not is_selected and len(missing) < len(names):
        shapes = {name: of for name, of in shapes.items() if of}
    elif missing:
        raise ValueError(
            f"The step never calls {', '.join(map(repr, missing))} with gradients enabled. Pass blocks that the step calls, or "
            "enable gradients in the step."
        )
    return profile, blocks, shapes


def _warn_of_cold(before: Mapping[int, tuple[str, int]], after: Mapping[int, tuple[str, int]]) -> None:
    for number, (name, nbytes) in after.items():
        if (born := nbytes - before.get(number, (name, 0))[1]) > 0:
            warn_user(
                f"The step makes the state of {name}, {format_bytes(born)}, and the plan counts this memory in each step, "
                "although later steps have the state already. For a plan of later steps, run one step before plan_memory."
            )


#: Bytes as an integer or as in ``"20GiB"``, a fraction as a float, or ``"auto"``.
Budget = int | float | str


def parsed(budget: Any) -> int | float:
    """Returns a budget as bytes, or as a fraction from 0.0 to 1.0."""
    if isinstance(budget, numbers.Real) and not isinstance(budget, numbers.Integral):
        return checked_part(budget, "memory_budget", "Pass an integer for bytes.")
    return checked_bytes(budget, "memory_budget", ", a fraction from 0.0 to 1.0, or 'auto'")


#: What a plan minimizes.
Cost = Literal["operations", "seconds"]
COSTS: tuple[str, ...] = get_args(Cost)


def check_cost(cost: Any) -> None:
    """Raises unless a cost is known, or None."""
    if cost is not None and (not isinstance(cost, str) or cost not in COSTS):
        raise wrong(cost, "cost", f"one of {COSTS}", "Pass one of these, or leave it out.", ValueError)


def check_step(step: Any) -> None:
    """Raises unless a step can be called, outside of regions."""
    check_callable(step, "step", "model", "a function of the model", "Write `lambda model: ...`.")
    if (frame := stack.innermost) is not None:
        raise RuntimeError(
            f"The step of a plan or an estimate would run inside of {region_in_words(format_path(frame.path))}, and the region "
            "changes what the step keeps. Call plan_memory, or estimate_memory, outside of regions."
        )


def check_model(model: Any, *, is_dry: bool = False) -> None:
    """Raises unless a model can be planned."""
    check_module(model, "model", "Pass the model, then the step.")
    if any(getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod") for part in model.modules()):
        raise ValueError(
            "The model is compiled, and torch.compile has its own option, torch._functorch.config.activation_memory_budget "
            "(with dropout, values below 1.0 give wrong gradients: https://github.com/pytorch/pytorch/issues/190758). Pass the "
            "model before torch.compile."
        )
    if any(is_lazy(tensor) or (tensor.is_meta and not is_dry) for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "The model has parameters or buffers without memory: on the meta device, or of lazy modules before their first "
            "forward. Move the model to a device, or run a forward, before the call. For the meta device, write "
            "plan_memory(..., dry_run=True)."
        )


def too_small(budget: int, least: int, base: int, margin: float, problem: Problem, peak: Any) -> BudgetTooSmallError:
    """Returns the error for a budget below the least peak of any plan."""
    bottleneck = problem.bottleneck()
    if peak is not None and peak.phase == "optimizer":
        bottleneck, there, advice = (
            None,
            "in the optimizer",
            "an optimizer that needs less: without `foreach`, with less state, or with its state made by a step before",
        )
    elif bottleneck is None:
        there = "outside of any block" + (f", in {maker_in_words(peak.origin)}" if peak is not None and peak.origin else "")
        advice = "a smaller batch, or blocks that contain this code"
    else:
        there, advice = f"in block {bottleneck!r}", "smaller blocks, or a smaller batch"
    free = f", of which margin leaves {margin:.1%} free" if margin else ""
    minimum = math.ceil(least / (1 - margin)) + base
    return BudgetTooSmallError(
        f"No plan fits {budget + base} bytes{free}: the least peak is {least + base} bytes ({format_bytes(least + base)}), "
        f"{there}. Raise the budget, or pass {advice}.",
        budget=budget + base,
        minimum=minimum,
        bottleneck=bottleneck,
    )


def _shared(ranks: Ranks, profile: Profile, shapes: Mapping[str, Iterable[Shapes]]) -> dict[str, tuple[Shapes, ...]]:
    """Gives operators the largest costs of any rank, and returns the shapes of all ranks; raises if operators differ."""
    runs: dict[str, list[Any]] = {}
    for entry in profile.entries:
        runs.setdefault(f"the operators of block {entry.block!r}", []).append([(op.name, op.run) for op in entry.ops])
    ranks.agree(runs)
    ops = [op for entry in profile.entries for op in entry.ops]
    figures = [(op.cost, op.seconds) for op in ops], {**shapes}, profile.others_cost
    costs, others, of_others = zip(*ranks.all(figures), strict=True)
    profile.others_cost = max(of_others)
    for op, *of_ranks in zip(ops, *costs, strict=True):
        op.cost, op.seconds = map(max, zip(*of_ranks, strict=True))
    return {name: tuple(dict.fromkeys(itertools.chain(*(of_rank[name] for of_rank in others)))) for name in shapes}


class SearchTerms(NamedTuple):
    """The unit of costs, and the memory that plans may take."""

    per_second: float | None  # the cost of a second; None for costs by operations
    margin: float
    device: torch.device | None = None
    base: int = 0  # bytes in use before a step, where the budget counts them


class Search:
    """Makes plans of any budget for all ranks, from a profiled step; each rank has its own profile."""

    def __init__(
        self,
        ranks: Ranks,
        terms: SearchTerms,
        profile: Profile,
        blocks: Blocks,
        shapes: Mapping[str, Iterable[Shapes]],
        *,
        chunks: Chunking = (),
        may_call_again: bool = True,
    ) -> None:
        self.ranks, self.profile = ranks, profile
        per_second, self._margin, self._device, self._base = terms
        self._per_second = per_second
        self.others: list[Search] = []  # searches with spans around the blocks, or other chunks
        self._shapes = _shared(ranks, profile, shapes)
        if per_second is not None:
            profile.cost_by_seconds(per_second)
        self.natural = natural_ends(profile)
        self._blocks, self._chunks = blocks, chunks
        # A dry run has no values, so it cannot check that a second call of a block gives the same result.
        self._solve(may_call_again and dry_mode.get() is None)
        self._is_checked = False  # whether ``_check_called_again`` has run its step
        self._peak: Any = None  # the peak of the latest measured step
        plain = [effect for of in self.problem.options for effect in of[-1].effects]
        self.plain_peak = ranks.most(peak_of(profile, plain, self.natural))

    def _solve(self, may_call_again: bool) -> None:
        profile, spans = self.profile, self._blocks.spans
        lasting = {id(entry): allocations for entry, allocations in zip(profile.entries, lasting_in(profile), strict=True)}
        called = {entry.block for entry in profile.entries}
        firsts = {name: profile.calls_of(name)[0] for name in self._blocks.roots if name in called}
        # The first rank's choices hold for all, since operators have the same numbers on all ranks.
        choices = self.ranks.first(
            lambda: {
                name: choices_of(profile, entry, lasting[id(entry)], is_function=may_call_again and name not in spans)
                for name, entry in firsts.items()
            }
        )
        self._options = block_options(profile, choices)
        self.problem = Problem(profile, self._options, self.natural)
        self.problem.add_windows(self.ranks)
        self.least = self.problem.peak(self.problem.least)

    def budget_of(self, part: float) -> int:
        """Returns the bytes of a fraction: 1.0 gives enough for a choice without regions."""
        least = self.least_of_all
        most: float = max(self.plain_peak, self.problem.peak([len(of) - 1 for of in self.problem.options]))
        most += most * _OFF if part == 1 else 0
        lowest: int = math.ceil(least / (1 - self._margin))
        return max(int(least + part * max(0.0, most - least)), lowest)

    @property
    def least_of_all(self) -> int:
        """The least peak of any choice, with spans and other numbers of chunks too."""
        return min(search.least for search in (self, *self.others))

    def plan(
        self,
        memory_budget: Budget,
        model: Module | None = None,
        step: Callable[[Module], Any] | None = None,
        tolerance: float = 0.01,
    ) -> PlanData:
        """Returns the plan of a budget: measured, or without a step as predicted."""
        if model is not None and step is not None:
            self._check_called_again(model, step)
        room = Room(self._device) if memory_budget == "auto" else None
        budget = parsed(memory_budget) if room is None else min(self.ranks.all(room.nbytes())) + self._base
        is_part, margin = isinstance(budget, float), self._margin
        least = self.least_of_all
        budget = self.budget_of(budget) if is_part else int(budget) - self._base
        target = int(budget * (1 - margin))
        if least > target:
            if model is not None and step is not None:
                self._measured(model, step, self.problem.least, room)  # the error says where the measured peak is
            raise too_small(budget, least, self._base, margin, self.problem, self._peak)
        search, chosen = self.cheapest(target)
        if model is None or step is None:
            plan = search.predicted(chosen, budget)
        else:
            plan = search._corrected(model, step, target, tolerance, room)
        plan = dataclasses.replace(plan, budget=budget, least_peak=least, _search=self)
        if plan.measured_peak > target and is_part:  # predictions, and so the budget, were too low
            plan = dataclasses.replace(plan, budget=math.ceil(plan.measured_peak / (1 - margin)))
        elif plan.measured_peak > target:
            raise too_small(budget, plan.measured_peak, 0, margin, search.problem, search._peak)
        return plan

    def cheapest(self, budget: float) -> tuple[Search, list[int]]:
        """Returns the search with the cheapest choice within a budget, and the choice."""
        fitting = [search for search in (self, *self.others) if search.least <= budget]
        # Spans around blocks are only for budgets that no choice without such spans fits.
        fitting = [search for search in fitting if not search._blocks.around] or fitting
        candidates = [(search, search.choice(budget) or search.problem.least) for search in fitting]
        return min(candidates, key=lambda candidate: candidate[0].problem.cost(candidate[1]) + candidate[0].profile.others_cost)

    def choice(self, budget: float) -> list[int] | None:
        return self.ranks.first(lambda: choose(self.problem, budget))

    def _corrected(
        self, model: Module, step: Callable[[Module], Any], budget: int, tolerance: float, room: Room | None
    ) -> PlanData:
        """Measures plans, each for a target corrected by the last error, and returns the best; the least plan if none fits."""
        target, seen = float(budget), list[list[int]]()
        best, least = None, math.inf
        for _ in range(_CORRECTIONS):
            chosen = self.choice(target)
            if chosen is None or chosen in seen:
                break
            seen.append(chosen)
            plan = self._measured(model, step, chosen, room)
            measured = plan.measured_peak
            if measured <= budget and self.problem.cost(chosen) < least:
                best, least = plan, self.problem.cost(chosen)
            is_more = measured > plan.predicted_peak * (1 + tolerance)
            if is_more and not all(block.recorded for block in plan.blocks):
                # The excess may be arguments that forward writes to, such as a key-value cache, copied to call blocks again.
                self._call_none_again()
                target, best, least = budget, None, math.inf
            elif budget * (1 - tolerance) <= measured <= budget:
                break
            else:
                target = budget + plan.predicted_peak - measured
        return self._measured(model, step, self.problem.least, room) if best is None else best

    def _check_called_again(self, model: Module, step: Callable[[Module], Any]) -> None:
        """Runs a step to check that blocks give equal results when called again; if not, no plan calls a block again."""
        called = [(name, option.choice) for name, of in self._options.items() for option in of if option.choice.is_function]
        if self._is_checked or not called:
            return

        # Check parts of blocks too: if only a part is called again, it sees the state that the rest of the block has left.
        may_be = {f"{name}.{part}".strip("."): None for name, choice in called for part in ("", *choice.parts)}
        runners = {name: RegionRunner(False, {"name": name, "determinism_check": "values"}) for name in may_be}

        def check() -> bool:
            with as_before(model), applied(model, runners, self._chunks):
                step(model)
            return True

        self._is_checked = True
        if not self.ranks.attempt(check):
            self._call_none_again()

    def _call_none_again(self) -> None:
        for search in (self, *self.others):
            search._solve(may_call_again=False)

    def _measured(self, model: Module, step: Callable[[Module], Any], chosen: Sequence[int], room: Room | None) -> PlanData:
        plan = self.predicted(chosen)
        with as_before(model), applied(model, runners_of(plan.blocks), self._chunks):
            if room is not None:
                room.begin()
            peak = self._peak = memory_ledger(lambda: step(model)).peak
            nbytes = peak.nbytes if room is None else room.taken()
        has_peak(nbytes)
        outside = outside_of(peak.holders, self._blocks.members)
        measured, (module, outside_bytes) = max(self.ranks.all((nbytes, outside)))
        return dataclasses.replace(
            plan,
            measured_peak=measured,
            outside_module=module,
            outside_bytes=outside_bytes,
            is_measured=True,
            _model=weakref.ref(model),
        )

    def predicted(self, chosen: Sequence[int], budget: int = 0) -> PlanData:
        """Returns the plan of a choice, not measured."""
        profile, problem = self.profile, self.problem
        blocks, effects = [], []
        forward = again = 0.0
        for name, of, number in zip(problem.blocks, problem.options, chosen, strict=True):
            option = of[number]
            effects += option.effects
            entries = profile.calls_of(name)
            whole, cost = sum(op.cost for entry in entries for op in entry.ops), sum(effect.cost for effect in option.effects)
            ran = [entry.ops[at] for entry, effect in zip(entries, option.effects, strict=True) for at in effect.again]
            kept = None
            if option.choice.kept is not None:
                runs = [(op.run, op.fresh) for op in map(entries[0].ops.__getitem__, option.choice.kept)]
                sizes = ((run, sum(profile.allocations[index].nbytes for index in fresh)) for run, fresh in runs)
                kept = tuple(KeptRun(*run, size) for run, size in sizes if run is not None)
            blocks.append(
                PlannedBlock(
                    name=name,
                    kind=self._blocks.kinds[name],
                    kept=kept,
                    kept_bytes=sum(run.nbytes for run in kept or ()) * len(entries),
                    recomputed=cost / whole if whole else 0.0,
                    recomputed_seconds=sum(op.seconds for op in ran) + option.replay_seconds,
                    recomputed_bytes=sum(profile.allocations[number].nbytes for op in ran for number in op.fresh),
                    shapes=tuple(self._shapes[name]),
                    recorded=not option.choice.is_function,
                    parts=option.choice.parts,
                )
            )
            inside = [inner for inner, outer in self._blocks.around.items() if outer == name]
            for inner in inside:
                nothing = () if option.choice.is_nested else None
                kind, of_inner = self._blocks.kinds[inner], tuple(self._shapes[inner])
                blocks.append(PlannedBlock(inner, kind, nothing, 0, 0.0, 0.0, 0, of_inner, name))
            forward, again = forward + whole, again + cost
        predicted = self.ranks.most(peak_of(profile, effects, self.natural))
        data = PlanData(
            blocks=tuple(blocks),
            budget=budget,
            predicted_peak=predicted,
            measured_peak=predicted,
            least_peak=self.least,
            plain_peak=self.plain_peak,
            recomputed=again / forward if forward else 0.0,
            recomputed_seconds=sum(block.recomputed_seconds for block in blocks),
            margin=self._margin,
            cost="operations" if self._per_second is None else "seconds",
            is_measured=False,
            region_seconds=sum(of[position].region_seconds for of, position in zip(problem.options, chosen, strict=True)),
            next_peak=int(problem.next_peak(chosen)),
            chunks=self._chunks,
        )
        return dataclasses.replace(self.ranks.first(lambda: data), _search=self)


#: The fraction of free memory that is left to other programs on the device, and to the driver for its kernels.
_LEFT = 0.05


def accelerator_of(model: Module) -> torch.device | None:
    """Returns the accelerator where a model is; None for the host."""
    current = torch.accelerator.current_accelerator()
    return next((leaf.device for leaf in model.parameters() if current is not None and leaf.device.type == current.type), None)


class Room:
    """The memory of an accelerator that a step may take, as the caching allocator counts it."""

    def __init__(self, device: torch.device | None) -> None:
        if device is None:
            advice = "'auto' reads an accelerator's free memory, but the model is on the host: pass bytes, such as '20GiB'."
            raise wrong("auto", "memory_budget", "bytes, or a fraction from 0.0 to 1.0", advice, ValueError)
        self._device, self._before = device, 0

    def nbytes(self) -> int:
        """Returns the bytes that a step may take: free bytes and bytes reserved without use, less the fraction ``_LEFT``."""
        gc.collect()
        free, _ = torch.accelerator.get_memory_info(self._device)
        unused = torch.accelerator.memory_reserved(self._device) - torch.accelerator.memory_allocated(self._device)
        return int((free + unused) * (1 - _LEFT))

    def begin(self) -> None:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._before = torch.accelerator.memory_allocated(self._device)

    def taken(self) -> int:
        """Returns the most bytes reserved since ``begin``, fragmentation included, less the bytes allocated at ``begin``."""
        return torch.accelerator.max_memory_reserved(self._device) - self._before
