"""One step with recorded regions that keep nothing, as a stream of allocations, operators and needs of backward."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module, ModuleDict, ModuleList

from ckpt_hooks._core.call_sites import called_modules
from ckpt_hooks._core.events import Observer, Operator, Region, TensorInfo, observe
from ckpt_hooks._core.holdings import Saved
from ckpt_hooks._torch.modes import active_fake_mode
from ckpt_hooks._torch.profiling import profile_memory
from ckpt_hooks.report.ledger.rows import Marks, OlderMemory, RegionMarks, Row, rows_of
from ckpt_hooks.report.progress import has_peak


class Run(NamedTuple):
    """Identifies a run of an operator: the submodule's name in the block, the operator, and the number of earlier runs."""

    module: str
    operator: str
    number: int


class _BlockMarks(RegionMarks):
    """Adds a mark for each event of the regions of blocks, and for each operator in them."""

    wants_operators = True

    def __init__(self, marks: Marks, blocks: dict[str, Module]) -> None:
        super().__init__(marks)
        self.wants_durations = active_fake_mode() is None
        self._blocks = blocks
        self._names: dict[str, dict[int, str]] = {}
        self._counts: dict[int, collections.Counter[tuple[str, str]]] = {}
        self._outermost: dict[int, Region] = {}  # by a region's number: the region of the outermost block around

    def entered(self, region: Region) -> None:
        # A span counts operators of regions inside, since a plan may make only the span a region.
        outer = self._outermost.get(region.parent or 0, region)
        self._outermost[region.id] = outer if outer.path[-1] in self._blocks else region
        super().entered(region)

    def ran(self, region: Region, operator: Operator) -> None:
        run = self._run_of(self._outermost.get(region.id, region), operator) if operator.is_asked_about else None
        self._mark("ran", region.id, operator, run)

    def _run_of(self, region: Region, operator: Operator) -> Run | None:
        """Returns the run as ``save_indices`` identifies it."""
        name = region.path[-1]
        block = self._blocks.get(name)
        if block is None:
            return None
        if name not in self._names:
            self._names[name] = {id(module): inner for inner, module in block.named_modules()}
        innermost = called_modules(sys._getframe(1))[0]
        module = self._names[name].get(id(innermost), "")
        counts = self._counts.setdefault(region.id, collections.Counter())
        number = counts[module, operator.name]
        counts[module, operator.name] += 1
        return Run(module, operator.name, number)

    def saved(self, region: Region, saved: Saved, tensor: TensorInfo) -> None:
        self._mark("saved", region.id, saved.position, tensor.address)

    def restored(self, region: Region, position: int, tensor: TensorInfo) -> None:
        self._mark("restored", region.id, position)


@dataclasses.dataclass(slots=True)
class ProfiledAllocation:
    """Memory allocated in the step; ``born`` and ``freed`` are rows, and ``freed`` is ``num_rows`` if no row frees it."""

    nbytes: int
    born: int
    freed: int
    is_again: bool  # whether the recompute of a block allocated the memory
    is_lent: bool = False  # whether the program freed the memory under a tensor that a block held, as FSDP2 does to parameters


#: A storage at a moment: the index of its allocation, and the number of earlier writes by operators of the block's call.
StorageVersion = tuple[int, int]


@dataclasses.dataclass(slots=True)
class OpRun:
    """An operator in a call of a block."""

    name: str
    run: Run | None  # None if policies are not asked about the operator
    reads: list[StorageVersion]
    makes: list[StorageVersion]  # made or written, each once
    fresh: list[int]  # the allocations of the results
    cost: float
    alike: object
    seconds: float = 0.0  # on the host
    temporary: int = 0  # the most bytes that a second run takes besides the results
    extras: list[int] = dataclasses.field(default_factory=list)  # allocations for a second run, such as a generator's state


@dataclasses.dataclass(slots=True)
class Request:
    """A tensor saved for backward, and the rows at which backward asks for it and lets go of it."""

    value: StorageVersion | None  # None for a tensor from before the step
    restored: int | None  # None if backward never asks
    let_go: int


