"""Scopes: the life of recomputed values, by graph task, by group, or by the two parts of a split backward.

A *pass* holds the values brought back for a frame by a backward. A pass belongs to a *scope*: a graph task of autograd, or
a :class:`ckpt_hooks.GraphExecGroup`. Only the owner holds a scope: a graph task in its callbacks, which it runs at its end and
drops on failure; a group in an attribute. A frame holds its passes, and with each pass a weak reference to the scope,
whose callback removes the pass. So unclaimed values go when the backward ends or fails, also where the frame outlives the
backward (``retain_graph=True``). Where the frame goes first, as is usual, its passes go along, and nothing is left to do.

Roads not taken: a dictionary for each frame, by graph task, with weak handles as keys, as in torch. Unclaimed values live as
long as the graph then, and each frame pays for a weak dictionary. And a list of frames in each scope: a loop in Python at the
end of a backward, and 5 us more for a step of a single region.
"""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Any

import torch
from typing_extensions import Self

from ckpt_hooks._torch.autograd import graph_exec_group, graph_task_id, keeps_graph, queue_callback, set_graph_exec_group
from ckpt_hooks._torch.tensors import storage_of, version_witness

from .misuse import NeedsParentheses


class _Missing:
    """Stands among values for an absent tensor, with the attributes asked of tensors."""

    __slots__ = ()

    shape = dtype = device = _version = None

    def __repr__(self) -> str:
        return "MISSING"


#: Stands for a value that was taken, or not wanted.
MISSING: Any = _Missing()


#: Shared by all frames without a pass; never filled.
NO_PASSES: dict[int, Any] = {}

#: The key of the only pass of a frame with ``split_backward``, which belongs to no scope. No graph task or group has this key.
SPLIT = -1 << 62


class Scope:
    """A backward, or a group of backwards; dies when the last backward ends."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: int) -> None:
        self.key = key  # the id of a graph task (0 and up), or a number below -1 for a group


#: A weak reference to a scope. While a frame holds the reference, its callback drops a pass when the scope ends.
Ending = weakref.ref[Scope]

_group_keys = itertools.count(-2, -1)

_latest: Ending | None = None


def graph_task_scope(key: int) -> Scope:
    """Returns a scope which ends with this thread's graph task."""
    # A task gets several scopes if tasks take turns, or if several threads recompute. All end with the task.
    global _latest
    scope = None if _latest is None else _latest()
    if scope is None or scope.key != key:
        scope = Scope(key)
        queue_callback([scope].clear)
        _latest = weakref.ref(scope)
    return scope


def with_ending(endings: tuple[Ending, ...], scope: Scope, passes: dict[int, Any]) -> tuple[Ending, ...]:
    """Returns the live endings, and a new ending that drops the pass of ``scope``."""
    # ``pop`` gets the reference as its second argument, the default for a pass that is gone already.
    return (*(ending for ending in endings if ending()), weakref.ref(scope, partial(passes.pop, scope.key)))


class GraphExecGroup(metaclass=NeedsParentheses):
    """Lets several backwards share recomputes: each region is recomputed at most once inside a group.

    Pipeline schedules run the backward of a stage in parts, gradients of inputs first and gradients of weights later. Without a
    group each part recomputes the regions of the stage. Enter the same group again for a later part.

    Values that were recomputed and not yet used are kept until the group object or the graph is deleted. The parts must need
    different saved tensors, also with ``retain_graph=True``. ``torch.utils.checkpoint`` has a group of the same name; each
    package respects the other's.

    Raises:
        RuntimeError: On entering a group inside another group.
        OverlapError: In backward, if two backwards need the same saved tensor.

    Example:
        >>> import torch
        >>> from ckpt_hooks import GraphExecGroup, checkpoint
        >>> x = torch.ones(2, requires_grad=True)
        >>> first, second = checkpoint(lambda x: (x.sin(), x.cos()), x)
        >>> with GraphExecGroup():  # one recompute serves both
        ...     first.sum().backward(retain_graph=True)
        ...     second.sum().backward()
    """

    def __enter__(self) -> Self:
        current = graph_exec_group()
        if current is not None:
            raise RuntimeError(
                f"GraphExecGroup contexts cannot be nested: already inside group {current}. Leave it first, or run this "
                "backward in the outer group."
            )
        set_graph_exec_group(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        set_graph_exec_group(None)


def group_scope(group: Any) -> Scope:
    """Returns the scope of a group, ours or torch's, and makes it on first use."""
    # An attribute of the group, so that the scope ends when the group is deleted.
    try:
        scope: Scope = group._ckpt_hooks_scope
    except AttributeError:
        # Two threads may both come here; ``setdefault`` lets a single thread win.
        scope = vars(group).setdefault("_ckpt_hooks_scope", Scope(next(_group_keys)))
    return scope


# A pipeline schedule runs gradients of inputs and gradients of weights as two backwards. One recompute serves both: each value
# stays until its handle was unpacked twice, or died (Rules 3 and 4). A backward which frees its graph unpacks each handle for
# the last time. A value to whose memory a backward wrote is recomputed: the next backward must not see the write.
class Uses:
    """The uses of a frame's values by a backward in two parts (``split_backward=True``)."""

    __slots__ = ("_handed_out", "_task", "_versions", "used")

    def __init__(self) -> None:
        self._task = graph_task_id()
        # For each storage address, the tensors handed out: a witness (an empty tensor with the same version counter) and the
        # version of each. A view made by a replay has its own version counter, so a single witness is not enough.
        self._handed_out: dict[int, list[tuple[torch.Tensor, int]]] = {}
        # The version of each tensor without a storage, such as a sparse tensor, by the index of its handle: a witness of such a
        # tensor is an alias, which would hold the memory.
        self._versions: dict[int, int] = {}
        self.used: set[int] = set()  # indices of the handles unpacked once, whose values stay for a second time

    def is_next_part(self) -> bool:
        """Whether a new backward has begun since the last call, so that values of dead handles may go."""
        latest, self._task = self._task, graph_task_id()
        return latest != self._task

    def is_untouched(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether no backward has written to the memory of a handle's value."""
        storage = storage_of(tensor)
        if storage is None:
            return self._versions.get(index, tensor._version) == tensor._version
        return all(witness._version == version for witness, version in self._handed_out.get(storage, ()))

    def hand_out(self, index: int, tensor: torch.Tensor) -> bool:
        """Notes that a handle is unpacked; returns whether the value stays for a second time."""
        storage = storage_of(tensor)
        if storage is None:
            self._versions[index] = tensor._version
        else:
            self._handed_out.setdefault(storage, []).append((version_witness(tensor), tensor._version))
        if index in self.used or not keeps_graph():
            return False
        self.used.add(index)
        return True
