"""The decisions of a policy in a region, and the warning if nothing that a policy names ever runs.

A decision by the operator alone is cached. Other policies are asked about each run of an operator whose output can replace
another run (``OpFacts.is_asked_about``), with the number of earlier questions in the region.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._core.call_sites import site_of, warn_user
from ckpt_hooks._core.misuse import check_signature
from ckpt_hooks._core.modes import is_compiled_code_running
from ckpt_hooks._core.unseen import WatchesUnseen
from ckpt_hooks._operators.facts import OpFacts, OpKind, facts_of
from ckpt_hooks._tensors.nested import tensors_in
from ckpt_hooks._torch.functions import OVERLOAD
from ckpt_hooks._torch.tensors import inner_tensors, storage_of

from .base import PARAMETERS, UNASKED, Policy, by_count, decision_of

_TorchContext = torch.utils.checkpoint.SelectiveCheckpointContext


class SelectiveCheckpointContext(WatchesUnseen, _TorchContext):
    """Tells a policy function about the operator that has just run; also the dispatch mode of a region under a policy.

    A region has one context and passes it to the policy each time. The attributes are valid during that call only, so a policy
    that stores the context keeps no tensor alive.

    Args:
        is_recompute: Always False: regions ask the policy in forward only. Present for code written for torch.
        op_output: The result of the operator.

    Attributes:
        is_recompute: As above.
        op_output: As above.
        index: The number of earlier questions in the region. None for views and in-place operators, whose outputs are never
            kept; only ``create_selective_checkpoint_contexts`` asks about these, as torch does.

    Example:
        >>> import torch
        >>> from ckpt_hooks.policies import CheckpointPolicy, SelectiveCheckpointContext
        >>> def save_large(ctx, op, *args, **kwargs):
        ...     return CheckpointPolicy.MUST_SAVE if ctx.nbytes > 1024 else CheckpointPolicy.PREFER_RECOMPUTE
        >>> save_large(SelectiveCheckpointContext(op_output=torch.ones(512)), torch.ops.aten.sin.default)
        <CheckpointPolicy.MUST_SAVE: 0>
    """

    index: int | None = None
    _arguments: Any = ()
    _site: str | None = None

    def __init__(self, *, is_recompute: bool = False, op_output: Any = None) -> None:
        super().__init__()
        self.is_recompute = is_recompute
        self.op_output = op_output

    def consult(self, policy: Callable[..., Any], op: Any, args: Any, kwargs: Any, output: Any, index: int | None) -> Any:
        """Returns the answer of a policy on one run of an operator.

        Args:
            policy: Is called with this context, the operator and its arguments.
            op: The operator.
            args: The positional arguments.
            kwargs: The keyword arguments.
            output: The result.
            index: The number of earlier questions in the region; None for an operator whose output is never kept.
        """
        self.op_output, self.index, self._arguments = output, index, (args, kwargs)
        try:
            return policy(self, op, *args, **kwargs)
        except TypeError:  # the policy raised it, or does not take these arguments, which gets a clearer error
            check_signature(policy, "policy", PARAMETERS, (self, op, *args), kwargs)
            raise
        finally:
            self.op_output = self.index = self._site = None
            self._arguments = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the operator's outputs, each storage counted once; storages of its arguments are not counted.

        A tensor without a storage, such as a sparse tensor, counts as a dense tensor of its shape.
        """
        counted = {storage_of(tensor) for tensor in _tensors_in(self._arguments)}
        total = 0
        for tensor in _tensors_in(self.op_output):
            storage = storage_of(tensor)
            if storage is None:
                total += tensor.numel() * tensor.element_size()
            elif storage not in counted:
                counted.add(storage)
                total += tensor.untyped_storage().nbytes()
        return total

    @property
    def site(self) -> str | None:
        """The line of the user's program which runs the operator, as in ``"model.py:12"``; None while no policy decides.

        The look-up happens on reading.
        """
        if self._site is None:
            frame = sys._getframe(1)
            while frame is not None and not (frame.f_code is _CONSULT and frame.f_locals["self"] is self):
                frame = frame.f_back  # type: ignore[assignment]
            self._site = site_of(frame)
        return self._site


