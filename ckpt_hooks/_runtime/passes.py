"""What one backward brings back, and until when it is kept.

A *pass* holds the values that one backward brought back for one frame. It belongs to a *scope*: a graph task of autograd,
or a :class:`ckpt_hooks.GraphExecGroup`. Autograd owns the scope of a graph task through the callbacks that it runs when the
task ends, and drops it also when the task fails: so what nobody claimed goes when that backward ends, one way or another,
and neither a frame that outlives the backward (``retain_graph=True``) nor a table on the side keeps it.

The road not taken: one dictionary keyed by graph task for each frame and weak handles as keys, as torch does it. It keeps
unclaimed values for as long as the graph lives, and costs a weak dictionary a frame.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ckpt_hooks._torch import queue_callback

__all__ = ["MISSING", "NO_PASSES", "Pass", "Scope", "graph_task_scope", "new_group_scope"]


class _Missing:
    """Stands among values for one that is not there, with what is asked of all of them."""

    __slots__ = ()

    shape = dtype = device = _version = None

    def __repr__(self) -> str:
        return "MISSING"


#: Stands for a value that was taken, or not wanted.
MISSING: Any = _Missing()


class Pass:
    """The values of one frame in one scope.

    Attributes:
        values: One entry a handle, in the order of saving: the tensor, or :data:`MISSING`.
        taken: Indices in the order in which they were taken.
    """

    __slots__ = ("taken", "values")

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values
        self.taken: list[int] = []


class HasPasses(Protocol):
    """A frame, as far as scopes know it.

    Attributes:
        passes: Its passes, by the key of the scope that each belongs to.
    """

    passes: dict[int, Pass]


#: What every frame has until its first pass; never filled.
NO_PASSES: dict[int, Pass] = {}


class Scope(list["weakref.ref[HasPasses]"]):
    """One backward, or one group of backwards, as the list of the frames that have a pass of it.

    When it ends, every pass that was opened in it is dropped.

    Attributes:
        key: What frames file their passes under: the id of a graph task (0 and up), or a number below -1 for a group.
    """

    __slots__ = ("__weakref__", "key")

    key: int

    def end(self) -> None:
        """Drops the passes of all frames that are still alive."""
        if self:
            key = self.key
            _graph_tasks.pop(key, None)
            for reference in self:
                frame = reference()
                if frame is not None:
                    frame.passes.pop(key, None)
            self.clear()

    # Autograd calls the scope when its graph task ends, and deletes it uncalled when the task fails.
    __call__: Callable[[Scope], None] = end
    __del__ = end


_graph_tasks: dict[int, weakref.ref[Scope]] = {}
_group_keys = itertools.count(-2, -1)


def new_group_scope() -> Scope:
    """Returns a scope whose key no graph task and no other group has."""
    scope = Scope()
    scope.key = next(_group_keys)
    return scope


def graph_task_scope(key: int) -> Scope:
    """Returns the scope of the graph task that is running on this thread.

    Two engine threads that meet here at the same moment may make one each; both end with the task, so both serve.

    Args:
        key: The id of that graph task.
    """
    reference = _graph_tasks.get(key)
    scope = None if reference is None else reference()
    if scope is None:
        scope = Scope()
        scope.key = key
        queue_callback(scope)
        _graph_tasks[key] = weakref.ref(scope)
    return scope
