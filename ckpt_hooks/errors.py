"""The exceptions of the package.

::

    RuntimeError
    └── torch.utils.checkpoint.CheckpointError
        └── CheckpointError            a region could not be brought back
            ├── DeterminismError       the rerun saved something else than the forward did
            ├── MutationError          a tensor that backward needs changed since forward
            ├── OverlapError           two backwards of one GraphExecGroup asked for the same tensor
            └── InternalError          a bug in this package

A mistake of the caller (a wrong option, a wrong type) is a ``ValueError`` or ``TypeError``; what goes wrong while a model
runs is a :class:`CheckpointError`. It derives from torch's class of that name, so that code written for
``torch.utils.checkpoint`` catches it unchanged. No exception carries a tensor: one that is logged, pickled or kept holds no
activation alive.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.utils.checkpoint

__all__ = ["CheckpointError", "DeterminismError", "InternalError", "MutationError", "OverlapError"]


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


E = TypeVar("E", bound=CheckpointError)


def rebuild_error(kind: type[E], message: str, fields: dict[str, Any]) -> E:
    """Returns an error of a kind with a message and the fields (``vars``) of another one of that kind."""
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class DeterminismError(CheckpointError):
    """The recompute of a region saved other tensors than its forward.

    Attributes:
        region: Names of the regions around the failure, outermost first.
        index: Position, in the order of saving, of the first tensor that differs: the first one missing where the rerun saved
            too few, the first one that forward did not have where it saved too many. Under a selective policy it may be the
            place of the first operator that differs, in the sequence of operators without views. It is -1 where no tensor
            differs, but the recompute has moved a random stream that is not tracked.
        expected: What forward saved: ``"float32[4, 8] on cpu"``, or a number of tensors; or the operator that it ran.
        found: What the recompute saved or ran instead, in the same form.
        grad_fn: Name of the autograd node that forward saved it for, as in ``"SinBackward0"``; None where that is not known.
    """

    def __init__(
        self, message: str, *, region: tuple[str, ...], index: int, expected: str, found: str, grad_fn: str | None = None
    ) -> None:
        super().__init__(message, region=region)
        self.index = index
        self.grad_fn = grad_fn
        self.expected = expected
        self.found = found


class MutationError(CheckpointError):
    """A tensor that backward needs is not what forward saw: it was modified in place, exchanged, bound anew, or freed.

    Attributes:
        region: Names of the regions around the failure, outermost first.
        tensor: Which one: where it stands among the arguments, as in ``args[1]['mask']``, or what it is and when it was saved.
        expected: Version of the tensor when forward saw it; None where no version tells of the change.
        found: Version of the tensor now; None likewise.
    """

    def __init__(self, message: str, *, region: tuple[str, ...], tensor: str, expected: int | None, found: int | None) -> None:
        super().__init__(message, region=region)
        self.tensor = tensor
        self.expected = expected
        self.found = found


class OverlapError(CheckpointError):
    """Two backwards inside one :class:`ckpt_hooks.GraphExecGroup` need the same saved tensor."""


class InternalError(CheckpointError):
    """Something that this package promises did not hold. Please report it, with the program that led here."""
