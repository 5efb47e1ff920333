"""Sending the events of one frame to its observers."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any

import torch

from ckpt_hooks._torch.autograd import graph_task_id

from .call_sites import module_in_call, site_of
from .events import Observer, Operator, Region, TensorInfo, Watchable
from .holdings import Reason, size_of
from .paths import RegionPath, format_path
from .saved_descriptions import Kept, Saved, TrackedKept, cause_of_kept
from .tensor_numbers import address_of, number_of, storage_and_size, tell_when_freed

__all__ = ["Watch", "info_of"]

_next_region = itertools.count(1).__next__


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
        observers: The observers.
        region: The region's entry.
        task: The graph task which forward runs in.
        tensors: The saved tensors which autograd has not let go of, by their positions.
        wants_operators: Whether an observer wants to hear of operators.
    """

    __slots__ = (
        "__weakref__",
        "_fates",
        "_num_kept",
        "observers",
        "region",
        "task",
        "tensors",
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
        self.observers, self.task = observers, graph_task_id()
        self._num_kept = 0
        self._fates: dict[int, Reason] = {}
        self.tensors: dict[int, TensorInfo] = {}
        self.wants_operators = any(observer.wants_operators for observer in observers)
        self.region = Region(
            _next_region(),
            None if outer is None else outer.region.id,
            frame.kind,
            format_path(path),
            site_of(sys._getframe(1)),
            None if in_recompute else module_in_call(module),
            in_recompute,
            weakref.ref(frame),
        )

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        for observer in self.observers:
            getattr(observer, event)(self.region, *args, **kwargs)

    def entered(self) -> None:
        """Forward begins."""
        self._tell("entered")

    def exited(self, error: BaseException | None) -> None:
        """Forward has ended."""
        self._tell("exited", error)

    def _info_of(self, tensor: torch.Tensor) -> TensorInfo:
        return info_of(tensor, self.observers)

    def ran(self, operator: Operator) -> None:
        """An operator ran."""
        self._tell("ran", operator)

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
                tell_when_freed(holding.storage, self.observers)
        self._tell("held", holdings)

    def moved(self, nbytes: int, *, to_host: bool) -> None:
        """A copy to the host began, or a copy back."""
        self._tell("moved", nbytes, to_host=to_host)

    def recomputing(self, *, in_order: bool) -> None:
        """A recompute begins."""
        self._tell("recomputing", in_order=in_order)

    def recomputed(self, error: BaseException | None) -> None:
        """A recompute ended."""
        self._tell("recomputed", error)
