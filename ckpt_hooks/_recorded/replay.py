"""Replays of a tape: bring back values of a frame for a backward, each operator at most once (Rule 13).

The plan of a replay counts the reads of each value that backward needs, and says whether all operators must run in the order of
recording. The plan refers to values by number, so that a value dies with its handles, which backward drops in turn. A
replay drops a value after its last reader. A small region is replayed as a whole when backward asks for the first value, which
is faster; a larger region only as far as a wanted value needs, which takes less memory. An option chooses between the two. A
region that overwrites a value after an operator has read it is replayed as a whole, in the order of recording.

A frame that reads values of its outer frame asks the outer frame's replay, and so on outwards, in a loop, not a recursion:
first each frame collects its needs, then all run, from the outermost inwards. Memory that a framework frees is borrowed from
the first operator that reads it to the last.
"""

from __future__ import annotations

import abc
import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ckpt_hooks._ambient import switches
from ckpt_hooks._ambient.devices import Current, run_on
from ckpt_hooks._ambient.switches import AUTOCAST
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.hooks import mark_thread, rewind
from ckpt_hooks._core.modes import pause_modes, resume_modes, reusable
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._operators.draws import InSeries, ReplacedGenerators, draw_again, draw_anew
from ckpt_hooks._operators.operator_log import watch_replay
from ckpt_hooks._tensors.copies import Clones, copy_in, stand_in_for
from ckpt_hooks._tensors.held_tensors import HeldRefilled
from ckpt_hooks._tensors.nested import outer_tensors_in
from ckpt_hooks._tensors.refilling import FilledMemory, Owner, borrow, give_back, is_lent
from ckpt_hooks._torch.autograd import set_grad_enabled
from ckpt_hooks._torch.modes import (
    PastFunctionModes,
    is_any_transform_active,
    is_mapped,
    num_dispatch_modes,
    num_function_modes,
    resume_transforms,
    suspend_transforms,
)
from ckpt_hooks._torch.tensors import BelowAutograd, is_freed, storage_address, storage_of
from ckpt_hooks.errors import CheckpointError, MutationError

from .explaining import OperatorLines, check_shapes
from .values import ANEW, Op, OpWithShapes, Surroundings, Value, flatten, read_by, rebuild, values_on_tape

_NOTHING = nullcontext()  # entered when the user has no context manager around replays


class Work:
    """The steps that bring back some values."""

    __slots__ = ("crossing", "leaves", "steps")

    def __init__(self) -> None:
        # By number: operators to run, and values after a write, which take over the tensor of the value before the write.
        self.steps: dict[int, Op | Value] = {}
        self.leaves: list[Value] = []  # values whose tensors are kept
        self.crossing: list[Value] = []  # values that the outer frame brings back


class ReplayPlan:
    """The reads of a frame's values in a backward."""

    __slots__ = ("asked", "in_order", "readers", "written")

    def __init__(self) -> None:
        self.readers: dict[int, int] = {}  # the number of reads of each value, by operators and by backward
        self.asked: set[int] = set()  # numbers of wanted values in storages to which operators write
        self.written: set[int] = set()  # identities of storages to which operators write
        # Whether an operator overwrites a value after a read, so that all operators have to run in the order of recording.
        self.in_order = False


def _more(op: Op) -> list[Value]:
    """Returns the values that an operator reads in lists and keyword arguments."""
    args = op.args
    arguments = [*(args[position] for position in op.facts.lists if position < len(args)), *op.kwargs.values()]
    return [value for argument in arguments for value in values_on_tape(argument)]


