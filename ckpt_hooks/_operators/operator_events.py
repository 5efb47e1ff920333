"""The dispatch modes which tell observers of operators, for observers which ask for operators."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from typing_extensions import Self

from ckpt_hooks._core.call_sites import site_of
from ckpt_hooks._core.event_sender import OperatorRun
from ckpt_hooks._core.events import Observer, Region, TensorInfo
from ckpt_hooks._core.frame import Frame, is_recomputing, stack
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes, is_compiled_code_running
from ckpt_hooks._core.order import Position
from ckpt_hooks._core.settings import observe
from ckpt_hooks._torch.autograd import graph_task_id, is_in_two_backwards, queue_callback
from ckpt_hooks._torch.tensors import is_kept_anyway

from .facts import Kind, OpFacts, facts_of, same_operator

__all__ = ["OperatorCount", "OperatorWatch", "observe_all", "wants_operators", "watch_forward", "watch_replay"]


class OperatorWatch(QuietDispatchMode):
    """Tells observers of the operators of a region and of regions inside: the observers of the innermost region.

    Attributes:
        is_in_function: Whether a replay runs a custom function.
    """

    def __init__(self, replayed: Frame | None = None, *, is_after_others: bool = False) -> None:
        super().__init__()
        self._replayed, self._is_after_others = replayed, is_after_others
        self._expected: list[tuple[OpFacts, int]] = []
        self.is_in_function = False

    def _recreate_cm(self) -> OperatorWatch:
        """Returns another mode, for a rerun inside a rerun: the outer mode is paused meanwhile."""
        return OperatorWatch(self._replayed, is_after_others=self._is_after_others)

    def expect(self, operators: Iterable[tuple[OpFacts, int]]) -> None:
        """Takes the operators of a replay and their numbers on the tape, the last to run first."""
        self._expected = list(operators)

    def _number_of(self, func: Any) -> int | None:
        """Returns the number on the tape of an operator which runs in a replay; None inside of a custom function."""
        if self.is_in_function:
            return None
        expected = self._expected
        while expected and expected[-1][0].is_function:
            expected.pop()
        for at in reversed(range(max(0, len(expected) - 2), len(expected))):  # one may run as another operator
            facts, number = expected[at]
            if same_operator(facts.operator, func):
                del expected[at:]
                return number
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts, replayed = facts_of(func), self._replayed
        frame = replayed or stack.innermost
        watch = None if frame is None or self.paused or facts.kind is Kind.IGNORED else frame.watch
        if frame is None or watch is None or facts.kind is Kind.RANGE:
            output = func(*args, **kwargs) if kwargs else func(*args)
            count_writes(func, args)
            if facts.kind is Kind.RANGE:
                self.note_range(func, args)
            return output
        if replayed is not None:
            number = self._number_of(func)
            output, run = _run(func, facts, args, kwargs, is_timed=watch.wants_durations)
            watch.ran(run._replace(in_recompute=True), watch.order.note_again(number))
            return output
        number = frame.num_values()
        output, run = _run(func, facts, args, kwargs, is_timed=watch.wants_durations)
        run = run._replace(site=site_of(sys._getframe(1)), in_recompute=is_recomputing())
        is_loose, is_found = run.is_loose, self._is_after_others
        watch.ran(run, watch.order.note(run.name, run.asked_in, number, is_loose=is_loose, is_found=is_found))
        return output


class OperatorCount(QuietDispatchMode):
    """Counts the operators of a rerun, those whose output was kept included: comes before the mode which hands out outputs."""

    def _recreate_cm(self) -> OperatorCount:
        """Returns another mode; see :class:`OperatorWatch`."""
        return OperatorCount()

    def __enter__(self) -> Self:
        if (frame := stack.innermost) is not None and frame.watch is not None:
            frame.watch.order.start_again()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts, frame = facts_of(func), stack.innermost
        if facts.kind is Kind.RANGE:
            self.note_range(func, args)
        elif facts.kind is not Kind.IGNORED and not self.paused and frame is not None and frame.watch is not None:
            frame.watch.order.find(facts.full_name, is_loose=_is_loose(facts, args))
        output = func(*args, **kwargs) if kwargs else func(*args)
        count_writes(func, args)
        return output


def _is_loose(facts: OpFacts, args: Any) -> bool:
    """Whether another run of the same program may have an operator or not: autograd makes some views, autocast keeps casts."""
    return facts.kind is Kind.VIEW or (facts.kind is Kind.CAST and is_kept_anyway(args[0]))


def _run(func: Any, facts: OpFacts, args: Any, kwargs: Any, *, is_timed: bool) -> tuple[Any, OperatorRun]:
    """Runs an operator; returns its result, and what there is to tell of the run."""
    kwargs = kwargs or {}
    is_loose = _is_loose(facts, args)
    begun = time.perf_counter() if is_timed else 0.0
    output = func(*args, **kwargs) if kwargs else func(*args)
    seconds = time.perf_counter() - begun if is_timed else None
    count_writes(func, args)
    inputs = _tensors_in((args, kwargs))
    is_asked_about = facts.is_asked_about and not is_loose and not is_compiled_code_running()
    return output, OperatorRun(
        name=facts.full_name,
        inputs=inputs,
        outputs=_tensors_in(output),
        written=_tensors_in(facts.written_in(args, kwargs)),
        asked_in=graph_task_id() if is_asked_about else None,
        is_loose=is_loose,
        is_view=facts.is_view or facts.is_never_kept,
        reads_shape_only=(facts.is_like or facts.is_uninitialized) and bool(inputs),
        site=None,
        in_recompute=False,
        seconds=seconds,
    )


class _Backwards(Observer):
    """Tells one observer of the begin and end of each outermost backward."""

    wants_operators = True

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._present: weakref.ref[partial[None]] | None = None
        self._ended = -1

    def look(self) -> None:
        """Tells of a begin where this is the first look in an outermost backward."""
        task = graph_task_id()
        if task in (-1, self._ended):  # of callbacks that come after the end, too
            return
        # The graph task alone holds the callback, and drops it on failure. So a backward is over when its callback is gone.
        if (self._present is not None and self._present() is not None) or is_in_two_backwards():
            return
        end = partial(self._end, task)
        self._present = weakref.ref(end)
        queue_callback(end)
        self._observer.backward_began()

    def _end(self, task: int) -> None:
        self._present, self._ended = None, task
        self._observer.backward_ended()

    def recomputing(self, region: Region, *, in_order: bool) -> None:
        """A region brings back tensors, in backward mostly."""
        self.look()

    def restored(self, region: Region, position: int, tensor: TensorInfo) -> None:
        """Autograd takes a tensor, in backward mostly."""
        self.look()


class _OutsideWatch(QuietDispatchMode):
    """Tells one observer of operators outside of regions, those of backward included."""

    def __init__(self, observer: Observer, backwards: _Backwards) -> None:
        super().__init__()
        self._observer, self._backwards = observer, backwards
        self._num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = facts_of(func)
        if facts.kind is Kind.RANGE:
            self.note_range(func, args)
        is_told = not (self.paused or facts.kind in (Kind.IGNORED, Kind.RANGE))
        if is_told:
            self._backwards.look()
        if not is_told or stack.innermost is not None:
            output = func(*args, **kwargs) if kwargs else func(*args)
            count_writes(func, args)
            return output
        output, run = _run(func, facts, args, kwargs, is_timed=self._observer.wants_durations)
        place, self._num_operators = self._num_operators, self._num_operators + 1
        run = run._replace(site=site_of(sys._getframe(1)))
        self._observer.ran(None, run.event(Position(place, None, None), (self._observer,)))
        return output


@contextlib.contextmanager
def observe_all(observer: Observer) -> Iterator[None]:
    """Makes an observer watch regions, and the operators outside of these, on this thread.

    Operators run under a dispatch mode, as in a region whose observer wants operators. Of two observers, each has a mode of
    its own. The observer hears of all operators, whether it says :attr:`Observer.wants_operators` or not, and of the begin and
    end of backward. Backwards of several threads at once are told as one.
    """
    backwards = _Backwards(observer)
    with observe(backwards), observe(observer), _OutsideWatch(observer, backwards):
        yield


def wants_operators(frame: Frame | None) -> bool:
    """Whether an observer of a frame wants to hear of operators."""
    return frame is not None and frame.watch is not None and frame.watch.wants_operators


def watch_forward(frame: Frame) -> OperatorWatch | None:
    """Returns the entered mode for a forward; None if no observer wants it, or the frame around has such a mode."""
    return OperatorWatch().__enter__() if wants_operators(frame) and not wants_operators(frame.parent) else None


def watch_replay(frame: Frame) -> OperatorWatch | None:
    """Returns the entered mode for a replay; None if no observer wants it."""
    return OperatorWatch(frame).__enter__() if wants_operators(frame) else None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]
