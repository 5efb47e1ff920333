"""Sending the events of one frame to its observers."""

from __future__ import annotations

import bisect
import itertools
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .events import Observer, Operator, Region, TensorInfo, Watchable
from .holdings import Reason, size_of
from .numbers import address_of, number_of, storage_and_size, tell_when_freed
from .paths import RegionPath, format_path
from .saved import Kept, Saved, TrackedKept, cause_of_kept
from .whereabouts import module_in_call, site_of

__all__ = ["OperatorRun", "Watch"]

_next_region = itertools.count(1).__next__


class _Entry:
    """The number of an entry of a region in forward, and the entries inside, in order."""

    __slots__ = ("id", "inside")

    def __init__(self, number: int) -> None:
        self.id = number
        self.inside: list[_Entry] = []


class OperatorRun(NamedTuple):
    """A run of an operator, before its event.

    Attributes:
        name: The operator's name.
        inputs: The tensors in its arguments.
        outputs: The tensors in its result.
        written: The arguments written to.
        is_asked_about: Whether policies are asked about the operator.
        is_view: Whether the result is a view of an argument.
        reads_shape_only: Whether it reads the shape of its first argument alone.
        site: The line of the user's program.
        in_recompute: Whether a recompute ran the operator.
        seconds: The time on the host, if measured.
    """

    name: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]
    is_asked_about: bool
    is_view: bool
    reads_shape_only: bool
    site: str | None
    in_recompute: bool
    seconds: float | None

    def event(
        self, place: int, index: int | None, repeats: tuple[int, int] | None, observers: tuple[Observer, ...]
    ) -> Operator:
        """Returns the event.

        Args:
            place: The number of operators before.
            index: The number of operators before that policies are asked about; None for one that policies are not asked about.
            repeats: Region and place of forward's operator which runs again, if known.
            observers: Are told when a storage of the event is freed.
        """
        written = set(map(id, self.written))
        writes = tuple(position for position, tensor in enumerate(self.inputs) if id(tensor) in written)
        inputs = tuple(info_of(tensor, observers) for tensor in self.inputs)
        outputs = tuple(info_of(tensor, observers) for tensor in self.outputs)
        return Operator(
            *(place, self.name, inputs, outputs, self.site, self.in_recompute, index),
            *(self.is_view, writes, self.reads_shape_only, self.seconds, repeats),
        )


def info_of(tensor: torch.Tensor, observers: tuple[Observer, ...]) -> TensorInfo:
    """Returns the facts of a tensor for an event.

    Args:
        tensor: The tensor.
        observers: Are told when its storage is freed.
    """
    storage, size = storage_and_size(tensor)
    if storage is not None:
        tell_when_freed(storage, observers)
    shape = None if tensor.is_nested else tensor.shape
    return TensorInfo(number_of(tensor), shape, tensor.dtype, size_of(tensor), storage, size, address_of(storage))


