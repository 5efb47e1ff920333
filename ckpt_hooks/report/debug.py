"""Debug mode: the operators of forward and recompute, in errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._core.settings import override
from ckpt_hooks._core.words import describe_tensor
from ckpt_hooks.errors import DeterminismError, rebuild_error

__all__ = ["OperatorLogs", "set_checkpoint_debug_enabled"]


@contextlib.contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Switches debug mode on or off for every region whose forward runs in the block, whatever its ``debug`` says.

    The setting is this thread's (and context's) alone. The innermost block wins.

    Args:
        enabled: Whether errors of a recompute list the operators of both runs. None defers to each region's ``debug``.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, set_checkpoint_debug_enabled
        >>> x = torch.ones(2, requires_grad=True)
        >>> with set_checkpoint_debug_enabled(True):
        ...     y = checkpoint(torch.sin, x)
    """
    with override(debug=enabled):
        yield


def _in_words(value: Any) -> str:
    return str(tree_map_only(torch.Tensor, describe_tensor, value))


class _OperatorLog(QuietDispatchMode):
    """Notes each operator that runs below autograd, with its arguments and outputs in words."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []

    def __enter__(self) -> _OperatorLog:
        self.lines = []
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count_writes(func, args)
        arguments = [_in_words(value) for value in args]
        arguments += [f"{key}={_in_words(value)}" for key, value in kwargs.items()]
        self.lines.append(f"{func}({', '.join(arguments)}) -> {_in_words(result)}")
        return result


class OperatorLogs:
    """Logs of one region's operators, in forward and in its latest recompute.

    Attributes:
        forward: Logs the operators that run while it is entered, as forward's.
        recompute: The same for a recompute; each entering starts anew.
    """

    def __init__(self) -> None:
        self.forward = _OperatorLog()
        self.recompute = _OperatorLog()

    def explain(self, error: DeterminismError) -> DeterminismError:
        """Returns an error of the same kind and fields that lists both logs.

        Args:
            error: What the recompute raised.
        """
        logs = "".join(
            f"\nOperators executed during {name}:\n\n" + "".join(f"  {index:4} {line}\n" for index, line in enumerate(lines))
            for name, lines in (("the original forward", self.forward.lines), ("recomputation", self.recompute.lines))
        )
        return rebuild_error(
            type(error),
            "You are seeing this error because you passed `debug=True` to checkpoint and the tensors saved during the original "
            f"forward and during recomputation differ.\n{logs}\n"
            "Calls of aten.detach differ in any case: the runtime makes them in a recompute.\n\n"
            f"{error}",
            vars(error),
        )
