"""What autograd holds in place of a saved tensor: the tensor, kept, or a handle by which a frame brings the tensor back.

Reports find these in the graph, and ask ``frame.describe`` about a handle, which recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import Self

from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.tensors import is_kept_anyway
from ckpt_hooks.errors import CheckpointError, MutationError

from . import mutation
from .descriptions import RegionPath, format_path
from .holdings import Cause, Reason

#: The number of a function frame's first saved tensor. Python shares small integers, so their reference counts tell nothing;
#: from here on each number is an object of its own.
FIRST_NUMBER = 1 << 20

_PARAMETER, _INPUT = Cause(Reason.PARAMETER), Cause(Reason.INPUT)


class KeptTensor:
    """A tensor kept by a region as it is, with the version at the time of packing and the region's path."""

    # Used for leaves that require grad, which the graph holds anyway, for nested tensors, which have no shape to compare, and
    # for tensors saved by TorchScript, which saves other tensors in a rerun than in its first calls.
    __slots__ = ("path", "tensor", "version")

    tensor: torch.Tensor
    version: int
    path: RegionPath
    frame = None

    @classmethod
    def of(cls, tensor: torch.Tensor, version: int, path: RegionPath) -> Self:
        packed = cls()
        packed.tensor, packed.version, packed.path = tensor, version, path
        return packed

    @property
    def held_for(self) -> Cause:
        cause: Cause = getattr(self, "cause", _INPUT)
        return _PARAMETER if is_kept_anyway(self.tensor) else cause

    @skipped
    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise self.mutated()
        return self.tensor

    def mutated(self) -> MutationError:
        # Plain autograd raises too if a saved tensor was written to.
        return mutation.mutated(mutation.Why.SAVED, format_path(self.path), self.tensor, self.version)


class TrackedTensor(KeptTensor):
    """A kept tensor that can be weakly referenced."""

    __slots__ = ("__weakref__", "cause", "needed_by")

    cause: Cause  # unset for a leaf that requires grad
    needed_by: Callable[[CheckpointError], None]  # adds the operator which saved the tensor; unset outside of debug mode

    def mutated(self) -> MutationError:
        error = super().mutated()
        if hasattr(self, "needed_by"):
            self.needed_by(error)
        return error


def tracked(packed: KeptTensor) -> TrackedTensor:
    return packed if isinstance(packed, TrackedTensor) else TrackedTensor.of(packed.tensor, packed.version, packed.path)


class CallHandle(tuple[Any, int]):
    """The handle of a function frame: the frame, and FIRST_NUMBER plus the number of tensors that it saved before."""

    # Autograd holds a bare tuple unless the frame is watched: this class costs 2% of the instructions of a ten-operator chain.
    # The handle is alive while its number has references besides the frame's list. (Weak references to handles would take a
    # third more time for each saved tensor.)
    __slots__ = ()

    @property
    def frame(self) -> Any:
        return self[0]


class WatchedCallHandle(CallHandle):
    """A call handle that reports to observers."""

    __slots__ = ()

    @skipped
    def unpack(self) -> torch.Tensor:
        tensor: torch.Tensor = self[0].unpack((self[0], self[1]))
        if (watch := self[0].watch) is not None:
            watch.restored(self[1] - FIRST_NUMBER, tensor)
        return tensor

    def __del__(self) -> None:
        if (watch := self[0].watch) is not None:
            watch.let_go(self[1] - FIRST_NUMBER)


class TapeHandle:
    """The handle of a recorded frame."""

    __slots__ = ("__weakref__", "dtype", "frame", "index", "nbytes", "shape", "value")

    frame: Any
    value: Any  # the value of the tensor on the tape
    index: int  # the number of tensors that the frame saved before
    dtype: torch.dtype  # set in watched frames
    nbytes: int
    shape: torch.Size  # set in watched frames, except for nested tensors


class FunctionTapeHandle(TapeHandle):
    """The handle of a tensor saved by a custom function, whose backward may write to it by kernels that no mode sees."""

    __slots__ = ()
