"""Modules under a plan: blocks whose calls keep what the plan for their shapes says, and modules that run in chunks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import gt
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import Module

from ckpt_hooks._checkpoint.chunks import chunks_among
from ckpt_hooks._checkpoint.region import checkpoint_region
from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.descriptions import dtype_and_shape, kind_in_words
from ckpt_hooks._core.misuse import check_is, unknown_error, wrong
from ckpt_hooks._tensors.nested import outer_tensors_in
from ckpt_hooks._torch.compiling import skipped, while_tracing
from ckpt_hooks.modules import AppliedCheckpointing, apply_checkpointing
from ckpt_hooks.modules.forward import RegionRunner, region_forward_for
from ckpt_hooks.modules.selecting import selected_of, selector_of
from ckpt_hooks.policies import save_indices
from ckpt_hooks.policies.base import operator_named
from ckpt_hooks.report.printing import name_pattern

#: The dtype and the shape of each tensor in the arguments of a call.
Shapes = tuple[tuple[torch.dtype, Any], ...]
#: Submodule, operator and number of each run whose result is kept.
Runs = tuple[tuple[str, str, int], ...]


class InnerRegions(NamedTuple):
    """Modules of a block that are regions in place of the block."""

    parts: tuple[str, ...]
    recorded: bool


#: How a call runs: the results to keep, or the regions inside; None for a plain call; False if backward calls the block again.
CallPlan = Runs | InnerRegions | Literal[False] | None


def is_within(shapes: Shapes, others: Shapes) -> bool:
    """Whether two calls have tensors of the same number, dtypes and ranks, none larger in any dimension than the second's."""
    return len(shapes) == len(others) and all(
        dtype == other
        and shape is not None
        and bound is not None
        and len(shape) == len(bound)
        and not any(map(gt, shape, bound))
        for (dtype, shape), (other, bound) in zip(shapes, others, strict=True)
    )


def _size_of(shapes: Shapes) -> int:
    return sum(0 if shape is None else shape.numel() for _, shape in shapes)


def _are_rows(shapes: Shapes, others: Shapes) -> bool:
    """Whether two calls differ only in the numbers of rows, as calls of experts do."""
    return [(dtype, (shape or ())[1:]) for dtype, shape in shapes] == [(dtype, (shape or ())[1:]) for dtype, shape in others]


