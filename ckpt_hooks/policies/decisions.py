"""The decisions of a policy in one region, taken in the same way in both kinds of frame.

The answer of a policy which decides by the operator alone is looked up from then on. Other policies are asked about each run of
an operator whose output can stand in for another run (``OpFacts.is_asked_about``), with the run's index in the region. They are
not asked about views, which run again in any case, nor about operators which only write in place, which function frames run
again. (Recorded frames keep a tensor so written where a policy names the operator, or names everything.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._core.modes import is_compiled_code_running
from ckpt_hooks._operators.facts import Kind, OpFacts, facts_of
from ckpt_hooks._torch.functions import OVERLOAD

from .base import Policy, decision_of
from .context import SelectiveCheckpointContext
from .policy_warnings import warn_of_unheard, warn_of_unseen

__all__ = ["ASK", "EITHER", "OFFLOAD", "RECOMPUTE", "SAVE", "Decisions", "asks_for_torch"]

RECOMPUTE: Final = 0
SAVE: Final = 1
OFFLOAD: Final = 2
#: The policy has to be asked about each run.
ASK: Final = 3
#: The policy prefers to run a collective again. Recorded frames keep it: to run it again, all processes have to.
EITHER: Final = 4

_DECISIONS = {
    CheckpointPolicy.MUST_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.MUST_SAVE: SAVE,
    CheckpointPolicy.PREFER_SAVE: SAVE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: OFFLOAD,
}
if hasattr(CheckpointPolicy, "PREFER_CPU_OFFLOAD"):
    _DECISIONS[CheckpointPolicy.PREFER_CPU_OFFLOAD] = OFFLOAD

_MUSTS = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD)


class Decisions:
    """The decisions of a policy in one region.

    Attributes:
        is_kept: Tells whether to keep the next run of an operator of decision ``ASK``, where the policy only counts runs.
        known: Answers of :meth:`of`.
        names: Names given to tensors, where the policy expects some.
        policy: The policy.
        seen: Operators which ran, where the policy expects some.
    """

    __slots__ = ("_asks", "_num_asked", "is_kept", "known", "names", "policy", "seen")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.is_kept = policy.count_runs()
        self._asks: Callable[..., Any] = policy.start() if self.is_kept is None else partial(_by_count, self.is_kept)
        self._num_asked = 0
        self.seen: set[Any] | None = set() if policy.expects else None
        self.names: set[str] | None = set() if policy.expected_names else None
        self.known: dict[OpFacts, int] = policy.decisions if self.seen is None else {}

    def of(self, facts: OpFacts) -> int:
        """Returns the decision on an operator, :data:`ASK` where each run has its own."""
        known = self.known.get(facts)
        if known is None:
            known = RECOMPUTE
            if facts.is_asked_about:
                answer = self.policy.for_op(facts.operator)
                known = ASK if answer is None else _meaning_of(answer, facts)
            elif facts.is_never_kept:
                if self.policy.for_op(facts.operator) in _MUSTS:
                    self.policy.warn_of_view(facts.operator)
            elif facts.written:
                answer = self.policy.for_op(facts.operator)
                known = RECOMPUTE if answer is None else _meaning_of(answer, facts)
            self.known[facts] = known
            if self.seen is not None:
                self.seen.add(facts.operator)
        return known

    def decide(self, context: SelectiveCheckpointContext, facts: OpFacts, args: Any, kwargs: Any, output: Any) -> int:
        """Returns the decision on a run of an operator: ``SAVE``, ``OFFLOAD``, ``RECOMPUTE``, or ``EITHER``.

        Args:
            context: The mode which ran the operator.
            facts: The operator.
            args: The arguments.
            kwargs: The keyword arguments.
            output: The result.
        """
        known = self.known.get(facts)
        if known is None:
            known = self.of(facts)
        if known == ASK:
            if is_compiled_code_running():
                return SAVE if facts.has_effect else RECOMPUTE
            index = self._num_asked
            self._num_asked = index + 1
            answer = context.consult(self._asks, facts.operator, args, kwargs, output, index)
            if answer is CheckpointPolicy.PREFER_RECOMPUTE and facts.kind is Kind.SAVEABLE:  # the most common, past the rest
                return RECOMPUTE
            known = _meaning_of(answer, facts)
        if known == RECOMPUTE and facts.has_buffered_masks and facts.drops_from_buffer(args, kwargs):
            return SAVE
        return known

    def ask_as_torch(self, context: SelectiveCheckpointContext, facts: OpFacts, args: Any, kwargs: Any, output: Any) -> None:
        """Asks the policy about an operator which runs again whatever the answer, as torch does."""
        answer = decision_of(context.consult(self._asks, facts.operator, args, kwargs, output, None), facts.operator)
        if answer in _MUSTS and facts.is_never_kept:
            self.policy.warn_of_view(facts.operator)

    def of_name(self, name: str) -> int:
        """Returns the decision on a tensor with a name."""
        if self.names is not None:
            self.names.add(name)
        answer = self.policy.for_name(name)
        return RECOMPUTE if answer is None else _DECISIONS[answer]

    def finish(self, seen: Iterable[Any] | None = None) -> None:
        """Ends a region; warns of operators and names of the policy which did not come.

        Args:
            seen: The operators which ran, where the frame has a list.
        """
        if self.seen is not None:
            warn_of_unseen(self.policy, self.seen if seen is None else seen)
        if self.names is not None:
            warn_of_unheard(self.policy, frozenset(self.names))


def _by_count(is_kept: Callable[[Any], bool], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _meaning_of(answer: Any, facts: OpFacts) -> int:
    decision = decision_of(answer, facts.operator)
    if decision is CheckpointPolicy.PREFER_RECOMPUTE:
        if facts.has_effect:
            return SAVE  # an effect happens once
        if facts.is_collective:
            return EITHER
    return _DECISIONS[decision]


def asks_for_torch(policy: Policy) -> Callable[..., Any]:
    """Returns a policy function for torch's own selective contexts, which asks a policy with contexts of this package.

    Args:
        policy: The policy of one region, whose questions are counted from 0.
    """
    asks, num_asked, context = policy.start(), itertools.count(), SelectiveCheckpointContext()

    def ask(of_torch: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        index = next(num_asked) if isinstance(op, OVERLOAD) and facts_of(op).is_asked_about else None
        return context.consult(asks, op, args, kwargs, of_torch.op_output, index)

    return ask
