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
    """A checkpointed region could not be brought back exactly.

    Attributes:
        region: Names of the regions around the failure, outermost first; empty where unknown.
    """

    def __init__(self, message: str, *, region: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.region = region

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are unpickled by calling their class with ``args``, which keyword-only fields do not survive.
        return rebuild_error, (type(self), str(self), dict(self.__dict__))


E = TypeVar("E", bound=CheckpointError)


def rebuild_error(kind: type[E], message: str, fields: dict[str, Any]) -> E:
    """Returns an error of a kind with a message and the fields (``vars``) of another error of the kind."""
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class DeterminismError(CheckpointError):
    """The recompute of a region saved other tensors than its forward.

    Attributes:
        region: Names of the regions around the failure, outermost first.
        index: Position of the first different tensor in the order of saving: the first missing tensor where the recompute saved
            too few, the first surplus tensor where it saved too many. In a recorded region it is the number of the operator
            whose result has another shape. -1 where the recompute drew other random numbers than forward.
        expected: What forward saved (``"float32[4, 8] on cpu"``, or a number of tensors), or the operator which forward ran.
        found: The same for the recompute.
        grad_fn: Name of the autograd node which saved the tensor in forward, as in ``"SinBackward0"``; None where unknown.
        routing: Names of operators which may have chosen otherwise in the recompute, as in ``"aten.topk.default"``: in debug
            mode, operators which chose among floating-point numbers before the difference. In a recorded region, the operator
            whose result has another shape. Else empty.
        operators: The operators of forward, a line of text for each, in debug mode; else empty.
        recomputed_operators: The operators of the recompute, likewise.
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
    """A tensor needed in backward was modified in place, exchanged, bound anew, or freed since forward.

    Attributes:
        region: Names of the regions around the failure, outermost first.
        tensor: The place among the arguments, as in ``args[1]['mask']``, or its description and when forward saved it.
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
    """A promise of this package did not hold. Please report the error, with the program."""


class BudgetTooSmallError(ValueError):
    """No plan of a model's step fits a byte budget.

    Attributes:
        budget: The bytes given.
        minimum: The least peak of any plan, in bytes.
        bottleneck: The block in which that peak is; None outside of any block.
    """

    def __init__(self, message: str, *, budget: int, minimum: int, bottleneck: str | None) -> None:
        super().__init__(message)
        self.budget, self.minimum, self.bottleneck = budget, minimum, bottleneck

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (self.args[0], self.budget, self.minimum, self.bottleneck)


def _made_again(message: str, budget: int, minimum: int, bottleneck: str | None) -> BudgetTooSmallError:
    return BudgetTooSmallError(message, budget=budget, minimum=minimum, bottleneck=bottleneck)