def plan_for(
    roots: Iterable[Value], start: int, *, nested: bool, present: Collection[int] = (), ran: Collection[int] = ()
) -> tuple[ReplayPlan, Work]:
    """Returns the plan for some values and the work to bring them back, except ``present`` values and operators in ``ran``."""
    # Values up to number ``start`` belong to the outer frame. If there is an outer frame (``nested``), it also unpacks tensors
    # that hooks packed, so that the hooks run once. Each backward pays for this walk, so the count of a read is written out.
    plan, work = ReplayPlan(), Work()
    steps, readers = work.steps, plan.readers
    stack: list[Value] = []
    asked = list(roots)
    writes = False
    for value in asked:
        number = value.number
        if number in readers:
            readers[number] += 1
        else:
            readers[number] = 1
            stack.append(value)
    while stack:
        value = stack.pop()
        saved = value.saved
        if saved is not None:
            (work.crossing if nested and saved.is_packed else work.leaves).append(value)
            continue
        op, before = value.op, value.before
        assert op is not None
        # The outer frame brings back values after a write to a storage older than the region: its replay may hold views there.
        if (op.number if before is None else value.store.birth) <= start:
            work.crossing.append(value)
            continue
        if before is not None:
            steps[value.number] = value
            number = before.number
            if number in readers:
                readers[number] += 1
            else:
                readers[number] = 1
                if number not in present:
                    stack.append(before)
        if op.number in steps or op.number in ran:
            continue
        steps[op.number] = op
        facts, args = op.facts, op.args
        if facts.written:
            writes = True
        for position in op.present:
            value = args[position]
            number = value.number
            if number in readers:
                readers[number] += 1
            else:
                readers[number] = 1
                if number not in present:
                    stack.append(value)
        if facts.lists or op.kwargs:
            for value in _more(op):
                number = value.number
                if number in readers:
                    readers[number] += 1
                else:
                    readers[number] = 1
                    if number not in present:
                        stack.append(value)
    if writes and not ran:  # callers that pass ``ran`` drop the plan: the replay's first plan has looked at the writes
        _look_at_writes(plan, [step for step in steps.values() if isinstance(step, Op)], asked)
    return plan, work


def _read(op: Op) -> list[Value]:
    """Returns the values whose contents an operator reads: not the base of a view, nor the target of a write."""
    if op.facts.is_view or op.facts.is_inplace_view:
        return []
    if op.call is not None:
        return [op.args[position] for position in op.present]
    written = {written.position for written in op.facts.written}
    names = {written.name for written in op.facts.written}
    return [
        *(value for position, argument in enumerate(op.args) if position not in written for value in values_on_tape(argument)),
        *(value for name, argument in op.kwargs.items() if name not in names for value in values_on_tape(argument)),
    ]


def _look_at_writes(plan: ReplayPlan, ops: list[Op], asked: list[Value]) -> None:
    last: dict[int, int] = {}
    for op in ops:
        for written in op.facts.written:
            for value in values_on_tape(written.of(op.args, op.kwargs)):
                made_by = value.op
                if made_by is not None and made_by.facts.is_uninitialized and plan.readers[value.number] == 1:
                    continue  # memory made for this write only, in place of statistics that no result depends on
                last[id(value.store)] = max(op.number, last.get(id(value.store), 0))
    if not last:
        return
    plan.written = set(last)
    plan.asked = {value.number for value in asked if id(value.store) in last}
    reads = itertools.chain((asked,), map(_read, ops))
    plan.in_order = any(value.number < last.get(id(value.store), 0) for values in reads for value in values)


