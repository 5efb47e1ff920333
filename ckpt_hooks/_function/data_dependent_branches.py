"""Operators by which a rerun may have taken other routes than forward, found by one more rerun after an error.

Forward runs without a dispatch mode, so nothing is known of its operators. After a difference the function runs once more,
under a mode which notes the operators that choose among floating-point numbers. Choices among integers, as of ``nonzero`` in a
mask of chosen experts, follow from these.

A rerun after an error must not wait for other processes, which may not have an error. So it ends before a collective or an
operator with an effect; and with several processes also after the first choice, since libraries of experts communicate unseen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import torch

from ckpt_hooks._core.call_sites import site_of
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._operators.facts import Kind, facts_of
from ckpt_hooks._operators.routing_operators import advice_for, chooses
from ckpt_hooks.errors import DeterminismError

from .collector import StopRecompute

__all__ = ["RoutingWatch"]

_MOST = 4  # the largest number of operators in a message


class RoutingWatch(QuietDispatchMode):
    """Notes the operators of a rerun which choose among floating-point numbers."""

    def __init__(self, num_saved: Callable[[], int], kept: Collection[Any]) -> None:
        super().__init__()
        self._num_saved, self._kept = num_saved, kept
        self._found: list[tuple[int, str, str | None]] = []
        distributed = torch.distributed
        self._is_alone = not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        if facts.has_effect or facts.is_collective or (facts.kind is Kind.REWRITES and facts.is_opaque):
            raise StopRecompute
        output = facts.call(*args, **kwargs)
        count_writes(func, args)
        if facts.kind is Kind.RANGE:
            self.note_range(func, args)
        elif not self.paused and func not in self._kept and chooses(func, args, kwargs):
            self._found.append((self._num_saved(), str(func), site_of(sys._getframe(1))))
            if not self._is_alone:
                raise StopRecompute
        return output

    def explain(self, error: DeterminismError, index: int | None) -> None:
        """Adds the noted operators to an error.

        Args:
            error: The error.
            index: The first different tensor; None if unknown.
        """
        found = [(name, site) for saved, name, site in self._found if index is None or saved <= index]
        if not found:
            return
        error.routing = tuple(dict.fromkeys(name for name, _ in found))
        lines = list(dict.fromkeys(name if site is None else f"{name} at {site}" for name, site in found))
        more = [] if len(lines) <= _MOST else [f"{len(lines) - _MOST} more"]
        error.args = (f"{error}{advice_for(lines[:_MOST] + more)}",)