def shapes_in_words(shapes: Shapes) -> str:
    """Returns the shapes of a call in words, as in ``"float32[4, 8], int64[4]"``."""
    return ", ".join(map(kind_in_words, shapes)) or "no tensors"


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
        name: The block's name in the model; of a span, as in ``"layers.0 to layers.3"``.
        kind: The class.
        kept: The results kept; None without a region, where autograd keeps all.
        kept_bytes: The bytes kept, in all calls.
        recomputed: The part of the block's forward that runs again, by cost.
        recomputed_seconds: The seconds of the operators that run again, as measured in the profile.
        recomputed_bytes: The bytes of the results of these operators, in all calls.
        shapes: The shapes of its calls, each once: dtype and shape of each tensor in the arguments; of a span, those of the
            first module.
        around: The name of the block around, whose figures count what runs in this one; ``""`` without one.
        recorded: Whether a region replays operators, as :func:`ckpt_hooks.checkpoint_region`; False where backward calls the
            block again, as :func:`ckpt_hooks.checkpoint` does.
        parts: The names in the block of modules that are regions in place of the block; the rest of the block has none.
    """

    name: str
    kind: str
    kept: tuple[KeptRun, ...] | None
    kept_bytes: int
    recomputed: float
    recomputed_seconds: float
    recomputed_bytes: int
    shapes: tuple[Shapes, ...]
    around: str = ""
    recorded: bool = True
    parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PlanData:
    """The fields of a plan; see :class:`ckpt_hooks.planner.Plan`."""

    blocks: tuple[PlannedBlock, ...]
    budget: int
    predicted_peak: int
    measured_peak: int
    least_peak: int
    plain_peak: int
    recomputed: float
    recomputed_seconds: float
    margin: float = 0.0
    cost: Literal["operations", "seconds"] = "operations"
    outside_bytes: int = 0
    outside_module: str = ""
    is_measured: bool = True
    region_seconds: float = 0.0
    next_peak: int = 0
    chunks: tuple[PlannedChunks, ...] = ()
    _model: weakref.ref[torch.nn.Module] | None = dataclasses.field(default=None, compare=False)
    _search: Any = dataclasses.field(default=None, compare=False)  # a Search with the profile, for plans of other budgets


class OtherShapes:
    """Warns once of a call with shapes that the plan has not measured."""

    def __init__(self) -> None:
        self._has_said = False

    def __call__(self, block: str, shapes: Shapes) -> None:
        if not self._has_said:
            self._has_said = True
            warn_user(
                f"The plan has measured no step in which block {block!r} gets {shapes_in_words(shapes)}, or larger tensors: "
                "such calls keep nothing, and all of their forward runs again. Measure such a step: `plan.add(step)`, before "
                "`plan.apply()`."
            )


@while_tracing
def _warn_of_compilers() -> None:
    warn_user(
        "A plan is for steps that run eagerly. torch.compile keeps other results, and a step may take more than the budget. "
        "Measure a compiled step, `memory_ledger(step)`, and lower the budget of plan_memory by the excess."
    )


class _InsideRunner(RegionRunner):
    """Calls a block with some modules inside as regions, for the time of the call."""

    def __init__(self, name: str, inside: InnerRegions) -> None:
        options = {"replay_whole": False} if inside.recorded else {}
        super().__init__(inside.recorded, {"name": name, **options})
        self._parts = {part: RegionRunner(inside.recorded, {"name": f"{name}.{part}", **options}) for part in inside.parts}
        self._run, self._region = self._run_inside, None

    def _run_inside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with contextlib.ExitStack() as undo:
            for part, runner in self._parts.items():
                with contextlib.suppress(AttributeError):  # raised for a function, or if a wrapper hides the part
                    forward = region_forward_for(function.__self__.get_submodule(part))
                    if forward.run is None:
                        forward.run = runner
                        undo.callback(forward.remove, runner)
            return function(*args, **kwargs)


class PlannedRunner(RegionRunner):
    """Calls a block as its plan says: as a region that keeps some results, or plainly; calls of larger shapes keep nothing."""

    on_call: Callable[[str, Shapes], None] | None = None  # told of each call, while a step is profiled or measured

    def __init__(self, name: str, kept: Mapping[Shapes, CallPlan] | None, on_other: Callable[[str, Shapes], None]) -> None:
        super().__init__(True, {"name": name, "replay_whole": False})
        self._called_again = RegionRunner(False, {"name": name})
        self._name, self._on_other = name, on_other
        # Runners by module: names of submodules are relative to the called module, and replicas of a model share this object.
        self._runners: weakref.WeakKeyDictionary[Any, dict[Runs | InnerRegions, RegionRunner]] = weakref.WeakKeyDictionary()
        self.keep(kept)

    def keep(self, kept: Mapping[Shapes, CallPlan] | None) -> None:
        """Sets what later calls keep; None makes them plain."""
        self._kept = kept
        of_runs = [kept_runs for kept_runs in (kept or {}).values() if kept_runs and not isinstance(kept_runs, InnerRegions)]
        self._traced: dict[Runs | InnerRegions, RegionRunner] = {runs: self._runner_for(runs, None) for runs in of_runs}

    @skipped
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        while isinstance(function, functools.partial):  # Transformers puts the keywords of a layer into a partial
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        root = getattr(function, "__self__", None)
        if isinstance(function, FunctionType) and args and not torch.compiler.is_dynamo_compiling():
            root = args[0]  # since 5.24 Transformers calls ``forward`` as a function of the layer
            if isinstance(root, Module):
                function, args = MethodType(function, root), args[1:]
        runner = self._runner(root, args, kwargs)
        return function(*args, **kwargs) if runner is None else runner._run(function, args, kwargs)

    def region_of(self, root: Any, function: Any, args: Any, kwargs: dict[str, Any]) -> checkpoint_region | None:
        runner = self._runner(root, args, kwargs)
        return None if runner is None else runner._region

    def _runner(self, root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegionRunner | None:
        """Returns the runner for a call, by the shapes of its tensors; None for a plain call."""
        if self._kept is None or not torch.is_grad_enabled():
            return None
        tensors = outer_tensors_in((args, [kwargs[name] for name in sorted(kwargs)]))
        shapes = tuple(map(dtype_and_shape, tensors))
        is_traced = torch.compiler.is_dynamo_compiling()
        if is_traced:
            _warn_of_compilers()
        elif self.on_call is not None:
            self.on_call(self._name, shapes)
        if not is_traced and shapes not in self._kept:
            larger = [others for others in self._kept if is_within(shapes, others)]
            if larger:
                shapes = min(larger, key=_size_of)
            else:
                self._on_other(self._name, shapes)
        kept = self._kept.get(shapes, ())
        if kept is False and not is_traced:
            return self._called_again
        if not kept:
            return None if kept is None else self
        if is_traced:  # Dynamo cannot make runners, so a block planned with regions inside becomes a region itself
            return self._traced.get(kept, self)
        module = root if isinstance(root, Module) else None
        runners = self._runners.setdefault(module or self, {})
        runner = runners.get(kept)
        if runner is None:
            runner = runners[kept] = self._runner_for(kept, module)
        return runner

    def _runner_for(self, kept: Runs | InnerRegions, module: Module | None) -> RegionRunner:
        if isinstance(kept, InnerRegions):
            return _InsideRunner(self._name, kept)
        policy = save_indices([(name, operator_named(operator), number) for name, operator, number in kept], root=module)
        return RegionRunner(True, {"name": self._name, "replay_whole": False, "policy": policy})

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedRunner, (self._name, self._kept, self._on_other)


def kept_in(blocks: Iterable[PlannedBlock]) -> dict[str, dict[Shapes, CallPlan]]:
    """Returns how calls of each block run, by the block's name and the shapes of the call."""
    kept: dict[str, dict[Shapes, CallPlan]] = {}
    alike: dict[tuple[str, str], set[Shapes]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    for block in blocks:
        runs: CallPlan = None
        if block.parts:
            runs = InnerRegions(block.parts, block.recorded)
        elif block.kept is not None:
            runs = tuple((run.module, run.operator, run.number) for run in block.kept) if block.recorded else False
        # If several plans have the same shapes, the last counts.
        kept.setdefault(block.name, {}).update(dict.fromkeys(block.shapes, runs))
        kinds[block.name] = name_pattern(block.name), block.kind
        alike.setdefault(kinds[block.name], set()).update(block.shapes)
    for name, by_shapes in kept.items():
        # In other steps an expert may get as many tokens as any other expert in the measured step: experts share that bound.
        largest = max(by_shapes, key=_size_of)
        rows = [shapes for shapes in alike[kinds[name]] if _are_rows(shapes, largest)]
        by_shapes.setdefault(max(rows, key=_size_of), by_shapes[largest])
    return kept


def runners_of(blocks: Iterable[PlannedBlock]) -> dict[str, PlannedRunner]:
    """Returns a function for each block, by the block's name, which calls the block as planned."""
    on_other = OtherShapes()
    return {name: PlannedRunner(name, by_shapes, on_other) for name, by_shapes in kept_in(blocks).items()}


@dataclasses.dataclass(frozen=True)
class PlannedChunks:
    """A module that runs in chunks under a plan.

    Attributes:
        name: The module's name in the model.
        chunks: The number of slices.
        is_attribute: Whether the module calls :func:`ckpt_hooks.checkpoint_chunks` itself, with its attribute ``chunks``.
        dim: The dimension to cut, for a module that does not.
        reduce: How results of slices are put together.
        chunked: The names of other arguments to cut.
    """

    name: str
    chunks: int
    is_attribute: bool
    dim: int = 0
    reduce: str | None = None
    chunked: tuple[str, ...] = ()

    @property
    def _options(self) -> dict[str, Any]:
        return {"chunks": self.chunks, "dim": self.dim, "reduce": self.reduce, "chunked": self.chunked}


#: The modules that run in chunks, each with its number of slices.
Chunking = tuple[PlannedChunks, ...]

_ADVICE = "Write chunks={'head': (1, 4, 8)}, or chunks={'mlp': {'chunks': (1, 4, 8), 'dim': 1}}."


def chunkings_of(model: Module, counts_by_module: Any) -> list[Chunking]:
    """Returns each combination of counts that a user gives for modules, from the fewest slices."""
    check_is(counts_by_module, Mapping, "chunks", "a mapping of module names to numbers of slices", _ADVICE)
    choices: list[list[Chunking]] = []
    for pattern, value in counts_by_module.items():
        options = dict(value) if isinstance(value, Mapping) else {"chunks": value}
        if unknown := [name for name in options if name not in ("chunks", "dim", "reduce", "chunked")]:
            raise unknown_error(unknown, ("chunks", "dim", "reduce", "chunked"), "chunks", _ADVICE)
        counts = options.get("chunks")
        if not isinstance(counts, (list, tuple)) or not counts:
            raise wrong(counts, f"chunks[{pattern!r}]", "numbers of slices", _ADVICE)
        modules = {
            name: module for name, (module, _) in selected_of(model, {pattern: None}, None, "chunks", below=True).items()
        }
        holds = {name: type(getattr(module, "chunks", None)) is int for name, module in modules.items()}
        cuts = [(count, chunks_among({**options, "chunks": count})) for count in sorted(counts)]
        choices.append(
            [
                tuple(PlannedChunks(name, count, holds[name], cut.dim, cut.reduce, tuple(cut.chunked)) for name in modules)
                for count, cut in cuts
                if cut is not None
            ]
        )
    return [tuple(itertools.chain(*combination)) for combination in itertools.product(*choices)]


def chunk(model: Module, chunking: Iterable[PlannedChunks], names: Mapping[str, str]) -> AppliedCheckpointing:
    """Makes modules run in chunks, by their names in the model."""
    undo: list[Callable[[], object]] = []
    select: dict[str, Any] = {}
    for cut in chunking:
        if cut.is_attribute:
            module: Any = model.get_submodule(names[cut.name])
            undo.append(functools.partial(_put_back, weakref.ref(module), vars(module).get("chunks")))
            module.chunks = cut.chunks
        elif cut.chunks > 1:
            select[names[cut.name]] = cut._options
    regions = apply_checkpointing(model, select) if select else AppliedCheckpointing((), ())
    return AppliedCheckpointing(regions, [regions.undo, *undo])


def _put_back(reference: weakref.ref[Any], chunks: int | None) -> None:
    if (module := reference()) is not None:
        if chunks is None:  # the instance had no value, so the class's counts again
            vars(module).pop("chunks", None)
        else:
            module.chunks = chunks


@contextlib.contextmanager
def applied(model: Module, runners: Mapping[str, RegionRunner], chunking: Chunking) -> Iterator[None]:
    """Makes blocks regions, each by its runner, and modules run in chunks, inside a ``with`` statement."""
    names, select = {cut.name: cut.name for cut in chunking}, {selector_of(name): runner for name, runner in runners.items()}
    with chunk(model, chunking, names), apply_checkpointing(model, select) if select else contextlib.nullcontext():
        yield


def chunks_in_words(chunking: Iterable[PlannedChunks]) -> str:
    """Returns words such as ``"head in 8 chunks"``."""
    return ", ".join(f"{cut.name} in {cut.chunks} chunks" if cut.chunks > 1 else f"{cut.name} as a whole" for cut in chunking)