@dataclasses.dataclass
class BlockCall:
    """One call of a block; ``begin`` and ``end`` are the rows of its forward."""

    block: str
    begin: int
    end: int
    ops: list[OpRun] = dataclasses.field(default_factory=list)
    handles: list[Request] = dataclasses.field(default_factory=list)
    maker: dict[StorageVersion, int] = dataclasses.field(default_factory=dict)  # the operator which makes each value
    in_order: bool = False  # whether replays run whole, in forward's order
    inside: list[BlockCall] = dataclasses.field(default_factory=list)  # calls of blocks inside, whose operators ``ops`` has too
    direct_handles: list[Request] = dataclasses.field(default_factory=list)  # handles that belong to no call inside
    first: int = 0  # the number of operators that the call around had run when this call began
    first_handle: int = 0
    part: str = ""  # the name of a module inside that may be a region in place of the block

    @property
    def cast_cost(self) -> float:
        """The cost of casts of tensors from before the step, such as parameters."""
        return sum(op.cost for op in self.ops if op.name == "aten._to_copy.default" and not op.reads)

    def outside(self) -> dict[int, tuple[int, int]]:
        """Returns the allocations from outside that replays read, and the rows of the first and of the last need."""
        needs: dict[int, tuple[int, int]] = {}
        for handle in self.handles:
            todo, seen = [handle.value], set[StorageVersion | None]()
            while todo and handle.restored is not None:
                value = todo.pop()
                if value is None or value in seen:
                    continue
                seen.add(value)
                if value in self.maker:
                    todo += self.ops[self.maker[value]].reads
                else:
                    first, last = needs.get(value[0], (handle.restored, 0))
                    end = handle.let_go if value == handle.value else handle.restored
                    needs[value[0]] = min(first, handle.restored), max(last, end)
        return needs


#: The cost of recording an operator, and of replaying it: roughly the operations that a core of a host computes in 60 and 10
#: microseconds. An accelerator computes as many in almost no time, so the host's work is nearly free there, like launches.
PRICES = 3_000_000.0, 500_000.0
#: Roughly the seconds in which a core of a host records an operator, replays it, and prepares a second call. Exact times
#: would need steps without regions, which may not fit.
_SECONDS = 60e-6, 10e-6, 200e-6


#: The number of operators that are recorded in the time of entering and leaving a region.
_OF_CALL = 10


def recorded_in(entry: BlockCall) -> int:
    """Returns the time of recording a call, as a number of operators."""
    return len(entry.ops) + _OF_CALL


@dataclasses.dataclass
class Profile:
    """A step whose blocks keep nothing."""

    num_rows: int
    allocations: list[ProfiledAllocation]
    entries: list[BlockCall]
    older: list[tuple[int, int]]  # frees of memory from before the step: the row, and the bytes, negative
    others_cost: float = 0.0  # of recomputes in other regions, such as chunks
    times: dict[object, list[float]] = dataclasses.field(default_factory=dict)  # of second runs, by the key of :func:`_alike`
    # What a recorded region adds to the cost of each operator, and of each operator that it replays.
    record_cost: float = dataclasses.field(default_factory=lambda: PRICES[0])
    replay_cost: float = dataclasses.field(default_factory=lambda: PRICES[1])
    call_cost: float = 0.0  # the cost that a second call of a block adds
    record_seconds: float = 0.0
    replay_seconds: float = 0.0
    call_seconds: float = 0.0

    def calls_of(self, block: str) -> list[BlockCall]:
        """Returns the calls of a block, calls with a backward first, since a step may have failed and run again."""
        calls = [entry for entry in self.entries if entry.block == block]
        return sorted(calls, key=lambda entry: all(handle.restored is None for handle in entry.handles))

    @property
    def has_backward(self) -> bool:
        return any(handle.restored is not None for entry in self.entries for handle in entry.handles)

    def cost_per_second(self) -> float:
        ops = [op for entry in self.entries for op in entry.ops]
        return sum(op.cost for op in ops) / max(1e-9, sum(op.seconds for op in ops))

    def cost_by_seconds(self, per_second: float) -> None:
        """Replaces all costs by measured seconds, converted to the unit of operations."""
        self.record_seconds, self.replay_seconds, self.call_seconds = _SECONDS
        self.record_cost, self.replay_cost = self.record_seconds * per_second, self.replay_seconds * per_second
        self.call_cost = self.call_seconds * per_second
        for op in [op for entry in self.entries for op in entry.ops]:
            op.cost = op.seconds * per_second if op.cost else 0.0  # views are free

    def spread(self) -> float:
        """Returns how far times of second runs on equal sizes are from their median, as a fraction of all times."""
        runs = [(times, statistics.median(times)) for times in self.times.values()]
        apart = sum(abs(seconds - median) for times, median in runs for seconds in times)
        return apart / max(1e-9, sum(median * len(times) for times, median in runs))


