"""The variables that a function closes over, as they were when its forward began.

A closure shares its variables with the code around it, and that goes on: a loop binds them anew each turn, so that all its
lambdas see the last. A rerun whose forward saw other objects gets a function with cells of its own. So it does where forward
saw a list or a dict with other entries: a function that appends to one finds it as it was, and does not append twice.
"""

from __future__ import annotations

import operator
import types
from typing import Any

__all__ = ["Contents", "contents_of", "with_contents"]

#: What each cell of a closure held, and the entries of that where it is a list or a dict.
Contents = list[tuple[Any, "tuple[Any, ...] | None"]]

#: Stands for what a variable holds that was not assigned yet, or was deleted.
_NOTHING = object()
#: Containers with more entries than this are data, which a function reads.
_MOST = 1000


def contents_of(function: Any) -> Contents | None:
    """Returns what a function closes over, None if it does not."""
    if type(function) is not types.FunctionType or function.__closure__ is None:
        return None
    return list(map(_content, function.__closure__))


def _content(cell: types.CellType) -> tuple[Any, tuple[Any, ...] | None]:
    try:
        content = cell.cell_contents
    except ValueError:
        return _NOTHING, None
    kind = type(content)
    if kind is list and len(content) <= _MOST:
        return content, tuple(content)
    if kind is dict and len(content) <= _MOST:
        return content, (*content.keys(), *content.values())
    return content, None


def _same(one: tuple[Any, tuple[Any, ...] | None], other: tuple[Any, tuple[Any, ...] | None]) -> bool:
    (content, now), (captured, entries) = one, other
    if content is not captured or entries is None:
        return content is captured
    return now is not None and len(now) == len(entries) and all(map(operator.is_, now, entries))


def _cell_of(content: Any, entries: tuple[Any, ...] | None) -> types.CellType:
    if content is _NOTHING:
        return types.CellType()
    if entries is not None and type(content) is list:
        content = list(entries)
    elif entries is not None:
        half = len(entries) // 2
        content = dict(zip(entries[:half], entries[half:], strict=True))
    return types.CellType(content)


def with_contents(function: Any, contents: Contents) -> Any:
    """Returns a function that closes over the contents given: the same one where it does already."""
    now = list(map(_content, function.__closure__))
    if all(map(_same, now, contents)):
        return function
    cells = tuple(
        cell if _same(present, captured) else _cell_of(*captured)
        for cell, present, captured in zip(function.__closure__, now, contents, strict=True)
    )
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__qualname__ = function.__qualname__
    return copy
