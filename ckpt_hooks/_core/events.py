"""Events: messages of regions of both kinds to observers.

An event names regions, tensors and storages by numbers, so kept events keep no tensor and no frame alive. Reports use events,
:meth:`Frame.saved` and :meth:`Frame.held`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch

from .holdings import Holding, Reason
from .saved_descriptions import Saved

__all__ = ["Observer", "Operator", "Region", "TensorInfo", "Watchable"]


class Watchable(Protocol):
    """A frame, as seen by observers.

    Attributes:
        kind: ``"function"`` or ``"recorded"``.
    """

    kind: ClassVar[str]

    def saved(self) -> list[Saved]:
        """See :meth:`Frame.saved`."""

    def held(self) -> list[Holding]:
        """See :meth:`Frame.held`."""

    def policy_in_words(self) -> str | None:
        """See :meth:`Frame.policy_in_words`."""


class Region(NamedTuple):
    """One entry of a region.

    Attributes:
        id: The entry's number, unique in the process.
        parent: The number of the region around; None without a watched region around.
        kind: ``"function"`` or ``"recorded"``.
        path: The region's name and the names of the regions around, outermost first.
        site: The entering line of the user's program, as in ``"model.py:12"``; None without user code on the stack.
        module: The module run by the region, or else the module around, by its name in the outermost called module, as in
            ``"layers.0"``; None in a recompute, and without a module.
        in_recompute: Whether the recompute of a region around enters this region.
        frame: A weak reference to the frame, for ``saved()``, ``held()`` and ``policy_in_words()``.
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
    """A tensor of an event.

    Attributes:
        id: The tensor's number, unique in the process.
        shape: The sizes; None for a nested tensor.
        dtype: The dtype.
        nbytes: The size in bytes.
        storage: The number of its storage; None without a storage.
        storage_nbytes: The size of its storage in bytes; 0 without a storage.
        address: The address of the memory of its storage; 0 without memory.
    """

    id: int
    shape: torch.Size | None
    dtype: torch.dtype
    nbytes: int
    storage: int | None
    storage_nbytes: int
    address: int


class Operator(NamedTuple):
    """A run of an operator below autograd.

    Attributes:
        name: The operator's name, as in ``"aten.mm.default"``.
        inputs: The tensors in its arguments.
        outputs: The tensors in its result.
        site: The calling line of the user's program; None in a replay, where no user code runs.
        in_recompute: Whether a recompute ran the operator.
        is_asked_about: Whether a policy of the region would be asked about this run: in forward alone, and not about views,
            operators which write in place, casts of parameters by autocast, and operators of a backward inside the region.
        is_view: Whether the result shares memory with an argument: a view, or the result of ``_unsafe_view``.
        writes: The positions in ``inputs`` of the tensors written to; of an operator without a schema, all positions.
        reads_shape_only: Whether the operator reads the shape of its first argument alone, as ``empty_like``.
        seconds: The time on the host; None where no observer wants durations.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    site: str | None
    in_recompute: bool
    is_asked_about: bool
    is_view: bool
    writes: tuple[int, ...]
    reads_shape_only: bool
    seconds: float | None


class Observer:
    """Hears of each event of the regions in a block of :func:`ckpt_hooks._core.settings.observe`.

    A method does nothing unless overridden.

    The thread of an event calls the method, in a recompute with the frame's lock held. :meth:`let_go` and :meth:`freed` come
    from the place of the last reference.

    Attributes:
        wants_operators: Whether to call :meth:`ran`, by a dispatch mode around each region, at some 20 us an operator.
        wants_durations: Whether operators are timed.
    """

    wants_operators = False
    wants_durations = False

    def entered(self, region: Region) -> None:
        """Forward of a region begins."""

    def exited(self, region: Region, error: BaseException | None) -> None:
        """Forward of a region ended, by an exception or not."""

    def ran(self, region: Region | None, operator: Operator) -> None:
        """An operator ran. Operators ignored by policies (``detach``) are left out.

        Args:
            region: The region; None for an operator outside of regions
                (:func:`ckpt_hooks._operators.operator_events.observe_all`).
            operator: The operator.
        """

    def saved(self, region: Region, saved: Saved, tensor: TensorInfo) -> None:
        """Autograd saved a tensor in a region.

        Args:
            region: The region.
            saved: The description. Each tensor of a region has a position of its own.
            tensor: The tensor, with its storage at the moment of saving.
        """

    def settled(self, region: Region, position: int, fate: Reason) -> None:
        """A later operator, or a name, has changed the fate of a saved tensor by the end of the outermost region."""

    def let_go(self, region: Region, position: int) -> None:
        """Autograd has let go of a saved tensor, with the saving node."""

    def held(self, region: Region, holdings: Sequence[Holding]) -> None:
        """A region, or the outermost region of its tape, has ended; lists each tensor kept alive from then on."""

    def freed(self, storage: int) -> None:
        """A storage of an earlier event is freed."""

    def moved(self, region: Region, nbytes: int, *, to_host: bool) -> None:
        """A copy of a tensor to the host began, or one back."""

    def recomputing(self, region: Region, *, in_order: bool) -> None:
        """A recompute begins.

        Args:
            region: The region.
            in_order: Whether forward's operators run in their order, all at once: in a rerun, and in the replay of a region
                which overwrites a value after an operator read it. Other replays may run as far as one value needs.
        """

    def recomputed(self, region: Region, error: BaseException | None) -> None:
        """A recompute ended, by an exception or not."""

    def restored(self, region: Region, position: int, tensor: TensorInfo) -> None:
        """A saved tensor with a handle is handed to autograd."""

    def backward_began(self) -> None:
        """A backward runs its first operator, or restores its first tensor of a watched region.

        Told by :func:`ckpt_hooks._operators.operator_events.observe_all`, for the outermost backward alone: backwards inside of
        a hook, or of a recompute, are part of it.
        """

    def backward_ended(self) -> None:
        """The same backward has ended. There is no end after an exception in backward; the next begin comes all the same."""