class Borrowing:
    """Splits a run into parts, and borrows the memory that a part reads from its owner, at most until the block ends."""

    __slots__ = ("_first", "_last", "_loans", "_steps")

    def __init__(
        self, steps: Mapping[int, Op | Value], tensors: Mapping[int, torch.Tensor], owners: Mapping[int, Owner]
    ) -> None:
        self._steps = sorted(steps.items())
        self._loans: dict[Owner, FilledMemory | None] = {}
        first: dict[Owner, int] = {}
        last: dict[Owner, int] = {}
        by_store: dict[int, Owner | None] = {}
        for number, op in self._steps:
            if type(op) is Value:
                continue
            assert isinstance(op, Op)
            for value in read_by(op):
                key = id(value.store)
                if key not in by_store:
                    tensor = tensors.get(value.number)
                    if tensor is None:  # made in this run: in new memory, or in memory that an earlier value has shown
                        continue
                    owner = owners.get(storage_of(tensor) or 0)
                    by_store[key] = owner if owner is not None and (is_freed(tensor) or is_lent(owner)) else None
                owner = by_store[key]
                if owner is not None:
                    first.setdefault(owner, number)
                    last[owner] = number
        self._first, self._last = _turned(first), _turned(last)

    def __enter__(self) -> Borrowing:
        return self

    def __exit__(self, *exc_info: object) -> None:
        while self._loans:
            self._give_back(next(iter(self._loans)))

    def parts(self) -> Iterator[dict[int, Op | Value]]:
        """Yields the steps in parts; the memory that a part reads is filled while the part runs."""
        part: dict[int, Op | Value] = {}
        for number, step in self._steps:
            if number in self._first:
                if part:
                    yield part
                    part = {}
                for owner in self._first[number]:
                    self._loans[owner] = borrow(owner)
            part[number] = step
            if number in self._last:
                yield part
                part = {}
                for owner in self._last[number]:
                    self._give_back(owner)
        if part:
            yield part

    def _give_back(self, owner: Owner) -> None:
        loan = self._loans.pop(owner)
        if loan is not None:
            give_back(owner, loan)


def _turned(numbers: Mapping[Owner, int]) -> dict[int, list[Owner]]:
    turned: dict[int, list[Owner]] = {}
    for owner, number in numbers.items():
        turned.setdefault(number, []).append(owner)
    return turned


#: Saved bytes up to which a region is replayed as a whole by default: saves 3 to 10% of a small block's step.
AT_ONCE = 1 << 20


class ReplayContext:
    """A context for replayed operators: below autograd, without frames, transforms, function modes or autocast."""

    # The user's dispatch modes see these operators; the package's do not.

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._current = frame.current
        self._tensors: Mapping[int, torch.Tensor] = {}

    def __enter__(self) -> ReplayContext:
        self._paused = pause_modes() if num_dispatch_modes() else None
        self._transforms = suspend_transforms() if is_mapped() or is_any_transform_active() else None
        self._casts = AUTOCAST.enter(None)
        self._modes = PastFunctionModes() if num_function_modes() else None
        if self._modes is not None:
            self._modes.__enter__()
        self._grad = torch.is_grad_enabled()
        self._undo: Any = None
        self._guard = BelowAutograd()
        self._guard.__enter__()
        self.operator_watch = None if self._frame.watch is None else watch_replay(self._frame)
        return self

    def under(self, surroundings: Surroundings, tensors: Mapping[int, torch.Tensor]) -> None:
        """Restores the surroundings of forward until the context ends."""
        self._tensors = tensors
        if surroundings.current is not self._current:
            self._move(surroundings.current)
        set_grad_enabled(surroundings.grad)
        undo = switches.enter(surroundings.switches)
        # The first undo that changed a switch has the switches from before the replay; later undos have an operator's switches.
        if self._undo is None or (undo[1] is not None and self._undo[1] is None):
            self._undo = undo

    def suspend(self) -> None:
        """Goes back above autograd, where custom functions run, without gradients, until :meth:`resume`."""
        self._guard.__exit__(None, None, None)
        if self._modes is not None:
            self._modes.__exit__(None, None, None)
        self._was_grad = torch.is_grad_enabled()
        set_grad_enabled(False)

    def resume(self) -> None:
        set_grad_enabled(self._was_grad)
        if self._modes is not None:
            self._modes = PastFunctionModes()
            self._modes.__enter__()
        self._guard = BelowAutograd()
        self._guard.__enter__()

    def _move(self, current: Current | None) -> None:
        """Makes the streams of ``current`` current; they wait for earlier operators, and may read the present tensors."""
        if current is not None and self._current is not None and current != self._current:
            self._current.move(current, self._tensors.values())
        self._current = current or self._current

    def __exit__(self, *exc_info: object) -> None:
        if self.operator_watch is not None:
            self.operator_watch.__exit__()
        self._move(self._frame.current)
        self._guard.__exit__(None, None, None)
        if self._undo is not None:
            switches.leave(self._undo)
        set_grad_enabled(self._grad)
        if self._modes is not None:
            self._modes.__exit__(None, None, None)
        AUTOCAST.leave(self._casts)
        if self._transforms is not None:
            resume_transforms(self._transforms)
        if self._paused is not None:
            resume_modes(self._paused)


