"""The ready-made policy for mixtures of experts."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._operators.facts import facts_of

from .base import Policy

__all__ = ["routing_saveable"]

_SAVE, _RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


class _Routing(Policy):
    """Keeps results on which routes and shapes depend."""

    title = "routing_saveable"
    meaning = "keeps results on which routes and shapes depend (top-k, sort, nonzero, item, ...)"

    def for_op(self, op: Any) -> CheckpointPolicy | None:
        routing = facts_of(op).is_routing
        if routing is None:
            return None
        return _SAVE if routing else _RECOMPUTE

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return _SAVE if facts_of(op).routes(args, kwargs) else _RECOMPUTE


#: Keeps results on which routes and shapes depend, for mixtures of experts. A recompute then takes the routes of forward, even
#: where a router sits on a tie. Kept are choices among values (top-k, sort, argmax, multinomial, searchsorted), counts
#: (bincount, histc), results with a shape from data (nonzero, unique, masked_select, repeat_interleave), numbers read by Python
#: (item, copies to the host), and comparisons of floating-point numbers. Operators of other libraries are known by their tags
#: (``torch.Tag.dynamic_output_shape``, ``torch.Tag.data_dependent_output``). Add others by :func:`save_from_both_policies`.
routing_saveable: Policy = _Routing()
