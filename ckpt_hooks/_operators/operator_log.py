"""A log of operators: names, kinds of arguments and lines, noted cheaply, in words for errors alone.

An operator of a small tensor takes a microsecond. So the log notes sizes and lines as they are, and keeps neither tensors nor
frames of Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckpt_hooks._core.call_sites import Place, place_in_words, place_of
from ckpt_hooks._core.descriptions import kind_in_words
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._torch.autograd import graph_task_id

from .facts import KNOWN, Kind, facts_of

_IGNORED, _RANGE, _WRITES = Kind.IGNORED, Kind.RANGE, Kind.WRITES
_Tensor = torch.Tensor

#: Arguments noted as they are.
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)

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
    mark: int  # what the log counted when the operator began
    place: Place

    def kinds(self) -> tuple[Any, Any, Any]:
        return self.args, self.kwargs, self.output

    def in_words(self) -> str:
        words = [*map(_in_words, self.args), *(f"{name}={_in_words(value)}" for name, value in self.kwargs.items())]
        output = "" if self.output is _NOTHING else f" -> {_in_words(self.output)}"
        return f"{self.operator}({', '.join(words)}){output}"

    def site(self) -> str:
        """As in ``"model.py:12"``."""
        code, line = self.place[:2]
        return "" if code is None else f"{os.path.basename(code.co_filename)}:{line}"

    def line(self, names: Mapping[int, str]) -> str:
        return place_in_words(self.place, names)


class OperatorLog(QuietDispatchMode):
    """A dispatch mode which notes each operator of one run of a region, inner regions included."""

    # Operators of a backward in the middle of the run are left out, but by a log which counts.

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        # ``count`` is called as each operator begins, for ``Entry.mark``; it must not keep a frame alive.
        super().__init__()
        self.entries: list[Entry] = []
        self.error: type[BaseException] | None = None  # which ended the run
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
        entry = Entry()  # attributes one by one: quicker than an ``__init__``
        entry.operator = func
        noted, grad = [], False
        for value in args:
            if type(value) is _Tensor and not value.is_nested:
                grad = grad or value.requires_grad
                noted.append((value.dtype, value.shape, value.device))
            else:
                noted.append(value if type(value) in _PLAIN else _kind_of(value))
                grad = grad or (isinstance(value, _Tensor) and value.requires_grad)
        entry.args, entry.grad = noted, grad
        entry.kwargs = {name: _kind_of(value) for name, value in kwargs.items()} if kwargs else {}
        entry.place = place_of(sys._getframe(1))
        entry.mark = 0 if self._count is None else self._count()
        entry.output = _NOTHING
        self.entries.append(entry)
        output = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        if kind is _WRITES:
            count_writes(func, args)
        entry.output = _kind_of(output)
        return output


def _kind_of(value: Any) -> Any:
    if isinstance(value, _Tensor):
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
