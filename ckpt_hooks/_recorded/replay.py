"""Replays of a tape: bring back values of one frame for one backward, each operator at most once (Rule 13).

A replay counts the readers of each value, and drops the value after the last reader. A small region is replayed as a whole when
backward asks for the first value, which is quicker. A larger region is replayed as far as the wanted value needs, which takes
less memory. A region may choose between the two. A region which overwrites a value after an operator read it is replayed as a
whole, in the order of recording.

A frame which reads values of the frame around asks that frame's replay, and so on outwards. This is a loop, not a recursion:
first each frame finds its needs of the next, then all run, from the outermost inwards.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ckpt_hooks._ambient.current import Made, run_on
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.hooks import mark_thread, rewind
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._operators.draws import OwnStreams, draw_again, draw_anew
from ckpt_hooks._tensors.containers import instances_in
from ckpt_hooks._tensors.copies import Clones, copy_in, stand_in_for
from ckpt_hooks._tensors.held_tensors import HeldRefilled
from ckpt_hooks._tensors.refilling import Owner
from ckpt_hooks._torch.tensors import storage_address
from ckpt_hooks.errors import CheckpointError, DeterminismError, MutationError

from .borrowing import Borrowing
from .debug_source_lines import Lines
from .other_shapes import check_shapes
from .schedule import Work, plan_for, work_for
from .surroundings import ReplayContext, Surroundings
from .values import ANEW, Op, Value, flatten, rebuild, values_on_tape

#: Bytes that a region saved up to which it is replayed as a whole, where it does not say: 3 to 10% of a small block's step.
AT_ONCE = 1 << 20


class Replayable(Frame):
    """A recorded frame, as seen by its replays."""

    __slots__ = ("bytes", "lines", "outer", "start", "unseen", "whole")

    bytes: int  # the size of all tensors saved in the frame
    lines: Lines | None  # the lines of operators, in debug mode; else None
    outer: Replayable | None  # the recorded frame directly around, on the same tape
    start: int  # the number of the latest value when the frame began
    # On devices: whether custom functions wrote unseen to what no replay can write to again, and their names.
    unseen: list[tuple[torch.Tensor, str]]
    # Whether a replay brings back all tensors of the frame, or only the wanted tensor; None to go by :attr:`bytes`.
    whole: bool | None

    @abc.abstractmethod
    def sources_of(self, replay: Replay, values: Iterable[Value]) -> list[tuple[Replay, Value]]:
        """Returns the replays which bring back values of the frame around."""


class Replay:
    """The tensors which one backward brings back of one frame."""

    def __init__(self, frame: Replayable, roots: Iterable[Value], key: int | None) -> None:
        """Makes a plan."""
        if frame.unseen:
            _check_unseen(frame)
        self.frame = frame  # the frame
        self.key = key  # the key of the replay's scope, None without a scope
        # Hands values to streams of devices; None where no accelerator was in use in forward.
        self.made = None if frame.current is None else Made(frame.current)
        self.taken: set[int] = set()  # in a group of backwards, the indices of the used handles
        self.tensors: dict[int, torch.Tensor] = {}  # the present tensors, by the number of the value
        self._plan, work = plan_for(roots, frame.start, nested=frame.outer is not None)
        self.readers = self._plan.readers  # the number of remaining reads of each value
        self.crossing = [weakref.ref(value) for value in work.crossing]  # the values read of the frame around, weakly
        # The owners of memory which may be freed between two runs, by address of the storage.
        self.owners: dict[int, Owner] = {}
        whole = frame.bytes <= AT_ONCE if frame.whole is None else frame.whole
        self._whole: Work | None = work if whole or self._plan.in_order else None
        self._ran: set[int] = set()
        # Copies of wanted tensors which were overwritten since, by the number of the value.
        self.held: dict[int, torch.Tensor] = {}
        self._cloned: Clones = {}
        self._streams: OwnStreams = {}

    def has(self, value: Value) -> bool:
        """Whether the tensor of a value is there."""
        return value.number in self.tensors or value.number in self.held

    def expects(self, value: Value) -> bool:
        """Whether the tensor of a value is there, or will be."""
        return self.readers.get(value.number, 0) > 0

    def work(self, value: Value) -> Work:
        """Returns the work, for :meth:`run`, which brings back a value."""
        whole, self._whole = self._whole, None
        if whole is not None:
            try:
                self._fetch(whole)
            except CheckpointError:  # something is not to be had any more, which need not be what is asked for
                if self._plan.in_order:
                    raise
            else:
                return whole
        frame = self.frame
        return work_for(value, frame.start, self.tensors, self._ran, nested=frame.outer is not None)

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
        if self.made is not None:
            self.made.hand_out(tensor)
        return tensor

    def put(self, value: Value, tensor: torch.Tensor) -> None:
        """Takes in a value from elsewhere, or its copy where an operator will write to the tensor."""
        if id(value.store) in self._plan.written:
            tensor = copy_in(tensor, self._cloned)
        self.tensors[value.number] = tensor

    def _fetch(self, work: Work) -> None:
        """Gets the kept tensors for some work."""
        for value in work.leaves:
            if value.number not in self.tensors:
                try:
                    self._fetch_one(value)
                except MutationError as error:
                    if self.frame.lines is not None:
                        self.frame.lines.explain_replay(error, value, work.steps.values())
                    raise
        work.leaves.clear()

    def _fetch_one(self, value: Value) -> None:
        saved = value.saved
        assert saved is not None
        if type(saved) is HeldRefilled:
            tensor = saved.unmodified()
            self.owners[storage_address(tensor)] = saved.owner
            if id(value.store) not in self._plan.written:
                self.tensors[value.number] = tensor
                return
        self.put(value, saved.get())

    def run(self, work: Work) -> None:
        """Does some work, once the values of the frame around are there."""
        if self.made is not None:
            self.made.renew()
        self._fetch(work)
        if work.steps:
            run = self._run_on_loans if self.owners else self._run
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
        with ReplayContext(self.frame) as context:
            while todo:
                op = todo.pop()
                if type(op) is Value:
                    self._after(op)
                    continue
                assert type(op) is Op
                # Operators in a row share one object, so most compare an identity and change nothing.
                if op.surroundings is not surroundings:
                    surroundings = op.surroundings
                    context.under(surroundings, tensors)
                facts = op.facts
                if not op.is_plain:  # what is written out below saves 8% of a small block's step
                    self._run_any(op, context)
                    continue
                args = op.args.copy()
                # The last reader takes the tensor out of the table: its memory is free when the operator returns.
                for position in op.present:
                    number = args[position].number
                    readers[number] = left = readers[number] - 1
                    args[position] = tensors[number] if left else tensors.pop(number)
                out = facts.call(*args, **op.kwargs) if op.kwargs else facts.call(*args)
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
                del op, args, out  # which may be large

    def _keep(self, numbers: Iterable[int], out: Any) -> None:
        readers, tensors = self.readers, self.tensors
        for number, tensor in zip(numbers, flatten(out)):  # noqa: B905 (of an operator, these count on)
            if number in readers:
                tensors[number] = tensor

    def _let_go(self, values: Iterable[Value]) -> None:
        readers, tensors = self.readers, self.tensors
        for value in values:
            number = value.number
            left = readers[number] - 1
            readers[number] = left
            if not left:
                tensors.pop(number, None)

    def _after(self, value: Value) -> None:
        assert value.before is not None
        self.tensors[value.number] = self.tensors[value.before.number]
        self._let_go((value.before,))

    def _run_any(self, op: Op, context: ReplayContext) -> None:
        facts, tensors = op.facts, self.tensors
        args = [rebuild(argument, tensors) for argument in op.args]
        kwargs = {name: rebuild(argument, tensors) for name, argument in op.kwargs.items()} if op.kwargs else {}
        values = [value for argument in (*op.args, *op.kwargs.values()) for value in values_on_tape(argument)]
        # ``squeeze_`` and the like change the tensor object itself, which earlier readers of the value have as it was.
        if facts.is_inplace_view:
            args[0] = args[0].detach()
        elif facts.written and self._plan.in_order:
            self._hold(facts, args, kwargs)
        draw = op.draw
        if facts.is_function:
            out = facts.rerun(args, draw, self.frame, context, self._streams)
        elif draw is None:
            out = facts.call(*args, **kwargs)
        elif draw is ANEW:
            out = draw_anew(facts.operator, args, kwargs, self._streams)
        else:
            out = draw_again(facts.operator, args, kwargs, draw)
        del args, kwargs
        if facts.has_shape_from_data:
            self._check_shapes(op, out)
        self._ran.add(op.number)
        self._let_go(values)
        self._keep(facts.numbers(op.number), out)

    def _check_shapes(self, op: Op, out: Any) -> None:
        try:
            check_shapes(self.frame, op, out)
        except DeterminismError as error:
            if self.frame.lines is not None:
                self.frame.lines.explain_operator(error, op.number)
            raise

    def _hold(self, facts: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Copies wanted tensors which are about to be overwritten."""
        targets = [tensor for written in facts.written for tensor in instances_in(written.of(args, kwargs), torch.Tensor)]
        addresses = set(map(storage_address, targets))
        for number in self._plan.asked:
            tensor = self.tensors.get(number)
            if tensor is not None and number not in self.held and storage_address(tensor) in addresses:
                self.held[number] = stand_in_for(tensor)


def _check_unseen(frame: Replayable) -> None:
    """Raises if a custom function wrote unseen to memory from before the region; waits for the devices, once a tape."""
    writers = [name for changed, name in frame.unseen if changed.item()]
    if not writers:
        frame.unseen.clear()
        return
    raise mutated(Why.WRITTEN_UNSEEN, format_path(frame.path), detail=writers[0])


def bring_back(replay: Replay, value: Value) -> None:
    """Brings back an expected, absent value, on the devices and streams on which the tape began."""
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
        for broken in replays.values():  # of which some values are gone: whoever asks again gets new ones
            if broken.key is not None:
                broken.frame.passes.pop(broken.key, None)
        raise
