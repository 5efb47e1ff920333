"""What backward needs of a frame's tape: which values, by how many readers each, and whether the order of asking matters.

A plan that is kept holds numbers, not values: it must not keep alive what the handles that it was made for let go of, one by
one, as backward comes past them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .values import Op, Value, values_of

__all__ = ["Plan", "Work", "plan_for", "work_for"]


class Work:
    """What has to be done to have some values.

    Attributes:
        steps: Operators to run and values after a write to note, by number: in that order.
        leaves: Values that are kept.
        crossing: Values of the frame around.
    """

    __slots__ = ("crossing", "leaves", "steps")

    def __init__(self) -> None:
        self.steps: dict[int, Op | Value] = {}
        self.leaves: list[Value] = []
        self.crossing: list[Value] = []


class Plan:
    """How values of a frame are read in one backward.

    Attributes:
        readers: How often each value is read: by operators that run, and by those who asked.
        asked: Numbers of values that were asked for, of those in storages that operators write to.
        written: Identities of storages that operators write to.
        in_order: Whether some value is read that a later operator overwrites, so that all of them have to run in the order of
            recording, at once.
    """

    __slots__ = ("asked", "in_order", "readers", "written")

    def __init__(self) -> None:
        self.readers: dict[int, int] = {}
        self.asked: set[int] = set()
        self.written: set[int] = set()
        self.in_order = False


def _more(op: Op) -> list[Value]:
    """Returns the values that an operator reads in lists and by name."""
    args = op.args
    arguments = [*(args[position] for position in op.facts.lists if position < len(args)), *op.kwargs.values()]
    return [value for argument in arguments for value in values_of(argument)]


def plan_for(roots: Iterable[Value], start: int, *, nested: bool) -> tuple[Plan, Work]:
    """Returns the plan for some values, and all the work that it takes.

    Each backward pays for this walk, so what it does with a value that is read is written out. (One walk for this and
    :func:`work_for`, by way of lists of what each step reads, was a third slower.)

    Args:
        roots: The values, as often as they are wanted.
        start: Where the frame begins; what was there before belongs to the frame around.
        nested: Whether there is one. What hooks have to bring back it asks for then, so that they are asked once.
    """
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
            # In a storage that was there, of which the frame around may have any view.
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
        _look_at_writes(plan, [step for _, step in sorted(steps.items()) if type(step) is Op], asked)
    return plan, work


def work_for(value: Value, start: int, tensors: Mapping[int, object], ran: set[int], *, nested: bool) -> Work:
    """Returns the work that it takes to have one value of a frame more.

    Args:
        value: The value.
        start: Where the frame begins.
        tensors: What is there, by number.
        ran: Operators that ran.
        nested: Whether there is a frame around.
    """
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
    """Returns what an operator reads, other than to look at it from another side, or to write to it."""
    if op.facts.is_view or op.facts.is_inplace_view:
        return []
    written = {written.position for written in op.facts.written}
    names = {written.name for written in op.facts.written}
    return [
        *(value for position, argument in enumerate(op.args) if position not in written for value in values_of(argument)),
        *(value for name, argument in op.kwargs.items() if name not in names for value in values_of(argument)),
    ]


def _targets(op: Op) -> list[Value]:
    """Returns what an operator writes to."""
    return [value for written in op.facts.written for value in values_of(written.of(op.args, op.kwargs))]


def _look_at_writes(plan: Plan, ops: list[Op], asked: list[Value]) -> None:
    last: dict[int, int] = {}
    for op in ops:
        for value in _targets(op):
            last[id(value.store)] = op.number
    plan.written = set(last)
    plan.asked = {value.number for value in asked if id(value.store) in last}
    read = [*asked, *(value for op in ops for value in _read(op))]
    plan.in_order = any(value.number < last.get(id(value.store), 0) for value in read)
