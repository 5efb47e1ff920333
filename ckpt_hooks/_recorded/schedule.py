"""The plan of a replay: the values needed by backward, the readers of each, and whether the order of requests matters.

A lasting plan holds numbers, not values. Values would stay alive after their handles, which backward drops one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .values import Op, Value, values_on_tape


class Work:
    """The steps which bring back some values."""

    __slots__ = ("crossing", "leaves", "steps")

    def __init__(self) -> None:
        # Operators to run and values after a write to note, by number, in the order of numbers.
        self.steps: dict[int, Op | Value] = {}
        self.leaves: list[Value] = []  # kept values
        self.crossing: list[Value] = []  # values of the frame around


class Plan:
    """The reads of a frame's values in one backward."""

    __slots__ = ("asked", "in_order", "readers", "written")

    def __init__(self) -> None:
        self.readers: dict[int, int] = {}  # the number of reads of each value, by operators and by backward
        self.asked: set[int] = set()  # numbers of the values asked for in storages which operators write to
        self.written: set[int] = set()  # identities of storages which operators write to
        # Whether a later operator overwrites some value after a read, so that all operators have to run at once, in the order
        # of recording.
        self.in_order = False


def _more(op: Op) -> list[Value]:
    """Returns the values an operator reads in lists and by name."""
    args = op.args
    arguments = [*(args[position] for position in op.facts.lists if position < len(args)), *op.kwargs.values()]
    return [value for argument in arguments for value in values_on_tape(argument)]


def plan_for(roots: Iterable[Value], start: int, *, nested: bool) -> tuple[Plan, Work]:
    """Returns the plan for some values, and all the work to bring them back."""
    # Each backward pays for this walk, so the step for each read value is written out. One walk for this and ``work_for``, by
    # way of lists of each step's reads, was a third slower.
    plan, work = Plan(), Work()
    steps, readers = work.steps, plan.readers
    stack: list[Value] = []
    asked = list(roots)
    writes = False
    for value in asked:
        number = value.number
        if number in readers:
            readers[number] += 1
        else:
            readers[number] = 1
            stack.append(value)
    while stack:
        value = stack.pop()
        saved = value.saved
        if saved is not None:
            (work.crossing if nested and saved.is_packed else work.leaves).append(value)
            continue
        op, before = value.op, value.before
        assert op is not None
        if before is None:
            if op.number <= start:
                work.crossing.append(value)
                continue
        else:
            # In an earlier storage, of which the frame around may have any view.
            if value.store.birth <= start:
                work.crossing.append(value)
                continue
            steps[value.number] = value
            number = before.number
            if number in readers:
                readers[number] += 1
            else:
                readers[number] = 1
                stack.append(before)
        if op.number in steps:
            continue
        steps[op.number] = op
        facts, args = op.facts, op.args
        if facts.written:
            writes = True
        for position in op.present:
            value = args[position]
            number = value.number
            if number in readers:
                readers[number] += 1
            else:
                readers[number] = 1
                stack.append(value)
        if facts.lists or op.kwargs:
            for value in _more(op):
                number = value.number
                if number in readers:
                    readers[number] += 1
                else:
                    readers[number] = 1
                    stack.append(value)
    if writes:
        _look_at_writes(plan, [step for step in steps.values() if type(step) is Op], asked)
    return plan, work


def work_for(value: Value, start: int, tensors: Mapping[int, object], ran: set[int], *, nested: bool) -> Work:
    """Returns the work to bring back one more value of a frame."""
    work = Work()
    steps = work.steps
    stack, seen = [value], {value.number}
    while stack:
        value = stack.pop()
        saved = value.saved
        if saved is not None:
            (work.crossing if nested and saved.is_packed else work.leaves).append(value)
            continue
        op, before = value.op, value.before
        assert op is not None
        if before is None:
            if op.number <= start:
                work.crossing.append(value)
                continue
            read = []
        else:
            if value.store.birth <= start:
                work.crossing.append(value)
                continue
            steps[value.number] = value
            read = [before]
        if op.number not in steps and op.number not in ran:
            steps[op.number] = op
            args = op.args
            read += [args[position] for position in op.present]
            if op.facts.lists or op.kwargs:
                read += _more(op)
        for value in read:
            number = value.number
            if number not in tensors and number not in seen:
                seen.add(number)
                stack.append(value)
    return work


def _read(op: Op) -> list[Value]:
    """Returns the values whose contents an operator reads: not the base of a view, and not a target of a write."""
    if op.facts.is_view or op.facts.is_inplace_view:
        return []
    written = {written.position for written in op.facts.written}
    names = {written.name for written in op.facts.written}
    return [
        *(value for position, argument in enumerate(op.args) if position not in written for value in values_on_tape(argument)),
        *(value for name, argument in op.kwargs.items() if name not in names for value in values_on_tape(argument)),
    ]


def _targets(op: Op) -> list[Value]:
    """Returns the values an operator writes to."""
    return [value for written in op.facts.written for value in values_on_tape(written.of(op.args, op.kwargs))]


def _look_at_writes(plan: Plan, ops: list[Op], asked: list[Value]) -> None:
    last: dict[int, int] = {}
    for op in ops:
        if op.facts.written:
            for value in _targets(op):
                last[id(value.store)] = max(op.number, last.get(id(value.store), 0))
    plan.written = set(last)
    plan.asked = {value.number for value in asked if id(value.store) in last}
    if any(value.number < last.get(id(value.store), 0) for value in asked):
        plan.in_order = True
        return
    for op in ops:
        if op.facts.is_view:
            continue
        if op.is_plain:  # as in ``_read``, which is slower
            args = op.args
            for position in op.present:
                value = args[position]
                if value.number < last.get(id(value.store), 0):
                    plan.in_order = True
                    return
        elif any(value.number < last.get(id(value.store), 0) for value in _read(op)):
            plan.in_order = True
            return
