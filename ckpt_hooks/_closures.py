"""The variables that a function closes over, as they were when its forward began.

A closure shares its variables with the code around it, and that goes on: a loop binds them anew each turn, so that all its
lambdas see the last. A rerun whose forward saw other objects gets a function with cells of its own.
"""

from __future__ import annotations

import types
from typing import Any

__all__ = ["Contents", "contents_of", "with_contents"]

#: What each cell of a closure held.
Contents = tuple[Any, ...]

#: Stands for what a variable holds that was not assigned yet, or was deleted.
_NOTHING = object()


def contents_of(function: Any) -> Contents | None:
    """Returns what a function closes over, None if it does not."""
    if type(function) is not types.FunctionType or function.__closure__ is None:
        return None
    return tuple(map(_content, function.__closure__))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING


def with_contents(function: Any, contents: Contents) -> Any:
    """Returns a function that closes over the contents given: the same one where it does already."""
    if all(_content(cell) is content for cell, content in zip(function.__closure__, contents, strict=True)):
        return function
    cells = tuple(types.CellType() if content is _NOTHING else types.CellType(content) for content in contents)
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__qualname__ = function.__qualname__
    return copy
