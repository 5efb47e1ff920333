"""What a region's policy says of operators, asked as seldom as can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._operators.facts import OpFacts
from ckpt_hooks._operators.kinds import Kind
from ckpt_hooks.policies.base import Policy, SelectiveCheckpointContext, decision_of
from ckpt_hooks.policies.policy_warnings import warn_of_unheard, warn_of_unseen

__all__ = ["ASK", "OFFLOAD", "RECOMPUTE", "SAVE", "Deciding"]

RECOMPUTE: Final = 0
SAVE: Final = 1
OFFLOAD: Final = 2
ASK: Final = 3

_MEANING = {
    CheckpointPolicy.MUST_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.MUST_SAVE: SAVE,
    CheckpointPolicy.PREFER_SAVE: SAVE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: OFFLOAD,
}
if hasattr(CheckpointPolicy, "PREFER_CPU_OFFLOAD"):
    _MEANING[CheckpointPolicy.PREFER_CPU_OFFLOAD] = OFFLOAD


class Deciding:
    """A policy in one region.

    Attributes:
        asks: What decides on operators that have to be asked for each time.
        known: What :meth:`of` has answered.
        names: Names that were given to tensors, where the policy expects some.
        policy: The policy.
        seen: Operators that ran, where the policy expects some.
    """

    __slots__ = ("asks", "known", "names", "policy", "seen")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.asks: Callable[..., Any] = policy.start()
        self.seen: set[Any] | None = set() if policy.expects else None
        self.names: set[str] | None = set() if policy.expected_names else None
        self.known: dict[OpFacts, int] = policy.tape_plan if self.seen is None else {}

    def of(self, facts: OpFacts) -> int:
        """Returns what becomes of an operator: ``RECOMPUTE``, ``SAVE``, ``OFFLOAD``, or ``ASK``."""
        meaning = self.known.get(facts)
        if meaning is None:
            operator = facts.operator
            never = facts.kind in (Kind.FACTORY, Kind.IGNORED, Kind.RANGE)
            decision = CheckpointPolicy.PREFER_RECOMPUTE if never else self.policy.for_op(operator)
            meaning = self.known[facts] = ASK if decision is None else _meaning_of(decision, facts)
            if facts.kind is Kind.VIEW and decision in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD):
                self.policy.warn_of_view(operator)
            if self.seen is not None:
                self.seen.add(operator)
        return meaning

    def ask(self, facts: OpFacts, args: Any, kwargs: Any, output: Any) -> int:
        """Asks about one run of an operator."""
        context = SelectiveCheckpointContext(op_output=output)
        return _meaning_of(self.asks(context, facts.operator, *args, **kwargs), facts)

    def of_name(self, name: str) -> int:
        """Returns what becomes of a tensor that was given a name."""
        if self.names is not None:
            self.names.add(name)
        decision = self.policy.for_name(name)
        return RECOMPUTE if decision is None else _MEANING[decision]

    def finish(self) -> None:
        """Ends a region; warns of operators and names that the policy has and that have not come."""
        if self.seen is not None:
            warn_of_unseen(self.policy, self.seen)
        if self.names is not None:
            warn_of_unheard(self.policy, frozenset(self.names))


def _meaning_of(answer: Any, facts: OpFacts) -> int:
    decision = decision_of(answer, facts.operator)
    if decision is CheckpointPolicy.PREFER_RECOMPUTE and (facts.is_collective or facts.has_effect):
        return SAVE  # to run a collective again, all have to, at the same time; and an effect happens once
    return _MEANING[decision]
