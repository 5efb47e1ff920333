"""The exceptions of the package.

::

    RuntimeError
    └── torch.utils.checkpoint.CheckpointError
        └── CheckpointError            a region could not be brought back
            ├── DeterminismError       the rerun saved something else than the forward did
            ├── InputMutationError     an input of a region changed between forward and backward
            ├── OverlapError           two backwards of one GraphExecGroup asked for the same tensor
            └── InternalError          a bug in this package

A mistake of the caller (a wrong option, a wrong type) is a ``ValueError`` or ``TypeError``; what goes wrong while a model
runs is a :class:`CheckpointError`. It derives from torch's class of that name, so that code written for
``torch.utils.checkpoint`` catches it unchanged. No exception carries a tensor: one that is logged, pickled or kept holds no
activation alive.
"""

from __future__ import annotations

from typing import Any

import torch.utils.checkpoint

__all__ = ["CheckpointError", "DeterminismError", "InputMutationError", "InternalError", "OverlapError"]


class CheckpointError(torch.utils.checkpoint.CheckpointError):
    """A checkpointed region could not be brought back exactly as it was.

    Attributes:
        region: Names of the regions around the failure, outermost first; empty where none is known.
    """

    def __init__(self, message: str, *, region: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.region = region

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are unpickled by calling their class with ``args``, which keyword-only fields do not survive.
        return rebuild_error, (type(self), str(self), dict(self.__dict__))


def rebuild_error(kind: type[CheckpointError], message: str, fields: dict[str, Any]) -> CheckpointError:
    """Returns an error of a kind with a message and the fields (``vars``) of another one of that kind."""
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class DeterminismError(CheckpointError):
    """The recompute of a region saved other tensors than its forward.

    Attributes:
        region: Names of the regions around the failure, outermost first.
        index: Position, in the order of saving, of the first tensor that differs; the number of tensors that the rerun
            saved where it saved too few or too many.
        expected: What forward saved: ``"float32[4, 8] on cpu"``, or a number of tensors.
        found: What the recompute saved instead, in the same form.
    """

    def __init__(self, message: str, *, region: tuple[str, ...], index: int, expected: str, found: str) -> None:
        super().__init__(message, region=region)
        self.index = index
        self.expected = expected
        self.found = found


class InputMutationError(CheckpointError):
    """An input of a region was modified in place after the region's forward, so that a rerun would see other values.

    Attributes:
        region: Names of the regions around the failure, outermost first.
        argument: Where the tensor stands among the arguments, as in ``args[1]["mask"]``.
        expected: Version of the tensor when forward ran.
        found: Version of the tensor now.
    """

    def __init__(self, message: str, *, region: tuple[str, ...], argument: str, expected: int, found: int) -> None:
        super().__init__(message, region=region)
        self.argument = argument
        self.expected = expected
        self.found = found


class OverlapError(CheckpointError):
    """Two backwards inside one :class:`ckpt_hooks.GraphExecGroup` need the same saved tensor."""


class InternalError(CheckpointError):
    """Something that this package promises did not hold. Please report it, with the program that led here."""
