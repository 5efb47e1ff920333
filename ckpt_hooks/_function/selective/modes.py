"""Dispatch modes of selective regions: a policy decides for each operator whether its output is kept or computed again.

Two dispatch modes see the operators below autograd. The mode of forward notes each operator and asks the policy; the mode of a
recompute hands out kept outputs instead of running the operator. Kept outputs are in :mod:`.selection`; the check of a
recompute's operators is in :mod:`.sequence`; a recompute with other operators is handled by :mod:`.aligning`; the kinds of
operators which may be skipped are in :mod:`ckpt_hooks._operators`.

A policy which looks at the operator alone is asked once an operator in the program, and the answer is looked up from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Self

from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.hooks import StopRecompute, are_of_frame
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._core.unseen import WatchesUnseen, run_watched
from ckpt_hooks._operators.draws import watch_draw
from ckpt_hooks._operators.facts import KNOWN, Kind, OpFacts, facts_of
from ckpt_hooks._torch.autograd import graph_task_id, sequence_number, top_saved_tensors_hooks
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.tensors import is_kept_anyway
from ckpt_hooks.errors import DeterminismError
from ckpt_hooks.policies.base import Policy
from ckpt_hooks.policies.context import SelectiveCheckpointContext
from ckpt_hooks.policies.decisions import ASK, EITHER, OFFLOAD, RECOMPUTE, SAVE, Decisions

from .aligning import Aligning
from .selection import Selection

# What the mode of forward does with an operator.
_PASS, _RANGE, _CAST, _REPLAY, _LOOK, _SAVE, _OFFLOAD, _ASK, _ASK_AS_TORCH = range(9)

#: What to do with an operator, how to call it, and what is known of it.
_Plan = tuple[int, Any, OpFacts]

_IGNORED, _RANGES, _VIEW, _CASTS, _WRITES = Kind.IGNORED, Kind.RANGE, Kind.VIEW, Kind.CAST, Kind.WRITES
_RANDOM, _EFFECT = Kind.RANDOM, Kind.EFFECT

# What runs again in any case, and may touch an output that was kept.
_LOOKED_AT = (Kind.WRITES, Kind.REWRITES, Kind.ALIASES)

_ACTIONS = {RECOMPUTE: _REPLAY, EITHER: _REPLAY, SAVE: _SAVE, OFFLOAD: _OFFLOAD, ASK: _ASK}


def _plan_for(decisions: Decisions, operator: Any) -> _Plan:
    facts = facts_of(operator)
    kind, decision = facts.kind, decisions.of(facts)
    if kind is Kind.IGNORED:
        action = _PASS
    elif kind is Kind.RANGE:
        action = _RANGE
    elif kind is Kind.CAST:
        action = _CAST
    elif decisions.policy.is_asked_as_torch and not facts.is_asked_about:
        action = _ASK_AS_TORCH
    elif kind is Kind.VIEW:
        action = _PASS
    elif facts.has_buffered_masks and facts.is_asked_about:
        action = _ASK
    else:
        action = _LOOK if kind in _LOOKED_AT and decision != ASK else _ACTIONS[decision]
    return action, facts.call, facts


class Record(SelectiveCheckpointContext):
    """Notes the operators of a forward, and keeps outputs by the policy's decisions."""

    def __init__(self, selection: Selection, policy: Policy) -> None:
        super().__init__()
        self.selection = selection
        selection.policy_in_words = policy.__repr__
        self._decisions = Decisions(policy)
        self._plan: dict[int, _Plan] = policy.plan
        sequence = selection.sequence
        self._note, self._mark, self._count = sequence.operators.append, sequence.marks.append, sequence.nodes.append
        self._saved: Sequence[int] = ()
        self._task = graph_task_id()
        if policy.expects:
            selection.when_closed = self._decisions.finish  # not this mode's: that would be a cycle

    def __enter__(self) -> Self:
        if self.selection.sequence.path is None:
            _refuse_hidden()
        self._saved = self.selection.numbers
        self.selection.sequence.begin()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self.selection.sequence.end()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plan = self._plan.get(id(func))
        if plan is None:
            plan = self._plan[id(func)] = _plan_for(self._decisions, func)
        action, call, facts = plan
        # Operators of a backward in the middle of forward, which adds to gradients that a recompute finds there, do not count.
        if action <= _RANGE or self.paused or graph_task_id() != self._task:
            output = call(*args, **kwargs) if kwargs else call(*args)
            if action == _RANGE:
                self.note_range(func, args)
            elif action and facts.kind is _WRITES:
                count_writes(func, args)
            return output
        if action == _REPLAY:
            self._note(func)
            self._mark(len(self._saved))
            self._count(sequence_number())
            return call(*args, **kwargs) if kwargs else call(*args)
        if action == _SAVE:
            return self._save(facts, args, kwargs or {})
        if action == _ASK:
            return self._ask(facts, args, kwargs or {})
        if action == _CAST:
            if is_kept_anyway(args[0]):
                self.selection.sequence.note_cast()
                return call(*args, **kwargs) if kwargs else call(*args)
            return self._ask(facts, args, kwargs or {})
        if action == _OFFLOAD:
            return self._save(facts, args, kwargs or {}, offload=True)
        if facts.kind is not _VIEW:
            self._note(func)
            self._mark(len(self._saved))
            self._count(sequence_number())
        return self._ask_as_torch(facts, args, kwargs or {})

    @skipped
    def run_function(self, around: list[WatchesUnseen], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a custom function, whose kernels may write to kept outputs: to arguments, and to results of its operators."""
        outputs = self.selection.outputs
        outputs.part_from((args, kwargs))
        self.is_in_function = outputs.is_copying = True
        try:
            return run_watched(around, function, args, kwargs)
        finally:
            self.is_in_function = outputs.is_copying = False

    def run_unseen(self, writer: str, args: Any, call: Callable[[], Any]) -> Any:
        """Runs a call which may write to kept outputs among its arguments."""
        self.selection.outputs.part_from(args)
        return call()

    def _save(self, facts: OpFacts, args: Any, kwargs: Any, *, offload: bool = False) -> Any:
        place, func, kind = len(self.selection.sequence.operators), facts.operator, facts.kind
        self._note(func)
        self._mark(len(self._saved))
        self._count(sequence_number())
        watch = watch_draw(func, args, kwargs) if kind is _RANDOM or kind is _EFFECT else None
        output = facts.call(*args, **kwargs)
        draw = None if watch is None else watch()
        self.selection.outputs.keep(place, output, args, kwargs, draw, facts, offload=offload)
        return output

    def _ask(self, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs an operator, and keeps its output if the policy says so."""
        place, func, kind = len(self.selection.sequence.operators), facts.operator, facts.kind
        self._note(func)
        self._mark(len(self._saved))
        self._count(sequence_number())
        watch = watch_draw(func, args, kwargs) if kind is _RANDOM or kind is _EFFECT else None
        output = facts.call(*args, **kwargs)
        decision = self._decisions.decide(self, facts, args, kwargs, output)
        if kind in _LOOKED_AT:
            self._look_at(facts, args, kwargs, output)
        elif decision in (SAVE, OFFLOAD):
            draw = None if watch is None else watch()
            self.selection.outputs.keep(place, output, args, kwargs, draw, facts, offload=decision == OFFLOAD)
        return output

    def _ask_as_torch(self, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Runs an operator without keeping its output. A policy in torch's form is asked all the same."""
        output = facts.call(*args, **kwargs)
        if self._decisions.policy.is_asked_as_torch:
            self._decisions.ask_as_torch(self, facts, args, kwargs, output)
        if facts.kind in _LOOKED_AT:
            self._look_at(facts, args, kwargs, output)
        return output

    def _look_at(self, facts: OpFacts, args: Any, kwargs: Any, output: Any) -> None:
        """Updates the kept outputs after an operator which may have touched them."""
        if facts.kind is _WRITES:
            count_writes(facts.operator, args)
        if self.selection.outputs.entries:
            if facts.kind is Kind.ALIASES:
                self.selection.outputs.watch((args, kwargs), output)
            else:
                self.selection.outputs.forget(facts.written_in(args, kwargs))


class _Reuse(QuietDispatchMode):
    """Hands out the kept outputs of forward in one recompute."""

    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self.error: DeterminismError | None = None  # the error for the first operator that differs from forward
        self._selection = selection
        self._sequence, self._operators = selection.sequence, selection.sequence.operators
        self._entries = selection.outputs.entries
        self.marks: list[int] = []  # for each operator of the recompute, the number of tensors saved by the region before
        self._saved = selection.values
        self._task = graph_task_id()
        self._last, self._has_stopped = selection.last, selection.has_stopped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = KNOWN.get(id(func)) or facts_of(func)
        kind, call = facts.kind, facts.call
        if (
            kind is not _VIEW
            and kind is not _IGNORED
            and kind is not _RANGES
            and not self.paused
            and graph_task_id() == self._task
            and not (kind is _CASTS and is_kept_anyway(args[0]))
        ):
            place = len(self.marks)
            if kind is _EFFECT:
                if self._has_stopped():  # and the function goes on all the same
                    raise StopRecompute
                if place not in self._entries:
                    self._selection.has_run_effects = True
            self.marks.append(len(self._saved))
            operators = self._operators
            if place >= len(operators) or operators[place] is not func:
                error = self._sequence.compare(place, func)
                if error is not None and not self._has_stopped():
                    self.error = self.error or error
                    self._selection.differs = True
                    try:
                        raise error
                    finally:
                        del error  # its traceback has this call, which would keep it alive in turn
            if place in self._entries:
                output = self._selection.outputs.take(place, func, args, kwargs or {}, last=self._last)
                if output is not MISSING:
                    return output
        output = call(*args, **kwargs) if kwargs else call(*args)
        if kind is _WRITES:
            count_writes(func, args)
        elif kind is _RANGES:
            self.note_range(func, args)
        return output


class Recompute:
    """The context of each recompute: enters a new mode each time, since one recompute may run inside another."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._running: list[_Reuse | Aligning] = []  # outermost first; a region is recomputed by one thread at a time

    def __enter__(self) -> None:
        mode = Aligning(self.selection) if self.selection.aligned else _Reuse(self.selection)
        mode.__enter__()
        self._running.append(mode)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        mode = self._running.pop()
        mode.__exit__(kind, error, traceback)
        if isinstance(mode, Aligning):
            return
        self.selection.marks_of_rerun = mode.marks
        found, mode.error = mode.error, None  # which what the error's traceback has would keep alive
        try:
            if found is not None and error is not found:
                raise found  # which the function swallowed
        finally:
            del found, error


def _refuse_hidden() -> None:
    """Raises if a region runs under a selective context hidden inside another context.

    Outside of regions a hidden context is useful: to torch's own checkpoint, whose hooks are innermost there.
    """
    frame, hooks = stack.innermost, top_saved_tensors_hooks(False)
    if frame is not None and hooks is not None and are_of_frame(hooks):
        raise TypeError(
            f"context_fn of region {'/'.join(format_path(frame.path))!r} returned a context of "
            "create_selective_checkpoint_contexts within another context, where the region does not find it. Return the two as "
            "they are. For other contexts around them, write checkpoint(policy=policy, context_fn=others)(function)."
        )
