"""The exceptions of the package.

::

    RuntimeError
    └── torch.utils.checkpoint.CheckpointError
        └── CheckpointError            a region could not be brought back
            ├── DeterminismError       the recompute saved other tensors than forward
            ├── MutationError          a tensor needed in backward changed since forward
            ├── OverlapError           two backwards of one GraphExecGroup asked for the same tensor
            └── InternalError          a bug in this package

    ValueError
    └── BudgetTooSmallError            no plan fits a byte budget

A mistake of the caller (a wrong option, a wrong type) is a ``ValueError`` or ``TypeError``. A failure while a model runs is a
:class:`CheckpointError`, a child of torch's class of the same name, so code written for ``torch.utils.checkpoint`` catches it
unchanged. No exception carries a tensor, so a logged or kept exception keeps no activation alive.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.utils.checkpoint

__all__ = ["BudgetTooSmallError", "CheckpointError", "DeterminismError", "InternalError", "MutationError", "OverlapError"]


class CheckpointError(torch.utils.checkpoint.CheckpointError):
    """A region's tensors could not be brought back exactly.

    Attributes:
        region: Names of the regions around the failure, outermost first. Empty if unknown.
    """

    def __init__(self, message: str, *, region: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.region = region

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are unpickled by calling their class with ``args``, which keyword-only fields do not survive.
        return rebuild_error, (type(self), str(self), dict(self.__dict__))


E = TypeVar("E", bound=Exception)


def rebuild_error(kind: type[E], message: str, fields: dict[str, Any]) -> E:
    """Returns an error of class ``kind`` with a message, and with fields from the ``vars`` of another such error."""
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class DeterminismError(CheckpointError):
    """The recompute of a region differs from its forward.

    Attributes:
        region: Names of the regions around the failure, outermost first.
        index: Position of the first tensor that differs, in the order of saving; of the first missing or surplus tensor if the
            numbers differ. In a recorded region, the number of the operator whose result differs. -1 if the recompute drew
            other random numbers than forward.
        expected: What forward saved, such as ``"float32[4, 8] on cpu"``, a number of tensors, or the operator that forward ran.
        found: The same for the recompute.
        grad_fn: Name of the autograd node that saved the tensor, such as ``"SinBackward0"``. None if unknown.
        routing: Operators before the difference that may have chosen otherwise in the recompute, such as
            ``"aten.topk.default"``: in debug mode those that compare floating-point numbers, in a recorded region the operator
            that differs. Otherwise empty.
        operators: In debug mode, the operators of forward, a line of text for each.
        recomputed_operators: In debug mode, the operators of the recompute.
    """

    def __init__(
        self, message: str, *, region: tuple[str, ...], index: int, expected: str, found: str, grad_fn: str | None = None
    ) -> None:
        super().__init__(message, region=region)
        self.index = index
        self.grad_fn = grad_fn
        self.expected = expected
        self.found = found
        self.routing: tuple[str, ...] = ()
        self.operators: tuple[str, ...] = ()
        self.recomputed_operators: tuple[str, ...] = ()


class MutationError(CheckpointError):
    """A tensor that backward needs was modified in place, replaced or freed after forward.

    Attributes:
        region: Names of the regions around the failure, outermost first.
        tensor: Where the tensor was found, such as ``args[1]['mask']``, or its description and when forward saved it.
        expected: The tensor's version counter in forward. None if the change shows in no counter.
        found: The version counter in backward, or None.
    """

    def __init__(self, message: str, *, region: tuple[str, ...], tensor: str, expected: int | None, found: int | None) -> None:
        super().__init__(message, region=region)
        self.tensor = tensor
        self.expected = expected
        self.found = found


class OverlapError(CheckpointError):
    """Two backwards inside one :class:`ckpt_hooks.GraphExecGroup` need the same saved tensor."""


class InternalError(CheckpointError):
    """This package broke one of its own promises. Please report the error together with the program."""


class BudgetTooSmallError(ValueError):
    """No plan for a model's step fits the memory budget.

    Attributes:
        budget: The budget in bytes.
        minimum: The smallest peak that any plan reaches, in bytes.
        bottleneck: The block where this peak occurs. None outside of blocks.
    """

    def __init__(self, message: str, *, budget: int, minimum: int, bottleneck: str | None) -> None:
        super().__init__(message)
        self.budget, self.minimum, self.bottleneck = budget, minimum, bottleneck

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_error, (type(self), str(self), dict(self.__dict__))
