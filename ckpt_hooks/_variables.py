"""Variables of functions, closed over or global: noted when forward begins, and lent to a rerun as forward found them.

``for l in layers: h = checkpoint(lambda y: l(y), h)`` binds ``l`` anew for each layer, and each of the functions reads the one
variable ``l``. So a rerun gets the content that its forward found, for as long as it runs, and afterwards the variable is what
it was: bound again by the caller, by the function itself (``nonlocal count``), or by a stopped rerun.

The variable itself is lent. A copy of the function with variables of its own would be out of step with everything else that
shares them: a hook of a module that binds a closed-over variable, a helper that reads the same global, a function that an
object holds.

A tensor with a history is held without it. With it, ``last = checkpoint(lambda y: f(y, last.detach()), x)`` would keep the
graph of every forward before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import torch

from ._dispatch import unseen
from ._reach import NOTHING, Reached, names_of
from ._refit import as_kind

__all__ = ["Loan", "variables_of"]

#: The content of a variable that is not assigned.
_ABSENT = object()
_ALWAYS_ABSENT = repeat(_ABSENT)


@unseen
def _alias_of(tensor: torch.Tensor) -> torch.Tensor:
    return as_kind(tensor.detach(), type(tensor))


class _Upstream:
    """Stands for a tensor with a history: the tensor itself as long as it is there, then a leaf on the same memory."""

    __slots__ = ("_alias", "_reference")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._alias = weakref.ref(tensor), _alias_of(tensor)

    def is_content(self, value: Any) -> bool:
        """Whether a variable with this value has the content that was noted."""
        return value is self._reference()

    def content(self) -> Any:
        """Returns a content that is as good as the one noted."""
        tensor = self._reference()
        return _alias_of(self._alias).requires_grad_() if tensor is None else tensor


class _Tuple:
    """Stands for a tuple with such tensors."""

    __slots__ = ("_entries",)

    def __init__(self, entries: tuple[Any, ...]) -> None:
        self._entries = entries

    def is_content(self, value: Any) -> bool:
        """Whether a variable with this value has the content that was noted."""
        return type(value) is tuple and len(value) == len(self._entries) and all(map(_is_content, self._entries, value))

    def content(self) -> Any:
        """Returns a content that is as good as the one noted."""
        return tuple(map(_content, self._entries))


def _noted(value: Any) -> Any:
    """Returns what stands for a content: itself, but for tensors with a history and tuples of these."""
    if isinstance(value, torch.Tensor):
        return _Upstream(value) if value.requires_grad and not value.is_leaf else value
    if type(value) is tuple:
        entries = tuple(map(_noted, value))
        return value if all(map(is_, entries, value)) else _Tuple(entries)
    return value


def _is_content(noted: Any, value: Any) -> bool:
    return noted is value or (type(noted) in (_Upstream, _Tuple) and noted.is_content(value))


def _content(noted: Any) -> Any:
    return noted.content() if type(noted) in (_Upstream, _Tuple) else noted


#: The variables of one function: cells; a namespace and names in it; and what stands for the contents when forward began.
_Entry = tuple[tuple[CellType, ...], dict[str, Any], tuple[str, ...], tuple[Any, ...]]
_NO_CELLS: tuple[CellType, ...] = ()

#: Types of contents that stand for themselves.
_PLAIN = frozenset({type(None), bool, int, float, str, type, ModuleType, FunctionType, BuiltinFunctionType, object})


def variables_of(function: Any, reached: Reached) -> list[_Entry] | None:
    """Notes the variables of functions, None if there are none.

    Functions of torch and of this package are left out: what they keep in variables (of a compiler, say) is theirs.

    Args:
        function: What a region calls.
        reached: What that reaches.
    """
    entries: list[_Entry] = []
    for one in (function,) if reached is NOTHING else reached.functions:
        if type(one) is FunctionType:
            cells, (names, is_library) = one.__closure__ or _NO_CELLS, names_of(one)
            if (cells or names) and not is_library:
                contents = _read(cells, one.__globals__, names)
                if not _PLAIN.issuperset(map(type, contents)):
                    contents = tuple(map(_noted, contents))
                entries.append((cells, one.__globals__, names, contents))
    return entries or None


def _read(cells: tuple[CellType, ...], namespace: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    found = tuple(map(namespace.get, names, _ALWAYS_ABSENT))
    return (*map(_content_of, cells), *found) if cells else found


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _write(entry: _Entry, contents: Sequence[Any], now: Sequence[Any]) -> None:
    """Changes the contents of those variables whose content now is another one."""
    cells, namespace, names, _ = entry
    for cell, content, old in zip(cells, contents, now, strict=False):
        if content is _ABSENT and old is not _ABSENT:
            del cell.cell_contents
        elif content is not old:
            cell.cell_contents = content
    skipped = len(cells)
    for name, content, old in zip(names, contents[skipped:], now[skipped:], strict=True):
        if content is _ABSENT and old is not _ABSENT:
            namespace.pop(name, None)
        elif content is not old:
            namespace[name] = content


def _places(entry: _Entry) -> list[Any]:
    """Returns something for each variable that is equal where the variable is the same."""
    cells, namespace, names, _ = entry
    return [*map(id, cells), *((id(namespace), name) for name in names)]


class Loan:
    """Variables that a rerun finds as forward found them.

    Of two reruns on different threads that share a variable, and want different contents of it, one waits for the other.
    """

    __slots__ = ("_before", "_entries", "_lent", "_thread")

    _running: list[Loan] = []  # noqa: RUF012 -- of all threads
    _turn = threading.Condition()

    def __init__(self, entries: list[_Entry]) -> None:
        """Waits until no other thread has the variables, and lends them."""
        self._entries, self._thread = entries, threading.get_ident()
        with Loan._turn:
            self._look()
            while Loan._running and any(map(self._is_in_conflict, Loan._running)):
                Loan._turn.wait()
                self._look()
            Loan._running.append(self)
            for entry in entries if self._lent else ():
                now = _read(*entry[:3])
                contents = [value if _is_content(noted, value) else _content(noted) for noted, value in zip(entry[3], now, strict=True)]
                _write(entry, contents, now)

    def _look(self) -> None:
        """Finds out what the contents are, and which variables have another one than in forward."""
        self._before, self._lent = [], set()
        for entry in self._entries:
            now = _read(*entry[:3])
            self._before.append(now)
            if not all(map(is_, entry[3], now)):
                others = zip(_places(entry), entry[3], now, strict=True)
                self._lent.update(place for place, noted, value in others if not _is_content(noted, value))

    def _is_in_conflict(self, other: Loan) -> bool:
        if other._thread == self._thread or not (self._lent or other._lent):
            return False
        return not (self._lent.isdisjoint(other._places()) and other._lent.isdisjoint(self._places()))

    def _places(self) -> list[Any]:
        return [place for entry in self._entries for place in _places(entry)]

    def end(self) -> None:
        """Has the variables be what they were before."""
        with Loan._turn:
            for entry, before in zip(reversed(self._entries), reversed(self._before), strict=True):
                now = _read(*entry[:3])
                if not all(map(is_, before, now)):
                    _write(entry, before, now)
            Loan._running.remove(self)
            Loan._turn.notify_all()