class Replayable(Frame):
    """A recorded frame, as seen by its replays."""

    __slots__ = ("around_replays", "bytes", "lines", "outer", "start", "unseen", "whole")

    around_replays: AbstractContextManager[Any] | None  # the user's context manager around each replay
    bytes: int  # the size of all tensors saved in the frame
    lines: OperatorLines | None  # the lines of operators, in debug mode; else None
    outer: Replayable | None  # the recorded frame directly outside, on the same tape
    start: int  # the number of the latest value when the frame began
    # Boolean tensors on devices, each with the name of a custom function: whether it wrote unseen to an argument.
    unseen: list[tuple[torch.Tensor, str]]
    # Whether a replay brings back all tensors of the frame, or only the wanted tensor; None to decide by :attr:`bytes`.
    whole: bool | None

    @abc.abstractmethod
    def sources_of(self, replay: Replay, values: Iterable[Value]) -> list[tuple[Replay, Value]]:
        """Returns each of these values of the outer frame, with the replay that brings the value back."""


class Replay:
    """The tensors of a frame that a backward brings back."""

    def __init__(self, frame: Replayable, roots: Iterable[Value], key: int | None) -> None:
        if frame.unseen:
            _check_unseen(frame)
        self.frame = frame
        self.key = key  # of the backward or group of backwards that shares the replay; None if none shares it
        self.taken: set[int] = set()  # in a group of backwards, the indices of the used handles
        self.tensors: dict[int, torch.Tensor] = {}  # the present tensors, by the number of the value
        self._plan, work = plan_for(roots, frame.start, nested=frame.outer is not None)
        self.readers = self._plan.readers  # the number of remaining reads of each value
        self.crossing = [weakref.ref(value) for value in work.crossing]  # weak, so that values die with handles
        self.owners: dict[int, Owner] = {}  # owners of memory that may be freed between runs, by address of the storage
        whole = frame.bytes <= AT_ONCE if frame.whole is None else frame.whole
        self._whole: Work | None = work if whole or self._plan.in_order else None
        self._ran: set[int] = set()
        self.held: dict[int, torch.Tensor] = {}  # copies of wanted tensors made before a write, by the number of the value
        self._cloned: Clones = {}
        self._replaced: ReplacedGenerators = {}
        self.early: dict[int, torch.Tensor] = {}  # results of short draws made ahead of time, by the number of the operator

    def has(self, value: Value) -> bool:
        return value.number in self.tensors or value.number in self.held

    def expects(self, value: Value) -> bool:
        """Whether the replay has reads of a value left, and so has or will have its tensor."""
        return self.readers.get(value.number, 0) > 0

    def work(self, value: Value) -> Work:
        """Returns the work that brings back a value, for :meth:`run`."""
        whole, self._whole = self._whole, None
        if whole is not None:
            try:
                self._fetch(whole)
            except CheckpointError:  # from a kept tensor that the wanted value may not need: tries this value only
                if self._plan.in_order:  # all operators have to run, so each value needs all kept tensors
                    raise
            else:
                return whole
        frame = self.frame
        nested = frame.outer is not None
        return plan_for((value,), frame.start, nested=nested, present=self.tensors, ran=self._ran)[1]

    def take(self, value: Value) -> torch.Tensor:
        """Returns the tensor of a value, and drops it after the last read."""
        number, readers = value.number, self.readers
        tensor = self.held.get(number) if self.held else None
        if tensor is None:
            tensor = self.tensors[number]
        left = readers[number] - 1
        readers[number] = left
        if not left:
            self.tensors.pop(number, None)
            if self.held:
                self.held.pop(number, None)
        if self.frame.current is not None:
            self.frame.current.hand_out(tensor)
        return tensor

    def put(self, value: Value, tensor: torch.Tensor) -> None:
        """Enters the tensor of a value in the table, as a copy if an operator of the replay writes to the storage."""
        if id(value.store) in self._plan.written:
            tensor = copy_in(tensor, self._cloned)
        self.tensors[value.number] = tensor

    def _fetch(self, work: Work) -> None:
        tensors, written = self.tensors, self._plan.written
        for value in work.leaves:
            if value.number not in tensors:
                saved = value.saved
                assert saved is not None
                try:
                    tensor = self._refilled(value, saved) if type(saved) is HeldRefilled else saved.get()
                except MutationError as error:
                    if self.frame.lines is not None:
                        self.frame.lines.explain_replay(error, value, work.steps.values())
                    raise
                if written:
                    self.put(value, tensor)
                else:
                    tensors[value.number] = tensor
        work.leaves.clear()

    def _refilled(self, value: Value, saved: HeldRefilled) -> torch.Tensor:
        tensor = saved.unmodified()
        self.owners[storage_address(tensor)] = saved.owner
        return saved.get() if id(value.store) in self._plan.written else tensor

    def run(self, work: Work) -> None:
        """Runs work once the values of the outer frame are in the table."""
        self._fetch(work)
        if work.steps:
            run = self._run_on_loans if self.owners else self._run
            if self.frame.watch is None:
                run(work.steps)
            else:
                self.frame.observed(run, work.steps, in_order=self._plan.in_order)

    def _run_on_loans(self, steps: dict[int, Op | Value]) -> None:
        with Borrowing(steps, self.tensors, self.owners) as borrowing:
            steps.clear()
            for part in borrowing.parts():
                self._run(part)

    def _run(self, steps: dict[int, Op | Value]) -> None:
        surroundings: Surroundings | None = None
        tensors, readers = self.tensors, self.readers
        self._ran.update(steps)
        todo = [steps[number] for number in sorted(steps, reverse=True)]
        steps.clear()
        around = self.frame.around_replays
        with ReplayContext(self.frame) as context, _NOTHING if around is None else reusable(around):
            while todo:
                op = todo.pop()
                if type(op) is Value:
                    assert op.before is not None
                    tensors[op.number] = tensors[op.before.number]
                    self._let_go((op.before,))
                    continue
                assert isinstance(op, Op)
                # Operators in a row mostly share an object of surroundings, so only a change costs time.
                if op.surroundings is not surroundings:
                    surroundings = op.surroundings
                    context.under(surroundings, tensors)
                facts = op.facts
                if op.call is None:  # the lines below run other operators, which saves 8% of a small block's step
                    self._run_any(op, context)
                    continue
                args = op.args.copy()
                # The last reader takes the tensor out of the table: its memory is free when the operator returns.
                for position in op.present:
                    number = args[position].number
                    readers[number] = left = readers[number] - 1
                    args[position] = tensors[number] if left else tensors.pop(number)
                if op.draw is not None:
                    out = self._draw(op, args, op.kwargs)
                else:
                    out = op.call(*args, **op.kwargs) if op.kwargs else op.call(*args)
                number = op.number
                if facts.single:
                    if number in readers:
                        tensors[number] = out
                else:
                    for tensor in flatten(out):
                        if number in readers:
                            tensors[number] = tensor
                        number += 1
                    tensor = None
                del op, args, out  # free before the next operator runs

    def _let_go(self, values: Iterable[Value]) -> None:
        readers, tensors = self.readers, self.tensors
        for value in values:
            number = value.number
            left = readers[number] - 1
            readers[number] = left
            if not left:
                tensors.pop(number, None)

    def _run_any(self, op: Op, context: ReplayContext) -> None:
        facts, tensors = op.facts, self.tensors
        args = [rebuild(argument, tensors) for argument in op.args]
        kwargs = {name: rebuild(argument, tensors) for name, argument in op.kwargs.items()} if op.kwargs else {}
        values = read_by(op)
        # Operators such as ``squeeze_`` reshape the tensor itself, but the value before needs its shape: they get an alias.
        if facts.is_inplace_view:
            args[0] = args[0].detach()
        elif facts.written and self._plan.in_order:
            self._hold(facts, args, kwargs)
        draw = op.draw
        if facts.is_function:
            out = facts.rerun(args, draw, self.frame, context, self._replaced)
        elif draw is None:
            out = facts.call(*args, **kwargs)
        else:
            out = self._draw(op, args, kwargs)
        del args, kwargs
        if isinstance(op, OpWithShapes):
            check_shapes(self.frame, op, out)
        self._ran.add(op.number)
        self._let_go(values)
        for number, tensor in zip(facts.numbers(op.number), flatten(out)):  # noqa: B905 -- an operator's numbers are endless
            if number in self.readers:
                tensors[number] = tensor

    def _draw(self, op: Op, args: list[Any], kwargs: Any) -> Any:
        operator, draw = op.facts.operator, op.draw
        if draw is ANEW:
            return draw_anew(operator, args, kwargs, self._replaced)
        if type(draw) is not InSeries:
            return draw_again(operator, args, kwargs, draw)
        early = self.early.pop(op.number, None) if self.early else None
        return draw_again(operator, args, kwargs, draw, self._keep_early) if early is None else early

    def _keep_early(self, number: int, drawn: torch.Tensor) -> None:
        """Keeps the result of a draw made on the way to a later draw, if this replay needs it."""
        if self.readers.get(number) and number not in self._ran:
            self.early[number] = drawn

    def _hold(self, facts: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Copies wanted tensors that are about to be overwritten."""
        targets = [tensor for written in facts.written for tensor in outer_tensors_in(written.of(args, kwargs))]
        addresses = set(map(storage_address, targets))
        for number in self._plan.asked:
            tensor = self.tensors.get(number)
            if tensor is not None and number not in self.held and storage_address(tensor) in addresses:
                self.held[number] = stand_in_for(tensor)


def _check_unseen(frame: Replayable) -> None:
    """Raises if a custom function wrote unseen to an argument; waits for devices, once for a tape."""
    writers = [name for changed, name in frame.unseen if changed.item()]
    if not writers:
        frame.unseen.clear()
        return
    raise mutated(Why.WRITTEN_UNSEEN, format_path(frame.path), detail=writers[0])


def bring_back(replay: Replay, value: Value) -> None:
    """Brings back an absent value on the devices and streams on which the tape began."""
    mark = mark_thread()
    try:
        run_on(replay.frame.current, _bring_back, replay, value)
    except BaseException as error:
        rewind(mark, error)
        raise


def _bring_back(replay: Replay, value: Value) -> None:
    todo: list[tuple[Replay, Value | None, Work | None, list[tuple[Replay, Value]]]] = [(replay, value, None, [])]
    replays = {id(replay): replay}
    try:
        while todo:
            current, wanted, work, sources = todo.pop()
            if work is not None:
                for source, crossing in sources:
                    current.put(crossing, source.take(crossing))
                    current.owners.update(source.owners)
                current.run(work)
                continue
            assert wanted is not None
            if current.has(wanted):
                continue
            work = current.work(wanted)
            asked = [crossing for crossing in work.crossing if not current.has(crossing)]
            if not asked:
                current.run(work)
                continue
            sources = current.frame.sources_of(current, asked)
            replays.update((id(source), source) for source, _ in sources)
            todo.append((current, None, work, sources))
            todo += [(source, crossing, None, []) for source, crossing in sources]
    except BaseException:
        for broken in replays.values():  # values are missing there, so the next request makes new replays
            if broken.key is not None:
                broken.frame.passes.pop(broken.key, None)
        raise