#: The cost of a moved byte: roughly the operations that an accelerator computes while it moves a byte. Without this cost,
#: pointwise operators, most of the recompute of a network of convolutions, would be free.
_BYTE = 10


#: The cost of a random number on a host: roughly the operations that a core computes in 20 nanoseconds.
_DRAW = 1000


def cost_of(operator: Operator) -> float:
    """Returns the floating-point operations of a second run, and ten for each byte moved."""
    moved = sum(tensor.nbytes for tensor in (*(() if operator.reads_shape_only else operator.inputs), *operator.outputs))
    return 0.0 if operator.is_view else _BYTE * moved + _count(operator)


def _alike(operator: Operator) -> object:
    """Returns a key that operators of equal time share: the name and the sizes."""
    return operator.name, *(tuple(sorted(tensor.nbytes for tensor in of)) for of in (operator.inputs, operator.outputs))


def _count(operator: Operator) -> float:
    """Returns the floating-point operations of an operator: of a product by its shapes, otherwise the number of elements."""
    inputs = [tensor.shape for tensor in operator.inputs if tensor.shape is not None]
    outputs = [tensor.shape for tensor in operator.outputs if tensor.shape is not None]
    name = operator.name.removeprefix("aten.").partition(".")[0]
    if name in ("mm", "bmm") and len(inputs) == 2:
        return 2.0 * inputs[0].numel() * inputs[1][-1]
    if name in ("addmm", "baddbmm") and len(inputs) == 3:
        return 2.0 * inputs[1].numel() * inputs[2][-1]
    if name == "convolution" and len(inputs) > 1 and outputs:
        return 2.0 * outputs[0].numel() * inputs[1][1:].numel()
    if "attention" in name and len(inputs) > 2:
        return 4.0 * inputs[0].numel() * inputs[1][-2]
    return float((_DRAW if operator.draws_on_host else 1) * sum(shape.numel() for shape in outputs))


class ModelHook:
    """A hook of a module that calls a method of a plan; copies and pickles of the hook do nothing."""

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> None:
        if self._method is not None and not torch.compiler.is_compiling():
            self._method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelHook, ()


def _parts_of(blocks: Mapping[str, Module]) -> Iterator[tuple[str, str, Module]]:
    """Yields the modules in blocks that may be regions in place of the blocks: the block, the name, and the module."""
    below = [
        (block, name, module)
        for block, root in blocks.items()
        if " to " not in block
        for name, module in root.named_modules()
        if name and not isinstance(module, (ModuleList, ModuleDict))
    ]
    counts = collections.Counter(id(module) for _, _, module in below)
    yield from (part for part in below if counts[id(part[2])] == 1)


class OpenStep:
    """A step under the profiler, until ``end``; if blocks are given, their regions have to keep nothing."""

    def __init__(self, blocks: Mapping[str, Module] | None, device: torch.device | None = None) -> None:
        self._device = "cpu" if device is None else device.type
        self._blocks = None if blocks is None else {*blocks}
        self._marks = Marks()
        self._older = OlderMemory(self._marks)
        self._hooks = [*self._hooked(blocks or {})]
        self.observers: tuple[Observer, ...] = () if blocks is None else (_BlockMarks(self._marks, {**blocks}),)
        self._memory = profile_memory()
        self._memory.__enter__()

    def _hooked(self, blocks: Mapping[str, Module]) -> Iterator[Any]:
        for block, name, module in _parts_of(blocks):
            begins, ends = (functools.partial(self._mark, event, block, name) for event in ("part_begins", "part_ends"))
            yield module.register_forward_pre_hook(ModelHook(begins))
            yield module.register_forward_hook(ModelHook(ends), always_call=True)

    def _mark(self, event: str, block: str, name: str, *args: Any) -> None:
        self._marks.add(event, block, name)

    def abandon(self) -> None:
        """Ends the profile without reading it."""
        for hook in self._hooks:
            hook.remove()
        self._memory.__exit__(None, None, None)
        self._marks.is_open = False
        self._older.forget()

    def end(self) -> tuple[int, Profile | None]:
        """Returns the peak above the memory in use at the start, and, with blocks, the profile."""
        self.abandon()
        rows = rows_of(self._memory.events(), self._marks)
        return self._peak(rows), None if self._blocks is None else _Reader(self._blocks, self._older.sizes).read(rows)

    def _peak(self, rows: Iterable[Row]) -> int:
        alive, live, most = dict[int, int](), 0, 0
        for row in rows:
            if row.mark is not None:
                is_freed = row.mark.event == "older_freed" and self._device == "cpu"
                live -= self._older.sizes.get(row.mark.args[0], 0) if is_freed else 0
            elif row.device is not None and row.device.type != self._device:
                continue
            elif row.nbytes > 0:
                alive[row.address] = row.nbytes
                live += row.nbytes
            else:
                live -= alive.pop(row.address, 0)
            most = max(most, live)
        return most


