"""Events: what regions of both kinds tell observers.

An event names regions, tensors and storages by numbers, so an observer that keeps events keeps no tensor and no frame alive.
Reports are written on events, on :meth:`Frame.saved` and on :meth:`Frame.held`, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch

from .holdings import Holding
from .saved import Fate, Saved

__all__ = ["Observer", "Operator", "Region", "TensorInfo", "Watchable"]


class Watchable(Protocol):
    """A frame, as far as observers use it.

    Attributes:
        kind: ``"function"`` or ``"recorded"``.
    """

    kind: ClassVar[str]

    def saved(self) -> list[Saved]:
        """See :meth:`Frame.saved`."""

    def held(self) -> list[Holding]:
        """See :meth:`Frame.held`."""


class Region(NamedTuple):
    """One entry of a region.

    Attributes:
        id: Its number, which no other region of the process has.
        parent: The number of the region around it; None if there is none, or none that is watched.
        kind: ``"function"`` or ``"recorded"``.
        path: Its name and the names of the regions around it, outermost first.
        site: The line of the user's program that enters it, as in ``"model.py:12"``; None if no user code is on the stack.
        module: The module that it runs, or that runs it, by its name in the outermost module of the call, as in
            ``"layers.0"``; None in a recompute, and where no module runs.
        in_recompute: Whether the recompute of a region around enters it.
        frame: Refers to the frame weakly, for its ``saved()`` and ``held()``.
    """

    id: int
    parent: int | None
    kind: str
    path: tuple[str, ...]
    site: str | None
    module: str | None
    in_recompute: bool
    frame: Callable[[], Watchable | None]


class TensorInfo(NamedTuple):
    """A tensor that an operator read or returned.

    Attributes:
        id: Its number, which no other tensor of the process has.
        shape: Its sizes; None for a nested tensor.
        dtype: Its dtype.
        nbytes: Its size in bytes.
        storage: The number of its storage; None if it has none.
        storage_nbytes: The size of its storage in bytes; 0 if it has none.
    """

    id: int
    shape: torch.Size | None
    dtype: torch.dtype
    nbytes: int
    storage: int | None
    storage_nbytes: int


class Operator(NamedTuple):
    """An operator below autograd that ran in a region.

    Attributes:
        place: How many operators this forward, or this recompute, of the region ran before.
        name: Its name, as in ``"aten.mm.default"``.
        inputs: The tensors in its arguments.
        outputs: The tensors that it returned.
        site: The line of the user's program that called it; None in a replay, where no user code runs.
        in_recompute: Whether a recompute ran it.
    """

    place: int
    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    site: str | None
    in_recompute: bool


class Observer:
    """Hears of each event of the regions that it watches (:mod:`.observers`). A method does nothing unless overridden.

    The thread that causes an event calls the method, with the frame's lock held in a recompute. Events of tensors that go come
    from wherever the last reference is dropped.

    Attributes:
        wants_operators: Whether :meth:`ran` is called. A dispatch mode around each region sees to that, which costs some 20 us
            an operator.
    """

    wants_operators = False

    def entered(self, region: Region) -> None:
        """Forward of a region begins."""

    def exited(self, region: Region, error: BaseException | None) -> None:
        """Forward of a region ended, by an exception or not."""

    def ran(self, region: Region, operator: Operator) -> None:
        """An operator ran. Operators that no policy is asked about as they compute nothing (``detach``) are left out."""

    def saved(self, region: Region, saved: Saved, tensor: TensorInfo) -> None:
        """Autograd saved a tensor in a region.

        Args:
            region: The region.
            saved: What becomes of it. Each position is that of one tensor of the region: negative where there is no handle.
            tensor: The tensor that was saved, and its storage at that moment.
        """

    def settled(self, region: Region, position: int, fate: Fate) -> None:
        """A later operator, or a name, has changed the fate of a saved tensor by the end of the outermost region."""

    def let_go(self, region: Region, position: int) -> None:
        """Autograd has let go of a saved tensor, with the node that saved it."""

    def held(self, region: Region, holdings: Sequence[Holding]) -> None:
        """A region, or the outermost one of its tape, has ended; tells each tensor that it keeps alive from then on."""

    def freed(self, storage: int) -> None:
        """A storage of which an event told is freed."""

    def moved(self, region: Region, nbytes: int, *, to_host: bool) -> None:
        """A copy of a tensor to the host began, or one back."""

    def recomputing(self, region: Region) -> None:
        """A recompute begins."""

    def recomputed(self, region: Region, error: BaseException | None) -> None:
        """A recompute ended, by an exception or not."""

    def restored(self, region: Region, position: int, tensor: TensorInfo) -> None:
        """A saved tensor that has a handle is handed to autograd."""