class Watch:
    """Sends the events of one frame. Holds the frame weakly.

    Attributes:
        region: The region's entry.
        tensors: The saved tensors which autograd has not let go of, by their positions.
        wants_durations: Whether an observer wants operators timed.
        wants_operators: Whether an observer wants to hear of operators.
    """

    __slots__ = (
        "__weakref__",
        "_entry",
        "_fates",
        "_num_asked",
        "_num_inside",
        "_num_kept",
        "_num_operators",
        "_observers",
        "_runs",
        "region",
        "tensors",
        "wants_durations",
        "wants_operators",
    )

    region: Region

    def __init__(
        self,
        frame: Watchable,
        path: RegionPath,
        outer: Watch | None,
        observers: tuple[Observer, ...],
        module: torch.nn.Module | None,
        *,
        in_recompute: bool,
    ) -> None:
        """Notes the place of the region.

        Args:
            frame: The frame.
            path: Its names.
            outer: The watch of the frame around, if any.
            observers: The observers, the outermost first.
            module: The module run by the region, if any.
            in_recompute: Whether a recompute of a region around makes the frame.
        """
        self._observers = observers
        self._num_kept = self._num_operators = self._num_asked = self._num_inside = 0
        # Of each of forward's operators: the number of values on the tape before, region and place.
        self._runs: list[tuple[int, int, int]] = []
        self._fates: dict[int, Reason] = {}
        self.tensors: dict[int, TensorInfo] = {}
        self.wants_operators = any(observer.wants_operators for observer in observers)
        self.wants_durations = any(observer.wants_durations for observer in observers)
        number = _next_region()
        self._entry = _Entry(number) if outer is None else outer._enter_inside(number, in_recompute=in_recompute)
        self.region = Region(
            number,
            None if outer is None else outer.region.id,
            frame.kind,
            format_path(path),
            site_of(sys._getframe(1)),
            None if in_recompute else module_in_call(module),
            in_recompute,
            weakref.ref(frame),
            self._entry.id if in_recompute and self._entry.id != number else None,
        )

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        for observer in self._observers:
            getattr(observer, event)(self.region, *args, **kwargs)

    def entered(self) -> None:
        """Forward begins."""
        self._tell("entered")

    def exited(self, error: BaseException | None) -> None:
        """Forward has ended."""
        self._begin_again()
        self._tell("exited", error)

    def _enter_inside(self, number: int, *, in_recompute: bool) -> _Entry:
        """Returns the entry of a region inside; in a recompute that of forward with the same place."""
        inside, at = self._entry.inside, self._num_inside
        self._num_inside = at + 1
        if in_recompute:
            return inside[at] if at < len(inside) else _Entry(number)
        inside.append(_Entry(number))
        return inside[-1]

    def _info_of(self, tensor: torch.Tensor) -> TensorInfo:
        return info_of(tensor, self._observers)

    def ran(self, run: OperatorRun, number: int | None, repeated: int | None) -> None:
        """An operator ran.

        Args:
            run: The run.
            number: In forward of a recorded region, the number of values on the tape before; else None.
            repeated: In a replay, the number of the operator on the tape; else None.
        """
        place, self._num_operators = self._num_operators, self._num_operators + 1
        index = None
        if run.is_asked_about:
            index, self._num_asked = self._num_asked, self._num_asked + 1
        if number is not None:
            self._runs.append((number, self.region.id, place))
        at = -1 if repeated is None else bisect.bisect_left(self._runs, (repeated,)) - 1
        repeats = self._runs[at][1:] if at >= 0 else None
        self._tell("ran", run.event(place, index, repeats, self._observers))

    def share_tape(self, outer: Watch) -> None:
        """Notes that a recorded region is on the tape of the region around: the replay of one runs operators of the other."""
        self._runs = outer._runs

    def saved(self, position: int | None, fate: Reason, tensor: torch.Tensor, made_by: str | None = None) -> int:
        """A tensor was saved; returns its position.

        Args:
            position: The position of its handle; None without a handle.
            fate: The tensor's fate.
            tensor: The tensor.
            made_by: The operator which returned the tensor, where known.
        """
        if position is None:
            self._num_kept += 1
            position = -self._num_kept
        else:
            self._fates[position] = fate
        info = self.tensors[position] = self._info_of(tensor)
        saved = Saved(self.region.path, position, fate, info.shape, info.dtype, info.nbytes, made_by)
        self._tell("saved", saved, info)
        return position

    def kept(self, position: int | None, packed: Kept, tensor: torch.Tensor) -> Kept:
        """A tensor is kept; returns the object to stand for the tensor in the graph.

        Args:
            position: The tensor's position in the region, if any.
            packed: The object of a region without observers.
            tensor: The tensor.
        """
        tracked = packed if isinstance(packed, TrackedKept) else TrackedKept(packed)
        position = self.saved(position, cause_of_kept(packed).reason, tensor)
        self.follow(tracked, position)
        return tracked

    def follow(self, packed: Any, position: int) -> None:
        """Sends :meth:`let_go` when an object in the graph dies.

        Args:
            packed: The object, which stands for a saved tensor.
            position: The tensor's position.
        """
        weakref.finalize(packed, self.let_go, position).atexit = False

    def let_go(self, position: int) -> None:
        """Autograd has let go of a saved tensor."""
        self._fates.pop(position, None)
        self.tensors.pop(position, None)
        self._tell("let_go", position)

    def restored(self, position: int, tensor: torch.Tensor) -> None:
        """A saved tensor is handed to autograd."""
        self._tell("restored", position, self._info_of(tensor))

    def settle(self) -> None:
        """The outermost region has ended: sends fates changed since, and the frame's holdings, unless the frame is dead."""
        frame = self.region.frame()
        if frame is None:
            return
        for saved in frame.saved():
            if self._fates.get(saved.position, saved.fate) is not saved.fate:
                self._fates[saved.position] = saved.fate
                self._tell("settled", saved.position, saved.fate)
        holdings = frame.held()
        for holding in holdings:
            if holding.storage is not None:
                tell_when_freed(holding.storage, self._observers)
        self._tell("held", holdings)

    def moved(self, nbytes: int, *, to_host: bool) -> None:
        """A copy to the host began, or a copy back."""
        self._tell("moved", nbytes, to_host=to_host)

    def recomputing(self, *, in_order: bool) -> None:
        """A recompute begins."""
        self._begin_again()
        self._tell("recomputing", in_order=in_order)

    def _begin_again(self) -> None:
        self._num_operators = self._num_asked = self._num_inside = 0

    def recomputed(self, error: BaseException | None) -> None:
        """A recompute ended."""
        self._tell("recomputed", error)