def profile_step(step: Callable[[], Any], blocks: Mapping[str, Module]) -> Profile:
    """Profiles a step; its blocks have to be recorded regions that keep nothing and do not replay whole."""
    open_step = OpenStep(blocks)
    try:
        with observe(open_step.observers[0]):
            step()
    except BaseException:
        open_step.abandon()
        raise
    peak, profile = open_step.end()
    has_peak(peak)
    assert profile is not None
    return profile


class _Reader:
    """Reads the rows of a step; each mark in a row calls the method of the mark's name, such as ``entered``."""

    def __init__(self, blocks: set[str], older: dict[int, int]) -> None:
        self._blocks, self._older = blocks, older
        self._alive: dict[int, int] = {}
        self._allocations: list[ProfiledAllocation] = []
        self._freed: list[tuple[int, int]] = []
        self._entries: dict[int, dict[int, BlockCall]] = {}  # by region: the calls of the blocks around, each by its region
        self._handles: dict[tuple[int, int], list[Request]] = {}
        self._versions: dict[tuple[int, int], int] = {}  # numbers of writes, by region and allocation
        self._recomputes: list[int] = []
        self._latest: dict[str, BlockCall] = {}  # the open call of each block
        self._begun = 0  # the bytes in use when the running operator began to allocate
        self._live = self._most = 0  # the bytes in use now, and the most since ``_begun``
        self._first, self._has_begun = 0, False  # allocations before the running operator, and whether it has made any
        self._seen = 0  # the number of allocations when the latest operator of forward ended
        self._at = 0  # the row
        self._again = 0.0
        self._times = collections.defaultdict[tuple[object, bool], list[float]](list)

    def read(self, rows: Sequence[Row]) -> Profile:
        for self._at, row in enumerate(rows):
            if row.mark is not None:
                getattr(self, row.mark.event)(*row.mark.args)
            elif row.nbytes > 0:
                self._alive[row.address] = len(self._allocations)
                # Recomputes of other regions are the same under each plan, so simulations keep their allocations.
                is_again = any(region in self._entries for region in self._recomputes)
                self._allocations.append(ProfiledAllocation(row.nbytes, self._at, len(rows), is_again))
                self._change(row.nbytes)
            elif (number := self._alive.pop(row.address, None)) is not None:
                self._allocations[number].freed = self._at
                self._change(row.nbytes)
        entries = [around[region] for region, around in self._entries.items() if region == next(iter(around))]
        for entry in entries:
            for op in entry.ops:
                op.extras = [number for number in op.extras if self._allocations[number].freed > entry.end]
        for handle in itertools.chain(*self._handles.values()):
            handle.let_go = min(handle.let_go, len(rows))
        for entry in entries:
            for number, (first, _) in entry.outside().items():
                self._allocations[number].is_lent |= self._allocations[number].freed < first
        for op in itertools.chain(*(entry.ops for entry in entries)):
            # Prefer the times of second runs: a first run is cold, and includes the recorder's time.
            times = self._times.get((op.alike, True), []) or self._times.get((op.alike, False), [0.0])
            op.seconds = statistics.median(times)
        again = {alike: times for (alike, is_again), times in self._times.items() if is_again}
        return Profile(len(rows), self._allocations, entries, self._freed, self._again, again)

    def _change(self, nbytes: int) -> None:
        if nbytes > 0 and not self._has_begun:  # an operator's first allocation: earlier inputs are freed by now
            self._has_begun, self._begun, self._most = True, self._live, self._live
        self._live += nbytes
        self._most = max(self._most, self._live)

    def entered(self, region: Region) -> None:
        if not region.in_recompute and region.path[-1] in self._blocks:
            around = self._entries.get(region.parent or 0, {})
            entry = BlockCall(region.path[-1], self._at, self._at)
            for outer in around.values():
                outer.inside.append(entry)
                entry.first = len(outer.ops)
            self._entries[region.id] = {**around, region.id: entry}
            self._latest[entry.block] = entry
            self._seen = len(self._allocations)
            self._restart()

    def exited(self, region: int) -> None:
        if region in self._entries:
            entry = self._entries[region][region]
            entry.end = self._at
            self._latest.pop(entry.block, None)

    def part_begins(self, block: str, name: str) -> None:
        if (outer := self._latest.get(block)) is not None:
            part = BlockCall(block, self._at, 0, first=len(outer.ops), first_handle=len(outer.handles), part=name)
            outer.inside.append(part)

    def part_ends(self, block: str, name: str) -> None:
        if (outer := self._latest.get(block)) is None:
            return
        for part in [call for call in outer.inside if call.part == name and not call.end]:
            part.end, part.ops, part.handles = self._at, outer.ops[part.first :], outer.handles[part.first_handle :]
            part.maker = {value: at - part.first for value, at in outer.maker.items() if at >= part.first}

    def saved(self, region: int, position: int, address: int) -> None:
        for around, entry in self._entries.get(region, {}).items():
            handle = Request(self._value_at(around, address), None, sys.maxsize)
            self._handles.setdefault((region, position), []).append(handle)
            entry.handles.append(handle)
            if around == region:
                entry.direct_handles.append(handle)

    def let_go(self, region: int, position: int) -> None:
        for handle in self._handles.get((region, position), ()):
            handle.let_go = self._at

    def restored(self, region: int, position: int) -> None:
        for handle in self._handles.get((region, position), ()):
            handle.restored = self._at if handle.restored is None else handle.restored

    def recomputing(self, region: Region, in_order: bool) -> None:
        self._recomputes.append(region.id)
        for entry in self._entries.get(region.id, {}).values():
            entry.in_order |= in_order

    def recomputed(self, region: int) -> None:
        if self._recomputes:
            self._recomputes.pop()

    def older_freed(self, address: int) -> None:
        if address in self._older:
            self._freed.append((self._at, -self._older[address]))

    def _value_at(self, region: int, address: int) -> StorageVersion | None:
        number = self._alive.get(address)
        return None if number is None else (number, self._versions.get((region, number), 0))

    def ran(self, region: int, operator: Operator, run: Run | None) -> None:
        around = {} if operator.in_recompute else self._entries.get(region, {})
        alike = _alike(operator)
        if operator.seconds is not None:
            self._times[alike, operator.in_recompute].append(operator.seconds)
        if operator.in_recompute and region not in self._entries:
            self._again += cost_of(operator)
        new = range(self._seen, len(self._allocations))
        for number, entry in around.items():
            self._ran_in(entry, number, operator, alike, run, new)
        self._seen = len(self._allocations) if around else self._seen
        self._restart()

    def _ran_in(
        self, entry: BlockCall, region: int, operator: Operator, alike: object, run: Run | None, new: Iterable[int]
    ) -> None:
        reads = [value for tensor in operator.inputs if (value := self._value_at(region, tensor.address)) is not None]
        written = {
            value[0]
            for position in operator.writes
            if (value := self._value_at(region, operator.inputs[position].address)) is not None
        }
        before = {value[0] for value in reads}
        fresh = list(dict.fromkeys(self._alive[output.address] for output in operator.outputs if output.address in self._alive))
        fresh = [number for number in fresh if number not in before and self._allocations[number].born > entry.begin]
        fresh = [number for number in fresh if (number, self._versions.get((region, number), 0)) not in entry.maker]
        makes = [(number, 0) for number in fresh]
        for number in written:
            version = self._versions.get((region, number), 0) + 1
            self._versions[region, number] = version
            makes.append((number, version))
        if operator.reads_shape_only:
            reads = reads[1:] if operator.inputs else reads
        at = len(entry.ops)
        for value in makes:
            entry.maker[value] = at
        op = OpRun(operator.name, run, list(dict.fromkeys(reads)), makes, fresh, cost_of(operator), alike)
        op.extras = [number for number in new if number not in fresh]
        stays = sum(allocation.nbytes for allocation in self._allocations[self._first :] if allocation.freed > self._at)
        op.temporary = max(0, self._most - self._begun - stays)
        entry.ops.append(op)

    def _restart(self) -> None:
        self._begun = self._most = self._live
        self._first, self._has_begun = len(self._allocations), False
