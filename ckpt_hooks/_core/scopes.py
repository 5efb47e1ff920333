"""What one backward brings back, and until when it is kept.

A *pass* holds the values that one backward brought back for one frame. It belongs to a *scope*: a graph task of autograd,
or a :class:`ckpt_hooks.GraphExecGroup`. A scope is an object that nobody but its owner holds: a graph task by way of the
callbacks that it runs when it ends, and drops also when it fails; a group as its attribute. A frame holds its passes, and with
each a weak reference to the scope, whose callback takes the pass out again. So what nobody claimed goes when that backward
ends, one way or another, and neither a frame that outlives the backward (``retain_graph=True``) nor a table on the side keeps
it; and where the frame goes first, as it mostly does, it takes its passes along, and nothing is left to do at the end.

Roads not taken: one dictionary keyed by graph task for each frame and weak handles as keys, as torch does it. It keeps
unclaimed values for as long as the graph lives, and costs a weak dictionary a frame. And a list of the frames in each scope:
that is a loop in Python when a backward ends, and 5 us more for a step of one region.
"""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Any

from ckpt_hooks._torch import graph_exec_group, graph_task_id, keeps_graph, queue_callback

__all__ = [
    "MISSING",
    "NO_PASSES",
    "Ending",
    "Scope",
    "drop_at_end",
    "graph_task_scope",
    "is_last_backward",
    "new_group_scope",
]


class _Missing:
    """Stands among values for one that is not there, with what is asked of all of them."""

    __slots__ = ()

    shape = dtype = device = _version = None

    def __repr__(self) -> str:
        return "MISSING"


#: Stands for a value that was taken, or not wanted.
MISSING: Any = _Missing()


#: What every frame has until its first pass; never filled.
NO_PASSES: dict[int, Any] = {}


class Scope:
    """One backward, or one group of backwards; when it ends, nobody holds it any more.

    Attributes:
        key: What frames file their passes under: the id of a graph task (0 and up), or a number below -1 for a group.
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
    """Whether the backward that runs on this thread frees its graph, so that nobody asks for the same tensors again."""
    return graph_task_id() != -1 and not keeps_graph() and graph_exec_group() is None


_latest: Ending | None = None


def graph_task_scope(key: int) -> Scope:
    """Returns a scope that ends with the graph task that is running on this thread.

    A task gets another one where other tasks recompute in between, or on other threads; all of them end with it.

    Args:
        key: The id of that graph task.
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
