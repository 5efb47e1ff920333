"""Scopes: the life of recomputed values.

A *pass* holds the values brought back for one frame by one backward. A pass belongs to a *scope*: a graph task of autograd, or
a :class:`ckpt_hooks.GraphExecGroup`. The owner alone holds a scope: a graph task by way of its callbacks, which it runs at its
end and drops on failure; a group as its attribute. A frame holds its passes, and with each pass a weak reference to the scope,
whose callback removes the pass. So unclaimed values go when the backward ends or fails, also where the frame outlives the
backward (``retain_graph=True``). Where the frame goes first, as is usual, its passes go along, and nothing is left to do at the
end.

Roads not taken: a dictionary for each frame, by graph task, with weak handles as keys, as in torch. Unclaimed values live as
long as the graph then, and each frame pays for a weak dictionary. And a list of frames in each scope: a loop in Python at the
end of a backward, and 5 us more for a step of one region.
"""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Any

from ckpt_hooks._torch.autograd import graph_exec_group, graph_task_id, keeps_graph, queue_callback

__all__ = [
    "MISSING",
    "NO_PASSES",
    "SPLIT",
    "Ending",
    "Scope",
    "drop_at_end",
    "graph_task_scope",
    "is_last_backward",
    "new_group_scope",
]


class _Missing:
    """Stands among values for an absent tensor, with the attributes asked of tensors."""

    __slots__ = ()

    shape = dtype = device = _version = None

    def __repr__(self) -> str:
        return "MISSING"


#: Stands for a value that was taken, or not wanted.
MISSING: Any = _Missing()


#: What every frame has until its first pass; never filled.
NO_PASSES: dict[int, Any] = {}

#: The key of the one pass of a frame with ``split_backward``, which belongs to no scope. No graph task and no group has it.
SPLIT = -1 << 62


class Scope:
    """One backward, or one group of backwards; dies when the last one ends.

    Attributes:
        key: The key of passes in frames: the id of a graph task (0 and up), or a number below -1 for a group.
    """

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: int) -> None:
        self.key = key


#: A weak reference to a scope, which does something when that ends, as long as somebody holds the reference.
Ending = weakref.ref[Scope]

_group_keys = itertools.count(-2, -1)


def new_group_scope() -> Scope:
    """Returns a scope whose key no graph task and no other group has."""
    return Scope(next(_group_keys))


def is_last_backward() -> bool:
    """Whether this thread's backward frees its graph: no later backward asks for the tensors."""
    return graph_task_id() != -1 and not keeps_graph() and graph_exec_group() is None


_latest: Ending | None = None


def graph_task_scope(key: int) -> Scope:
    """Returns a scope which ends with this thread's graph task.

    A task gets another scope where other tasks recompute in between, or on other threads. All end with the task.
    """
    global _latest
    scope = None if _latest is None else _latest()
    if scope is None or scope.key != key:
        scope = Scope(key)
        queue_callback([scope].clear)
        _latest = weakref.ref(scope)
    return scope


def drop_at_end(scope: Scope, passes: dict[int, Any]) -> Ending:
    """Returns what to hold for a scope's pass to be taken out of a frame's passes when the scope ends."""
    # ``pop`` is given the reference too, as the default for a pass that is gone already.
    return weakref.ref(scope, partial(passes.pop, scope.key))
