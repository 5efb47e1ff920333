"""Calls of recorded operators: their arguments as values, their random draws, and the policy's decisions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ckpt_hooks._operators.draws import draw_noting, drops_nothing
from ckpt_hooks._operators.facts import Kind, OpFacts
from ckpt_hooks._torch.autograd import graph_task_id
from ckpt_hooks._torch.tensors import is_kept_anyway, storage_of
from ckpt_hooks.policies.decisions import ASK, EITHER, RECOMPUTE, SAVE

from .tape import Tape
from .values import ANEW, Op, Value

_Tensor = torch.Tensor


def run(tape: Tape, op: Op, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
    """Runs an operator, and notes its draw in ``op``."""
    if not facts.is_random or drops_nothing(func, args, kwargs):
        return facts.call(*args, **kwargs)
    if tape.draws_anew:
        op.draw = ANEW
        return facts.call(*args, **kwargs)
    out, op.draw = draw_noting(func, args, kwargs)
    return out


def decide(tape: Tape, facts: OpFacts, args: Any, kwargs: Any, out: Any) -> int:
    """Returns the decision on an operator which has run; the policy is not asked in a backward inside the region."""
    if tape.decisions is None or graph_task_id() != tape.task:
        decision = EITHER if facts.is_collective or facts.has_effect else RECOMPUTE
        if facts.drops_from_buffer(args, kwargs):
            decision = SAVE
    elif facts.kind is Kind.CAST and tape.decisions.of(facts) == ASK and is_kept_anyway(args[0]):
        decision = RECOMPUTE  # autocast makes this one once and keeps it for a while, so that only some runs have it
    else:
        decision = tape.decisions.decide(tape.recorder, facts, args, kwargs, out)
    if decision == EITHER or (decision == RECOMPUTE and facts.looks_at_grad):
        return SAVE  # to run a collective again, all have to, at the same time
    return decision


def op_of(
    tape: Tape,
    facts: OpFacts,
    args: Any,
    kwargs: Any,
    overwritten: frozenset[int] = frozenset(),
    unread: Sequence[int] = (),
) -> tuple[Op, list[Value]]:
    """Returns an operator about to run, with values in place of tensors, and those values."""
    values: list[Value] = []
    record = partial(_recorded, tape, facts, overwritten, values)
    op = Op()
    op.facts = facts
    if facts.is_like:
        unread = (0,)
    if unread:
        op.args = [tape.shape_of(one) if at in unread and one is not None else record(one) for at, one in enumerate(args)]
    else:
        op.args = list(map(record, args))
    op.kwargs = {name: record(argument) for name, argument in kwargs.items()} if kwargs else kwargs
    op.present = tuple(index for index, argument in enumerate(op.args) if type(argument) is Value)
    op.draw = None
    op.is_plain = False
    op.surroundings = tape.surroundings
    return op, values


def _recorded(tape: Tape, facts: OpFacts, overwritten: frozenset[int], values: list[Value], argument: Any) -> Any:
    """Returns an argument with values in place of tensors; adds the values to ``values``."""
    if isinstance(argument, _Tensor):
        key = id(argument)
        value = tape.tables.uninitialized.get(key) if key in overwritten else None
        if value is None:
            value = tape.tables.known.get(key)
        if value is None or storage_of(argument) != value.store.address:
            value = tape.value_of(argument, facts)
        values.append(value)
        return value
    if isinstance(argument, (list, tuple)) and any(isinstance(one, _Tensor) for one in argument):
        return [_recorded(tape, facts, overwritten, values, one) for one in argument]
    return argument
