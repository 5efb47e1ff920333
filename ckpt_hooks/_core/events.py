"""Events: what regions of both kinds tell observers, and the sender of a frame's events.

An event names regions and storages by numbers, so kept events keep no tensor and no frame alive. Reports use events,
:meth:`Frame.saved` and :meth:`Frame.held`, and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ckpt_hooks._torch.autograd import graph_task_id

from .call_sites import module_in_call, site_of
from .descriptions import RegionPath, format_path
from .holdings import Holding, Reason, Saved, address_of, size_of, storage_and_size, tell_when_freed
from .packed import KeptTensor, tracked
from .settings import current_settings, override


class Region(NamedTuple):
    """One entry of a region. Numbers are unique in the process."""

    id: int
    parent: int | None  # the number of the region around; None if no observer watches that region
    kind: str  # "function" or "recorded"
    path: tuple[str, ...]  # the names of the regions around and of this region, outermost first
    site: str | None  # the entering line, as in "model.py:12"; None without user code on the stack
    # The module that the region runs, or else the module around it, by its name in the outermost called module, as in
    # "layers.0"; None in a recompute, and without a module.
    module: str | None
    in_recompute: bool  # whether the recompute of a region around enters this region
    frame: Callable[[], Any]  # a weak reference to the region's frame


class TensorInfo(NamedTuple):
    """A tensor of an event."""

    shape: torch.Size | None  # None for a nested tensor
    dtype: torch.dtype
    nbytes: int
    storage: int | None  # the storage's number, unique in the process; None without a storage
    storage_nbytes: int  # 0 without a storage
    address: int  # of the storage's memory; 0 without memory


class Operator(NamedTuple):
    """A run of an operator below autograd."""

    name: str  # as in "aten.mm.default"
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    in_recompute: bool
    # Whether a policy of the region would be asked about this run. Policies are asked only in forward, and not about views,
    # in-place operators, autocast's casts of parameters, and operators of a backward inside the region.
    is_asked_about: bool
    is_view: bool  # whether the result shares memory with an argument: a view, or the result of ``_unsafe_view``
    writes: tuple[int, ...]  # positions in ``inputs`` of written tensors: all, if the operator has no schema
    reads_shape_only: bool  # whether it reads only the shape of its first argument, as ``empty_like`` does
    draws_on_host: bool  # whether the CPU draws a random number for each element of the results
    seconds: float | None  # on the host; None where no observer wants durations


class Observer:
    """Hears of each event of the regions in a block of :func:`ckpt_hooks._core.events.observe`.

    A method does nothing unless overridden. The thread of an event calls the method, in a recompute with the frame's lock held;
    :meth:`let_go` and :meth:`freed` are called wherever the last reference is dropped.
    """

    wants_operators = False  # whether to call ``ran``, from a dispatch mode around each region, at some 20 us per operator
    wants_durations = False  # whether operators are timed

    def entered(self, region: Region) -> None:
        """Forward of a region begins."""

    def exited(self, region: Region, error: BaseException | None) -> None:
        """Forward of a region ended, by an exception or not."""

    def ran(self, region: Region, operator: Operator) -> None:
        """An operator ran; ``detach`` and its like are left out."""

    def saved(self, region: Region, saved: Saved, tensor: TensorInfo) -> None:
        """Autograd saved a tensor, described as at that moment; its position is unique in the region."""

    def settled(self, region: Region, position: int, fate: Reason) -> None:
        """The outermost region ended, and since ``saved`` an operator or ``checkpoint_name`` changed a tensor's fate."""

    def let_go(self, region: Region, position: int) -> None:
        """Autograd has freed a saved tensor together with the node that saved it."""

    def held(self, region: Region, holdings: Sequence[Holding]) -> None:
        """A region, or the outermost region of its tape, has ended; lists each tensor kept alive from then on."""

    def freed(self, storage: int) -> None:
        """A storage of an earlier event is freed."""

    def moved(self, region: Region, nbytes: int, *, to_host: bool) -> None:
        """A copy of a tensor to the host or back began."""

    def recomputing(self, region: Region, *, in_order: bool) -> None:
        """A recompute begins; ``in_order``: it runs all of forward's operators at once, in forward's order."""
        # Reruns run in order, and so do replays of a region that overwrites a value which an operator has read. Other replays
        # may stop once a wanted value is there.

    def recomputed(self, region: Region, error: BaseException | None) -> None:
        """A recompute ended, by an exception or not."""

    def restored(self, region: Region, position: int, tensor: TensorInfo) -> None:
        """A saved tensor with a handle is handed to autograd."""


_next_region = itertools.count(1).__next__


def info_of(tensor: torch.Tensor, observers: tuple[Observer, ...]) -> TensorInfo:
    """Returns the facts of a tensor for an event; the observers will hear when its storage is freed."""
    storage, size = storage_and_size(tensor)
    if storage is not None:
        tell_when_freed(storage, observers)
    shape = None if tensor.is_nested else tensor.shape
    return TensorInfo(shape, tensor.dtype, size_of(tensor), storage, size, address_of(storage))


class Watch:
    """Sends the events of a frame, to which it has a weak reference."""

    __slots__ = ("__weakref__", "_fates", "_num_kept", "observers", "region", "task", "tensors", "wants_operators")

    region: Region

    def __init__(
        self,
        frame: Any,
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
        self.tensors: dict[int, TensorInfo] = {}  # tensors that autograd has not let go of, by position
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

    def tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        for observer in self.observers:
            getattr(observer, event)(self.region, *args, **kwargs)

    def saved(self, position: int | None, fate: Reason, tensor: torch.Tensor, made_by: str | None = None) -> int:
        """Tells observers of a saved tensor; returns its position, below 0 without a handle."""
        if position is None:
            self._num_kept += 1
            position = -self._num_kept
        else:
            self._fates[position] = fate
        info = self.tensors[position] = info_of(tensor, self.observers)
        saved = Saved(self.region.path, position, fate, info.shape, info.dtype, info.nbytes, made_by)
        self.tell("saved", saved, info)
        return position

    def kept(self, position: int | None, packed: KeptTensor, tensor: torch.Tensor) -> KeptTensor:
        """Returns the object to stand in the graph for a tensor that is kept."""
        followed = tracked(packed)
        position = self.saved(position, packed.held_for.reason, tensor)
        self.follow(followed, position)
        return followed

    def follow(self, packed: Any, position: int) -> None:
        """Sends :meth:`let_go` when an object in the graph dies."""
        weakref.finalize(packed, self.let_go, position).atexit = False

    def let_go(self, position: int) -> None:
        self.tensors.pop(position, None)
        self.tell("let_go", position)

    def restored(self, position: int, tensor: torch.Tensor) -> None:
        self.tell("restored", position, info_of(tensor, self.observers))

    def settle(self) -> None:
        """Sends changed fates and the frame's holdings when the outermost region has ended."""
        frame = self.region.frame()
        if frame is None:
            return
        for saved in frame.saved():
            if self._fates.get(saved.position, saved.fate) is not saved.fate:
                self.tell("settled", saved.position, saved.fate)
        holdings = frame.held()
        for holding in holdings:
            if holding.storage is not None:
                tell_when_freed(holding.storage, self.observers)
        self.tell("held", holdings)


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Makes an observer watch every region whose forward begins in this block, on this thread; backward included."""
    # Without observers the price is a look-up for each region and an attribute test for each restored tensor. Packing pays
    # nothing: a watched region has other pack hooks.
    with override(observers=(*current_settings().observers, observer)):
        yield
