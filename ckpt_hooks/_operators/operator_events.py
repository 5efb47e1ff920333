"""The dispatch modes which tell observers of operators, for observers which ask for operators."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from ckpt_hooks._core.call_sites import site_of
from ckpt_hooks._core.events import Observer, Operator, Region, TensorInfo, info_of
from ckpt_hooks._core.frame import Frame, is_recomputing, stack
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes, is_compiled_code_running
from ckpt_hooks._core.settings import observe
from ckpt_hooks._torch.autograd import graph_task_id, is_in_two_backwards, queue_callback
from ckpt_hooks._torch.tensors import is_kept_anyway

from .facts import Kind, OpFacts, facts_of


class OperatorWatch(QuietDispatchMode):
    """Tells observers of the operators of a region and of regions inside: the observers of the innermost region."""

    def __init__(self, replayed: Frame | None = None) -> None:
        super().__init__()
        self._replayed = replayed

    def _recreate_cm(self) -> OperatorWatch:
        # For a rerun inside a rerun: the outer mode is paused meanwhile.
        return OperatorWatch(self._replayed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts, frame = facts_of(func), self._replayed or stack.innermost
        is_told = not (self.paused or facts.kind is Kind.IGNORED or facts.kind is Kind.RANGE)
        watch = frame.watch if frame is not None and is_told else None
        if watch is None:
            output = func(*args, **kwargs) if kwargs else func(*args)
            count_writes(func, args)
            if facts.kind is Kind.RANGE:
                self.note_range(func, args)
            return output
        site = None if self._replayed is not None else site_of(sys._getframe(1))
        again = self._replayed is not None or is_recomputing()
        task = None if again else watch.task
        output, operator = _run(func, facts, args, kwargs, watch.observers, site=site, in_recompute=again, task=task)
        watch.ran(operator)
        return output


def _run(
    func: Any,
    facts: OpFacts,
    args: Any,
    kwargs: Any,
    observers: tuple[Observer, ...],
    *,
    site: str | None,
    in_recompute: bool,
    task: int | None,  # in which policies are asked; None where they are not
) -> tuple[Any, Operator]:
    """Runs an operator; returns its result and its event."""
    kwargs = kwargs or {}
    is_cast_again = facts.kind is Kind.CAST and is_kept_anyway(args[0])  # of a parameter: autocast keeps it for a while
    begun = time.perf_counter()
    output = func(*args, **kwargs) if kwargs else func(*args)
    seconds = time.perf_counter() - begun if any(observer.wants_durations for observer in observers) else None
    count_writes(func, args)
    inputs = _tensors_in((args, kwargs))
    written = set(map(id, _tensors_in(facts.written_in(args, kwargs))))
    is_asked_about = facts.is_asked_about and graph_task_id() == task and not (is_cast_again or is_compiled_code_running())
    return output, Operator(
        name=facts.full_name,
        inputs=tuple(info_of(tensor, observers) for tensor in inputs),
        outputs=tuple(info_of(tensor, observers) for tensor in _tensors_in(output)),
        site=site,
        in_recompute=in_recompute,
        is_asked_about=is_asked_about,
        is_view=facts.is_view or facts.is_never_kept,
        writes=tuple(position for position, tensor in enumerate(inputs) if id(tensor) in written),
        reads_shape_only=(facts.is_like or facts.is_uninitialized) and bool(inputs),
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
        self.look()

    def restored(self, region: Region, position: int, tensor: TensorInfo) -> None:
        self.look()


class _OutsideWatch(QuietDispatchMode):
    """Tells one observer of operators outside of regions, those of backward included."""

    def __init__(self, observer: Observer, backwards: _Backwards) -> None:
        super().__init__()
        self._observer, self._backwards = observer, backwards

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
        site, observers = site_of(sys._getframe(1)), (self._observer,)
        output, operator = _run(func, facts, args, kwargs, observers, site=site, in_recompute=False, task=None)
        self._observer.ran(None, operator)
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
    return frame is not None and frame.watch is not None and frame.watch.wants_operators


def watch_forward(frame: Frame) -> OperatorWatch | None:
    """Returns the entered mode; None if no observer wants it, or the frame around has such a mode."""
    return OperatorWatch().__enter__() if wants_operators(frame) and not wants_operators(frame.parent) else None


def watch_replay(frame: Frame) -> OperatorWatch | None:
    return OperatorWatch(frame).__enter__() if wants_operators(frame) else None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]
