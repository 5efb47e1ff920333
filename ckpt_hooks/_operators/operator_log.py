"""A log of operators: names, kinds of arguments and lines, noted cheaply, and put into words only for errors.

An operator of a small tensor takes a microsecond. So the log notes sizes and lines as they are, and keeps neither tensors nor
frames of Python.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckpt_hooks._core.call_sites import CallSite, call_site_of, place_in_words
from ckpt_hooks._core.descriptions import kind_in_words
from ckpt_hooks._core.events import Operator, info_of
from ckpt_hooks._core.frame import Frame, is_recomputing, stack
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes, is_compiled_code_running
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.pytree import tree_iter
from ckpt_hooks._torch.tensors import is_kept_anyway

from .draws import device_of, drops_nothing
from .facts import KNOWN, OpKind, facts_of

_IGNORED, _RANGE, _WRITES = OpKind.IGNORED, OpKind.RANGE, OpKind.WRITES
_TENSOR = torch.Tensor

#: Classes of arguments that are noted as they are.
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)

#: Seconds of the processor on this thread, to which other programs do not add; seconds of the clock if that timer is too coarse
#: (Windows: 16 ms).
thread_seconds = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-5 else time.perf_counter

#: Stands for the result of an operator which has not returned.
_NOTHING = object()


class Entry:
    __slots__ = ("args", "grad", "kwargs", "mark", "operator", "output", "place")

    operator: Any
    # Kinds of arguments and result: a tuple (dtype, shape, device) for a tensor, a list for several values, a number or the
    # like as it is, the class of anything else.
    args: list[Any]
    kwargs: dict[str, Any]
    output: Any
    grad: bool  # whether a tensor among the positional arguments requires grad
    mark: int  # the result of the log's ``count`` when the operator began
    place: CallSite

    def kinds(self) -> tuple[Any, Any, Any]:
        return self.args, self.kwargs, self.output

    def in_words(self) -> str:
        words = [*map(_in_words, self.args), *(f"{name}={_in_words(value)}" for name, value in self.kwargs.items())]
        output = "" if self.output is _NOTHING else f" -> {_in_words(self.output)}"
        return f"{self.operator}({', '.join(words)}){output}"

    def site(self) -> str:
        """Returns the line of the call, as in ``"model.py:12"``."""
        code, line = self.place[:2]
        return "" if code is None else f"{os.path.basename(code.co_filename)}:{line}"

    def line(self, names: Mapping[int, str]) -> str:
        return place_in_words(self.place, names)


class OperatorLog(QuietDispatchMode):
    """A dispatch mode which notes each operator of a run of a region, inner regions included."""

    # A backward in the middle of the run is not the region's forward: its operators are left out. A log with ``count`` has them
    # too, since a tape records them.

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        # ``count`` is called as each operator begins, for ``Entry.mark``; it must not keep a frame alive.
        super().__init__()
        self.entries: list[Entry] = []
        self.error: type[BaseException] | None = None  # the error that ended the run
        self._count = count
        self._task = graph_task_id()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._count = None
        self.error = exc_info[0] if exc_info else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = KNOWN.get(id(func)) or facts_of(func)
        kind = facts.kind
        if kind is _IGNORED or kind is _RANGE or self.paused or (self._count is None and graph_task_id() != self._task):
            output = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
            if kind is _RANGE:
                self.note_range(func, args)
            elif kind is _WRITES:
                count_writes(func, args)
            return output
        entry = Entry()  # each attribute by itself: quicker than an ``__init__``
        entry.operator = func
        kinds, grad = [], False
        for value in args:
            if type(value) is _TENSOR and not value.is_nested:
                grad = grad or value.requires_grad
                kinds.append((value.dtype, value.shape, value.device))
            else:
                kinds.append(value if type(value) in _PLAIN else _kind_of(value))
                grad = grad or (isinstance(value, _TENSOR) and value.requires_grad)
        entry.args, entry.grad = kinds, grad
        entry.kwargs = {name: _kind_of(value) for name, value in kwargs.items()} if kwargs else {}
        entry.place = call_site_of(sys._getframe(1))
        entry.mark = 0 if self._count is None else self._count()
        entry.output = _NOTHING
        self.entries.append(entry)
        output = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        if kind is _WRITES:
            count_writes(func, args)
        entry.output = _kind_of(output)
        return output


def _kind_of(value: Any) -> Any:
    if isinstance(value, _TENSOR):
        nested = value.is_nested and value.layout is torch.strided
        return value.dtype, None if nested else value.shape, value.device
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return list(map(_kind_of, value))
    return type(value)


def _in_words(kind: Any) -> str:
    if type(kind) is tuple:
        dtype, shape, device = kind
        return f"{kind_in_words((dtype, shape))} on {device}"
    if type(kind) is list:
        return _listed(kind)
    if isinstance(kind, type):
        return f"a {kind.__name__}"
    return str(kind)


def _listed(kinds: Iterable[Any]) -> str:
    return f"[{', '.join(map(_in_words, kinds))}]"


class OperatorWatch(QuietDispatchMode):
    """Tells observers of each operator in a region and its inner regions: the observers of the innermost region hear of it."""

    def __init__(self, replayed: Frame | None = None) -> None:
        super().__init__()
        self._replayed = replayed

    def _recreate_cm(self) -> OperatorWatch:
        # Called by ``_core.modes.reusable``: a rerun inside a rerun needs another mode, since the outer mode is paused.
        return OperatorWatch(self._replayed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts, frame = facts_of(func), self._replayed or stack.innermost
        is_told = not (self.paused or facts.kind is OpKind.IGNORED or facts.kind is OpKind.RANGE)
        watch = frame.watch if frame is not None and is_told else None
        if watch is None:
            output = func(*args, **kwargs) if kwargs else func(*args)
            count_writes(func, args)
            if facts.kind is OpKind.RANGE:
                self.note_range(func, args)
            return output
        kwargs, observers = kwargs or {}, watch.observers
        is_again = self._replayed is not None or is_recomputing()
        is_cast_again = facts.kind is OpKind.CAST and is_kept_anyway(args[0])  # autocast caches casts of parameters
        arguments = facts.arguments_of(args)
        begun = thread_seconds()
        output = func(*args, **kwargs) if kwargs else func(*args)
        seconds = thread_seconds() - begun if any(observer.wants_durations for observer in observers) else None
        count_writes(func, args)
        inputs = _tensors_in((arguments, kwargs))
        written = set(map(id, _tensors_in(facts.written_in(arguments, kwargs))))
        is_compiled = is_compiled_code_running() and not facts.is_compiled
        is_asked_in_task = not is_again and graph_task_id() == watch.task
        ran = Operator(
            name=facts.full_name,
            inputs=tuple(info_of(tensor, observers) for tensor in inputs),
            outputs=tuple(info_of(tensor, observers) for tensor in _tensors_in(output)),
            in_recompute=is_again,
            is_asked_about=facts.is_asked_about and is_asked_in_task and not (is_cast_again or is_compiled),
            is_view=facts.is_view or facts.is_never_kept,
            writes=tuple(position for position, tensor in enumerate(inputs) if id(tensor) in written),
            reads_shape_only=(facts.is_like or facts.is_uninitialized) and bool(inputs),
            draws_on_host=facts.draws and device_of(args, kwargs).type == "cpu" and not drops_nothing(func, args, kwargs),
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
