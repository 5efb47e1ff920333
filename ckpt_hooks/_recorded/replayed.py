"""Replays of recorded frames: their handles, and the replays of each backward, with nested frames."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.frame import Frame, overlap_error
from ckpt_hooks._core.holdings import Cause, Holding, Reason, Saved, TrackedKept, holdings_in, owners_in
from ckpt_hooks._core.scopes import NO_PASSES, SPLIT, Uses, graph_task_scope, group_scope
from ckpt_hooks._tensors.copies import copies_of, is_plain
from ckpt_hooks._torch.autograd import graph_exec_group, graph_task_id
from ckpt_hooks._torch.tensors import num_holders, storage_of

from .replay import Replay, Replayable, bring_back
from .values import Value, is_held_twice, values_below

_number = operator.attrgetter("number")

#: Stand-ins for saved tensors from outside.
Externals = list[weakref.ref[TrackedKept]]


class Handle:
    """The handle of a recorded frame: stands in autograd's graph for one saved tensor."""

    __slots__ = ("__weakref__", "dtype", "frame", "index", "nbytes", "shape", "value")

    frame: ReplayedFrame  # the frame
    value: Value  # the value of the tensor
    index: int  # the number of tensors saved before by the frame
    dtype: torch.dtype  # the dtype; set for watched frames
    nbytes: int  # the tensor's size in bytes
    shape: torch.Size  # the sizes, likewise; unset for a nested tensor, which has none


class FunctionHandle(Handle):
    """The handle of a tensor saved by a custom function, whose backward may write to the tensor by kernels unseen."""

    __slots__ = ()


class SplitReplay(Replay):
    """The tensors of one frame for the two parts of a backward. The frame owns this object, so the frame is held weakly."""

    def __init__(self, frame: Replayable, roots: Sequence[Value], handles: Sequence[Handle]) -> None:
        Replay.__init__(self, frame, [*roots, *(handle.value for handle in handles)], SPLIT)
        # Each handle with uses left, weakly, by its index.
        self.handles = {handle.index: (weakref.ref(handle), handle.value.number) for handle in handles}
        self.uses = Uses()  # the uses of the handles

    @property
    def frame(self) -> Replayable:
        """The frame, alive since a handle in use holds it."""
        frame = self._frame()
        assert frame is not None
        return frame

    @frame.setter
    def frame(self, frame: Replayable) -> None:
        self._frame = weakref.ref(frame)

    def expects_handle(self, index: int) -> bool:
        """Whether a handle has uses left, and no backward has written to its memory."""
        if self.uses.is_next_part():
            for dead in [one for one, (reference, _) in self.handles.items() if reference() is None]:
                self._release(dead, 1 if dead in self.uses.used else 2)
        if index not in self.handles:
            return False
        number = self.handles[index][1]
        tensor = self.held.get(number, self.tensors.get(number))
        return tensor is None or self.uses.is_untouched(index, tensor)

    def hand_out(self, index: int, tensor: torch.Tensor) -> None:
        """Notes a use of a handle."""
        is_second = index in self.uses.used
        if not self.uses.hand_out(index, tensor):
            self._release(index, 0 if is_second else 1)

    def _release(self, index: int, uses: int) -> None:
        """Drops a handle with uses that will not come."""
        _, number = self.handles.pop(index)
        if uses:
            self.readers[number] -= uses
            if not self.readers[number]:
                del self.readers[number]
                self.tensors.pop(number, None)
                self.held.pop(number, None)


