"""The dispatch modes which tell observers of operators, for observers which ask for operators."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from ckpt_hooks._core.call_sites import site_of
from ckpt_hooks._core.events import Operator, info_of
from ckpt_hooks._core.frame import Frame, is_recomputing, stack
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes, is_compiled_code_running
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.tensors import is_kept_anyway

from .facts import Kind, facts_of


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
        kwargs, observers = kwargs or {}, watch.observers
        is_again = self._replayed is not None or is_recomputing()
        is_cast_again = facts.kind is Kind.CAST and is_kept_anyway(args[0])  # of a parameter: autocast keeps it for a while
        begun = time.perf_counter()
        output = func(*args, **kwargs) if kwargs else func(*args)
        seconds = time.perf_counter() - begun if any(observer.wants_durations for observer in observers) else None
        count_writes(func, args)
        inputs = _tensors_in((args, kwargs))
        written = set(map(id, _tensors_in(facts.written_in(args, kwargs))))
        is_asked_in_task = not is_again and graph_task_id() == watch.task
        ran = Operator(
            name=facts.full_name,
            inputs=tuple(info_of(tensor, observers) for tensor in inputs),
            outputs=tuple(info_of(tensor, observers) for tensor in _tensors_in(output)),
            site=None if self._replayed is not None else site_of(sys._getframe(1)),
            in_recompute=is_again,
            is_asked_about=facts.is_asked_about and is_asked_in_task and not (is_cast_again or is_compiled_code_running()),
            is_view=facts.is_view or facts.is_never_kept,
            writes=tuple(position for position, tensor in enumerate(inputs) if id(tensor) in written),
            reads_shape_only=(facts.is_like or facts.is_uninitialized) and bool(inputs),
            seconds=seconds,
        )
        watch.tell("ran", ran)
        return output


def wants_operators(frame: Frame | None) -> bool:
    return frame is not None and frame.watch is not None and frame.watch.wants_operators


def watch_forward(frame: Frame) -> OperatorWatch | None:
    """Returns the entered mode; None if no observer wants it, or the frame around has such a mode."""
    return OperatorWatch().__enter__() if wants_operators(frame) and not wants_operators(frame.parent) else None


def watch_replay(frame: Frame) -> OperatorWatch | None:
    return OperatorWatch(frame).__enter__() if wants_operators(frame) else None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]