_CONSULT = SelectiveCheckpointContext.consult.__code__


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in ``value``, and the inner tensors of wrapper subclasses in their place."""
    return [tensor for tensor in tensors_in(value) if type(tensor) is torch.Tensor or not inner_tensors(tensor)]


RECOMPUTE: Final = 0
SAVE: Final = 1
OFFLOAD: Final = 2
#: The policy has no decision on the operator, and has to be asked about each run.
ASK: Final = 3

_DECISIONS = {
    CheckpointPolicy.MUST_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.MUST_SAVE: SAVE,
    CheckpointPolicy.PREFER_SAVE: SAVE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: OFFLOAD,
}
if hasattr(CheckpointPolicy, "PREFER_CPU_OFFLOAD"):
    _DECISIONS[CheckpointPolicy.PREFER_CPU_OFFLOAD] = OFFLOAD

#: The number of regions before the warning: the first region may be a stem without the operators that the policy names.
_LOOKED_THROUGH = 3

# The number of regions that had nothing named by a policy, by the policy's class, title and names: a program may make an equal
# policy in each step. Minus infinity once a region had something named, or once the user was warned of all equal policies.
_looked_through: dict[Any, float] = {}
_MOST_LOOKED_THROUGH = 1_000


class Decisions:
    """The decisions of a policy in a region."""

    __slots__ = ("_asks", "_num_asked", "expected", "is_kept", "known", "policy", "seen")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        # For a policy that only counts runs, says whether to keep the next run of an operator whose decision is ``ASK``.
        self.is_kept = policy.count_runs()
        self._asks: Callable[..., Any] | None = None if self.is_kept is None else by_count(self.is_kept)
        self._num_asked = 0
        self.expected = policy.expects
        # Operators that ran, and names given to tensors; None if the policy expects neither.
        self.seen: set[Any] | None = set() if self.expected else None
        self.known: dict[OpFacts, int] = policy.decisions if self.seen is None else {}

    def _start(self) -> Callable[..., Any]:
        self._asks = self.policy.start()
        return self._asks

    def of(self, facts: OpFacts) -> int:
        """Returns the decision on an operator, :data:`ASK` where each run has its own."""
        known = self.known.get(facts)
        if known is None:
            known = RECOMPUTE
            if facts.is_asked_about:
                answer = self.policy.for_op(facts.operator)
                known = ASK if answer is None else _meaning_of(answer, facts)
            elif facts.written and not facts.is_never_kept:  # a policy that names this operator keeps the tensor written to
                answer = self.policy.for_op(facts.operator)
                known = RECOMPUTE if answer is None else _meaning_of(answer, facts)
            if known == RECOMPUTE and self.policy.is_asked_as_torch and not facts.is_asked_about and facts.kind not in UNASKED:
                known = ASK
            self.known[facts] = known
            if self.seen is not None:
                self.seen.add(facts.operator)
        return known

    def decide(self, context: SelectiveCheckpointContext, facts: OpFacts, args: Any, kwargs: Any, output: Any) -> int:
        """Returns the decision on a run of an operator, which is never :data:`ASK`."""
        known = self.known.get(facts)
        if known is None:
            known = self.of(facts)
        if known == ASK:
            if not facts.is_asked_about:  # asked since torch asks too; the operator runs again whatever the answer
                if not is_compiled_code_running():
                    answer = context.consult(self._asks or self._start(), facts.operator, args, kwargs, output, None)
                    decision_of(answer, facts.operator)
                return RECOMPUTE
            if is_compiled_code_running() and not facts.is_compiled:
                return SAVE if facts.has_effect else RECOMPUTE
            index = self._num_asked
            self._num_asked = index + 1
            answer = context.consult(self._asks or self._start(), facts.operator, args, kwargs, output, index)
            if answer is CheckpointPolicy.PREFER_RECOMPUTE and facts.kind is OpKind.SAVEABLE:  # the most common answer
                return RECOMPUTE
            known = _meaning_of(answer, facts)
        if known == RECOMPUTE and facts.has_buffered_masks and facts.drops_from_buffer(args, kwargs):
            return SAVE
        return known

    def of_name(self, name: str) -> int:
        if self.seen is not None:
            self.seen.add(name)
        answer = self.policy.for_name(name)
        return RECOMPUTE if answer is None else _DECISIONS[answer]

    def finish(self) -> None:
        """Warns, once for each policy, if the first regions under the policy had nothing named in the policy."""
        policy, expected = self.policy, self.expected
        if self.seen is None:
            return
        if len(_looked_through) >= _MOST_LOOKED_THROUGH:
            _looked_through.clear()
        key = type(policy), policy.title, expected
        if policy.expects and expected.isdisjoint(self.seen):
            policy.looked_through += 1
            of_all = _looked_through[key] = _looked_through.get(key, 0) + 1
            if max(policy.looked_through, of_all) < _LOOKED_THROUGH:
                return
            warn_user(
                f"{policy!r} names {policy.kind} that none of the first {_LOOKED_THROUGH} regions under it had: "
                f"{', '.join(sorted(map(str, expected)))}. {policy.advice}"
            )
        policy.expects = frozenset()
        # A policy shared by three regions warns for itself. Equal policies, such as one made in each step, warn once together.
        is_shared = policy.looked_through == _LOOKED_THROUGH
        _looked_through[key] = min(_looked_through.get(key, 0), 0) if is_shared else -math.inf


def _meaning_of(answer: Any, facts: OpFacts) -> int:
    decision = decision_of(answer, facts.operator)
    if decision is CheckpointPolicy.PREFER_RECOMPUTE and (facts.has_effect or facts.is_collective):
        return SAVE  # a second run would have the effect twice, and a collective would need all processes at once
    return _DECISIONS[decision]


def asks_for_torch(policy: Policy) -> Callable[..., Any]:
    """Returns a policy function for torch's own selective contexts, which asks a policy with contexts of this package."""
    asks, num_asked, context = policy.start(), itertools.count(), SelectiveCheckpointContext()

    def ask(of_torch: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        index = next(num_asked) if isinstance(op, OVERLOAD) and facts_of(op).is_asked_about else None
        output = getattr(of_torch, "op_output", None)  # torch 2.11 does not set the attribute
        return context.consult(asks, op, args, kwargs, output, index)

    return ask
