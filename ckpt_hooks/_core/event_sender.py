"""Sending the events of one frame to its observers."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .call_sites import module_in_call, site_of
from .events import Observer, Operator, Region, TensorInfo, Watchable
from .holdings import Reason, size_of
from .order import Order, Position
from .paths import RegionPath, format_path
from .saved_descriptions import Kept, Saved, TrackedKept, cause_of_kept
from .tensor_numbers import address_of, number_of, storage_and_size, tell_when_freed

__all__ = ["OperatorRun", "Watch"]

_next_region = itertools.count(1).__next__


class OperatorRun(NamedTuple):
    """A run of an operator, before its event.

    Attributes:
        name: The operator's name.
        inputs: The tensors in its arguments.
        outputs: The tensors in its result.
        written: The arguments written to.
        asked_in: The graph task which ran the operator, -1 outside of backward; None where policies are not asked.
        is_loose: Whether another run of the same program may have the operator or not.
        is_view: Whether the result shares memory with an argument.
        reads_shape_only: Whether it reads the shape of its first argument alone.
        site: The line of the user's program.
        in_recompute: Whether a recompute ran the operator.
        seconds: The time on the host, if measured.
    """

    name: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]
    asked_in: int | None
    is_loose: bool
    is_view: bool
    reads_shape_only: bool
    site: str | None
    in_recompute: bool
    seconds: float | None

    def event(self, position: Position, observers: tuple[Observer, ...]) -> Operator:
        """Returns the event.

        Args:
            position: The position of the run.
            observers: Are told when a storage of the event is freed.
        """
        written = set(map(id, self.written))
        writes = tuple(position for position, tensor in enumerate(self.inputs) if id(tensor) in written)
        inputs = tuple(info_of(tensor, observers) for tensor in self.inputs)
        outputs = tuple(info_of(tensor, observers) for tensor in self.outputs)
        return Operator(
            *(position.place, self.name, inputs, outputs, self.site, self.in_recompute, position.policy_index),
            *(self.is_view, writes, self.reads_shape_only, self.seconds, position.repeats),
        )


def info_of(tensor: torch.Tensor, observers: tuple[Observer, ...]) -> TensorInfo:
    """Returns the facts of a tensor for an event; the observers will hear when its storage is freed."""
    storage, size = storage_and_size(tensor)
    if storage is not None:
        tell_when_freed(storage, observers)
    shape = None if tensor.is_nested else tensor.shape
    return TensorInfo(number_of(tensor), shape, tensor.dtype, size_of(tensor), storage, size, address_of(storage))


class Watch:
    """Sends the events of one frame. Holds the frame weakly.

    Attributes:
        order: The order of operators and regions inside.
        region: The region's entry.
        tensors: The saved tensors which autograd has not let go of, by their positions.
        wants_durations: Whether an observer wants operators timed.
        wants_operators: Whether an observer wants to hear of operators.
    """

    __slots__ = (
        "__weakref__",
        "_fates",
        "_num_kept",
        "_observers",
        "order",
        "region",
        "tensors",
        "wants_durations",
        "wants_operators",
    )

    order: Order
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
        self._observers = observers
        self._num_kept = 0
        self._fates: dict[int, Reason] = {}
        self.tensors: dict[int, TensorInfo] = {}
        self.wants_operators = any(observer.wants_operators for observer in observers)
        self.wants_durations = any(observer.wants_durations for observer in observers)
        number = _next_region()
        above = None if outer is None else outer.order
        self.order = Order(number, above, in_recompute=in_recompute)
        self.region = Region(
            number,
            None if outer is None else outer.region.id,
            frame.kind,
            format_path(path),
            site_of(sys._getframe(1)),
            None if in_recompute else module_in_call(module),
            in_recompute,
            weakref.ref(frame),
            self.order.repeats,
        )

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        for observer in self._observers:
            getattr(observer, event)(self.region, *args, **kwargs)

    def entered(self) -> None:
        """Forward begins."""
        self._tell("entered")

    def exited(self, error: BaseException | None) -> None:
        """Forward has ended."""
        self._tell("exited", error)

    def _info_of(self, tensor: torch.Tensor) -> TensorInfo:
        return info_of(tensor, self._observers)

    def ran(self, run: OperatorRun, position: Position) -> None:
        """An operator ran."""
        self._tell("ran", run.event(position, self._observers))

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
        self._tell("recomputing", in_order=in_order)
        self.order.begin_recompute()

    def recomputed(self, error: BaseException | None) -> None:
        """A recompute ended."""
        self.order.end_recompute()
        self._tell("recomputed", error)
