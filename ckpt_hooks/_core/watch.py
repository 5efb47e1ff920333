"""Telling observers what one frame does."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ckpt_hooks._torch import is_kept_anyway

from .events import Observer, Operator, Region, TensorInfo, Watchable
from .holdings import size_of
from .numbers import number_of, storage_number, tell_when_freed
from .paths import RegionPath, format_path
from .saved import Fate, Kept, Saved, TrackedKept
from .whereabouts import module_in_call, site_of

__all__ = ["Watch"]

_next_region = itertools.count(1).__next__


class Watch:
    """The observers of one frame, and what tells them. It holds the frame weakly.

    Attributes:
        region: The entry of the region that the frame is.
        wants_operators: Whether one of the observers does.
    """

    __slots__ = ("__weakref__", "_fates", "_num_kept", "_num_operators", "_observers", "region", "wants_operators")

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
        """Notes where the region is.

        Args:
            frame: The frame.
            path: Its names.
            outer: That of the frame around, if that is watched.
            observers: Who watches, the outermost first.
            module: What the region runs, if that is a module.
            in_recompute: Whether a recompute of a region around makes the frame.
        """
        self._observers = observers
        self._num_kept = self._num_operators = 0
        self._fates: dict[int, Fate] = {}
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
        for observer in self._observers:
            getattr(observer, event)(self.region, *args, **kwargs)

    def entered(self) -> None:
        """Tells that forward begins."""
        self._tell("entered")

    def exited(self, error: BaseException | None) -> None:
        """Tells that forward has ended."""
        self._num_operators = 0
        self._tell("exited", error)

    def _info_of(self, tensor: torch.Tensor) -> TensorInfo:
        storage = storage_number(tensor)
        size = 0
        if storage is not None:
            tell_when_freed(storage, self._observers)
            size = tensor.untyped_storage().nbytes()
        shape = None if tensor.is_nested else tensor.shape
        return TensorInfo(number_of(tensor), shape, tensor.dtype, size_of(tensor), storage, size)

    def ran(
        self,
        operator: str,
        inputs: Iterable[torch.Tensor],
        outputs: Iterable[torch.Tensor],
        *,
        in_recompute: bool,
        site: str | None,
    ) -> None:
        """Tells that an operator ran.

        Args:
            operator: Its name.
            inputs: The tensors in its arguments.
            outputs: Those that it returned.
            in_recompute: Whether a recompute ran it.
            site: The line of the user's program.
        """
        place, self._num_operators = self._num_operators, self._num_operators + 1
        read, made = tuple(map(self._info_of, inputs)), tuple(map(self._info_of, outputs))
        self._tell("ran", Operator(place, operator, read, made, site, in_recompute))

    def saved(self, position: int | None, fate: Fate, tensor: torch.Tensor, made_by: str | None = None) -> int:
        """Tells that a tensor was saved; returns its position.

        Args:
            position: That of its handle, None for a tensor that has none.
            fate: What becomes of it.
            tensor: The tensor.
            made_by: The operator that returned it, where that is known.
        """
        if position is None:
            self._num_kept += 1
            position = -self._num_kept
        else:
            self._fates[position] = fate
        info = self._info_of(tensor)
        saved = Saved(self.region.path, position, fate, info.shape, info.dtype, info.nbytes, made_by)
        self._tell("saved", saved, info)
        return position

    def kept(self, position: int | None, packed: Kept, tensor: torch.Tensor) -> Kept:
        """Tells of a tensor that is kept; returns what stands for it in the graph.

        Args:
            position: That of the tensor in the region, if it has one.
            packed: What would stand for it if nobody watched.
            tensor: The tensor.
        """
        tracked = packed if isinstance(packed, TrackedKept) else TrackedKept(packed)
        position = self.saved(position, Fate.LEAF if is_kept_anyway(tensor) else Fate.EXTERNAL, tensor)
        self.follow(tracked, position)
        return tracked

    def follow(self, packed: Any, position: int) -> None:
        """Tells when what stands for a saved tensor goes.

        Args:
            packed: What stands for the tensor in the graph.
            position: That of the tensor.
        """
        weakref.finalize(packed, self.let_go, position).atexit = False

    def let_go(self, position: int) -> None:
        """Tells that autograd has let go of a saved tensor."""
        self._fates.pop(position, None)
        self._tell("let_go", position)

    def restored(self, position: int, tensor: torch.Tensor) -> None:
        """Tells that a saved tensor is handed to autograd."""
        self._tell("restored", position, self._info_of(tensor))

    def settle(self, frame: Watchable) -> None:
        """Tells how saved tensors have fared until the end of the outermost region, and what the frame holds from now on."""
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
        """Tells that a copy to the host began, or one back."""
        self._tell("moved", nbytes, to_host=to_host)

    def recomputing(self) -> None:
        """Tells that a recompute begins."""
        self._num_operators = 0
        self._tell("recomputing")

    def recomputed(self, error: BaseException | None) -> None:
        """Tells that a recompute ended."""
        self._tell("recomputed", error)