class ReplayedFrame(Replayable):
    """A recorded frame's handles and replays."""

    __slots__ = ("_children", "externals", "handles", "is_split")

    kind = "recorded"
    outer: ReplayedFrame | None

    passes: dict[int, Any]  # replays, by the key of the scope

    def __init__(self, name: str, parent: Frame | None, observers: tuple[Observer, ...], outer: ReplayedFrame | None) -> None:
        Frame.__init__(self, name, parent, observers)
        self._children: list[weakref.ref[ReplayedFrame]] = []
        self.bytes = 0
        self.externals: Externals = []  # stand-ins for saved tensors from outside
        self.lines = None if outer is None else outer.lines
        self.unseen: list[tuple[torch.Tensor, str]] = []
        self.outer = outer
        self.handles: list[weakref.ref[Handle]] = []  # the frame's handles
        self.start = 0
        self.whole = None
        # Whether values stay for a second backward (:mod:`ckpt_hooks._core.scopes`).
        self.is_split: bool = outer is not None and outer.is_split

    def saved(self) -> list[Saved]:
        """Returns the tensors which backward may still ask for; see :meth:`Frame.saved`."""
        return [self.describe(handle) for reference in self.handles if (handle := reference()) is not None]

    def held(self) -> list[Holding]:
        """Returns the tensors kept alive by this frame, in the order of their making; see :meth:`Frame.held`."""
        seen: set[int] = set()
        held = held_in_graph(self.externals, seen)
        for value in self._values():
            if value.saved is not None:
                held += holdings_in(value.saved, value.saved.cause, seen, (Frame,))
            if value.op is not None:
                held += holdings_in(value.op.draw, Cause(Reason.RANDOM_STATE), seen, (Frame,))
        replays = [[*replay.tensors.values(), *replay.held.values()] for replay in list(self.passes.values())]
        return held + list(holdings_in(replays, Cause(Reason.RECOMPUTED), seen))

    def _values(self) -> list[Value]:
        """Returns the values needed by the living handles, in the order of their making."""
        handles = [handle for reference in self.handles if (handle := reference()) is not None]
        return sorted(values_below([handle.value for handle in handles]), key=_number)

    def owners(self) -> list[Frame]:
        """Returns the frames around; see :meth:`Frame.owners`."""
        packed = [value.saved for value in self._values() if value.saved is not None and value.saved.is_packed]
        return owners_in([self.outer, packed], Frame)

    def describe(self, packed: Handle) -> Saved:
        """Returns the description of a handle's tensor; see :meth:`Frame.describe`."""
        value = packed.value
        made_by = None if value.op is None else value.op.facts.full_name
        shape, dtype = getattr(packed, "shape", None), getattr(packed, "dtype", None)
        return Saved(format_path(self.path), packed.index, fate_of(value), shape, dtype, packed.nbytes, made_by)

    def _living_children(self) -> list[ReplayedFrame]:
        return [child for reference in self._children if (child := reference()) is not None]

    def replay_for(self, key: int) -> Replay:
        """Returns the replay of a scope. Makes a missing replay, and replays for the frames inside, which will ask it."""
        found: Replay | None = self.passes.get(key)
        if found is not None:
            return found
        group, scope = graph_exec_group(), None
        if key != SPLIT:
            scope = graph_task_scope(key) if group is None else group_scope(group)
        order, todo = [], [self]
        while todo:
            frame = todo.pop()
            if key not in frame.passes:
                order.append(frame)
                todo += frame._living_children()
        for frame in reversed(order):
            # Kept tensors need no replay, which would hold them until their last request.
            handles = [
                handle
                for reference in frame.handles
                if (handle := reference()) is not None and (handle.value.saved is None or handle.value.saved.is_packed)
            ]
            roots = [handle.value for handle in handles]
            for child in frame._living_children():
                roots += [value for reference in child.passes[key].crossing if (value := reference()) is not None]
            if scope is None:
                frame.passes = {SPLIT: SplitReplay(frame, roots, handles)}
            else:
                frame.keep_pass(Replay(frame, roots, key), scope)
        opened: Replay = self.passes[key]
        return opened

    def bring_back(self, handle: Handle) -> torch.Tensor:
        """Returns the tensor of a handle; the caller holds the tape's lock."""
        group = graph_exec_group()
        key = graph_task_id() if group is None else group_scope(group).key
        if key == -1:  # outside of a backward nothing tells when values may go
            return self.alone(handle.value)
        if self.is_split:
            return self._bring_back_in_parts(handle)
        replay = self.replay_for(key)
        if group is not None and handle.index in replay.taken:
            raise overlap_error(self.path, handle.index)
        tensor = take(replay, handle.value)
        if group is not None:
            replay.taken.add(handle.index)
        return tensor

    def _bring_back_in_parts(self, handle: Handle) -> torch.Tensor:
        """Returns the tensor of a handle, for the first or the second of two backwards."""
        replay = self.replay_for(SPLIT)
        assert isinstance(replay, SplitReplay)
        if not replay.expects_handle(handle.index):
            self._forget_parts()
            replay = self.replay_for(SPLIT)
            assert isinstance(replay, SplitReplay)
        tensor = take(replay, handle.value)
        replay.hand_out(handle.index, tensor)
        return tensor

    def _forget_parts(self) -> None:
        """Drops the replays of all frames on the tape, for a third backward."""
        root = self
        while root.outer is not None:
            root = root.outer
        todo = [root]
        while todo:
            frame = todo.pop()
            frame.passes = NO_PASSES
            todo += frame._living_children()

    def own(self, handle: Handle, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor for the backward of a custom function: a copy, if a replay or a policy still needs the memory."""
        saved = handle.value.saved
        if not is_plain(tensor):  # whose memory no kernel gets
            return tensor
        if saved is not None and not saved.is_packed:
            in_memory = sum(reference() is not None for reference in handle.value.store.held or ())
            is_needed = in_memory > 1 or is_held_twice(weakref.ref(handle.value))
        else:
            is_needed = num_holders(tensor) > 1 or self._has_memory_of(tensor)
        copy: torch.Tensor = copies_of(tensor) if is_needed else tensor
        return copy

    def _has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a running replay of the tape has a tensor in the memory of ``tensor``."""
        address, root = storage_of(tensor), self
        while root.outer is not None:
            root = root.outer
        todo = [root]
        while todo:
            frame = todo.pop()
            for replay in list(frame.passes.values()):  # those of other threads come and go
                if any(storage_of(other) == address for other in (*replay.tensors.values(), *replay.held.values())):
                    return True
            todo += frame._living_children()
        return False

    def alone(self, value: Value) -> torch.Tensor:
        """Returns the tensor of a value by a replay of the caller's own."""
        return take(Replay(self, (value,), None), value)

    def sources_of(self, replay: Replay, values: Iterable[Value]) -> list[tuple[Replay, Value]]:
        """See :meth:`Replayable.sources_of`."""
        outer = self.outer
        assert outer is not None
        if replay.key is None:
            spare = Replay(outer, values, None)
            return [(spare, value) for value in values]
        found = outer.replay_for(replay.key)
        return [(found if found.expects(value) else Replay(outer, (value,), None), value) for value in values]


def held_in_graph(externals: Externals, seen: set[int]) -> list[Holding]:
    """Returns the tensors from outside that stand in the graph themselves, and need no frame."""
    return [
        found._replace(why=f"saved, {found.why}")
        for reference in externals
        if (external := reference()) is not None
        for found in holdings_in(external[0], external.cause, seen)
    ]


def take(replay: Replay, value: Value) -> torch.Tensor:
    """Returns the tensor of ``value`` from ``replay``, or from a replay of this value alone if its read count is used up."""
    if not replay.expects(value):
        replay = Replay(replay.frame, (value,), None)
    if not replay.has(value):
        bring_back(replay, value)
    return replay.take(value)


def fate_of(value: Value) -> Reason:
    """Returns the fate of a handle's tensor. A view of a tensor from outside is brought back, but its memory is not dropped."""
    kept = value.saved
    if kept is None:
        return value.store.cause.reason if value.store.external else Reason.DROPPED
    return Reason.OFFLOADED if kept.is_on_host else kept.cause.reason
