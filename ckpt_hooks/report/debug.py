"""Debug mode: errors of a recompute begin with the first operator that differs from forward, and its line."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from ckpt_hooks._core.call_sites import module_names, outermost_module
from ckpt_hooks._core.settings import override
from ckpt_hooks._operators.facts import facts_of, routing_advice
from ckpt_hooks._operators.operator_log import Entry, OperatorLog
from ckpt_hooks.errors import DeterminismError, rebuild_error

from .divergence import divergence_in_words, first_divergence, up_to

__all__ = ["OperatorLogs", "set_checkpoint_debug_enabled"]

_MOST = 4  # operators named for their choices


@contextlib.contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Switches debug mode on or off for every region whose forward runs in the block, whatever its ``debug`` says.

    The setting is this thread's (and context's) alone. The innermost block wins. In debug mode a region notes each operator,
    which takes a few times as long as a small operator itself.

    - Of :func:`ckpt_hooks.checkpoint`, a :class:`ckpt_hooks.DeterminismError` begins with the first operator of forward or
      recompute without a counterpart in the other run, with the user's line and the module. The error has both logs whole, as
      ``operators`` and ``recomputed_operators``. Its ``routing`` names operators before the difference which chose among
      floating-point numbers (top-k, sort, comparisons), perhaps otherwise than in forward.
    - Of :class:`ckpt_hooks.checkpoint_region`, a :class:`ckpt_hooks.MutationError` names the operator which needs the changed
      tensor, with the line which ran the operator in forward. Of nested regions of this kind the outermost decides.

    Args:
        enabled: Whether errors of a recompute tell of operators and lines. None defers to each region's ``debug``.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, set_checkpoint_debug_enabled
        >>> x = torch.ones(2, requires_grad=True)
        >>> with set_checkpoint_debug_enabled(True):
        ...     y = checkpoint(torch.sin, x)
    """
    with override(debug=enabled):
        yield


class _RecomputeLog(OperatorLog):
    """The context of each recompute: enters a new log each time, and leaves the log of the latest ended recompute in a list."""

    def __init__(self, latest: list[OperatorLog]) -> None:
        super().__init__()
        self._latest = latest

    def _recreate_cm(self) -> _RecomputeLog:
        return _RecomputeLog(self._latest)

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._latest[:] = [self]


class OperatorLogs:
    """Logs of one region's operators, in forward and in its latest recompute.

    Attributes:
        forward: The log of forward, a context manager.
        recompute: The context manager of recomputes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._latest: list[OperatorLog] = []
        self.forward = OperatorLog()
        self.recompute = _RecomputeLog(self._latest)
        root = outermost_module() or (function if isinstance(function, torch.nn.Module) else None)
        self._root = None if root is None else weakref.ref(root)

    def explain(self, error: DeterminismError, kept: Collection[Any]) -> DeterminismError:
        """Returns an error of the same kind and fields which begins with the first difference, and has both logs.

        Args:
            error: The error of the recompute.
            kept: Operators whose results a policy keeps, so that the recompute did not choose by them.
        """
        forward, log = self.forward.entries, self._latest[0] if self._latest else OperatorLog()
        names, recompute = module_names(None if self._root is None else self._root()), log.entries
        divergence = first_divergence(forward, recompute, is_whole=log.error is None)
        if divergence is None:
            words = "Forward and recompute ran the same operators, on tensors of the same kinds, as far as the recompute got.\n"
        else:
            words = divergence_in_words(divergence, forward, recompute, names)
        choices = _choices(up_to(divergence, forward, recompute), kept) if error.index >= 0 else []
        region = f"region {'/'.join(error.region)!r}: " if error.region else ""
        explained = rebuild_error(
            type(error),
            f"{region}{words}You are seeing this error because you passed `debug=True` to checkpoint and the tensors saved "
            "during the original forward and during recomputation differ. The error has both logs whole, "
            f"{len(forward)} operators of forward and {len(recompute)} of the recompute: print(*error.operators, sep='\\n'), "
            f"and likewise error.recomputed_operators.\n\n{error}{_choices_in_words(choices)}",
            vars(error),
        )
        explained.routing = tuple(dict.fromkeys(str(entry.operator) for entry in choices))
        explained.operators = tuple(f"{entry.in_words()} at {entry.line(names)}" for entry in forward)
        explained.recomputed_operators = tuple(f"{entry.in_words()} at {entry.line(names)}" for entry in recompute)
        return explained


def _choices(entries: Sequence[Entry], kept: Collection[Any]) -> list[Entry]:
    return [
        entry for entry in entries if entry.operator not in kept and facts_of(entry.operator).chooses(entry.args, entry.kwargs)
    ]


def _choices_in_words(choices: Sequence[Entry]) -> str:
    lines = list(dict.fromkeys(" at ".join(filter(None, (str(entry.operator), entry.site()))) for entry in choices))
    more = [] if len(lines) <= _MOST else [f"{len(lines) - _MOST} more"]
    return routing_advice(lines[:_MOST] + more) if lines else ""
