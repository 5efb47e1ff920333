"""The first operator by which a recompute parts from forward, found in the logs of both runs, and its words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckpt_hooks._core.call_sites import module_in_words
from ckpt_hooks._operators.facts import same_operator
from ckpt_hooks._operators.operator_log import Entry

__all__ = ["Divergence", "divergence_in_words", "first_divergence", "up_to"]

_WINDOW = 100  # operators of each run in which the two runs are laid beside each other again
_AROUND = 3  # operators of context before and behind


class Divergence(NamedTuple):
    """Operators of one of the two runs, or of both, without counterparts in the other.

    Attributes:
        start: The place of the first in forward.
        end: The place behind the last in forward.
        start_found: The place of the first in the recompute.
        end_found: The place behind the last in the recompute.
    """

    start: int
    end: int
    start_found: int
    end_found: int


def first_divergence(forward: Sequence[Entry], recompute: Sequence[Entry], *, is_whole: bool) -> Divergence | None:
    """Returns the first divergence of two runs; None without one.

    A table built in one of the two runs alone is no cause: a divergence without gradients comes second to later ones.

    Args:
        forward: The operators of forward.
        recompute: The operators of the recompute.
        is_whole: Whether the recompute ran to the end of the function, so that missing operators tell.
    """
    first, place, found = None, 0, 0
    while True:
        while place < len(forward) and found < len(recompute) and _same(forward[place], recompute[found]):
            place, found = place + 1, found + 1
        if found == len(recompute) and (place == len(forward) or not is_whole):
            return first
        divergence = _behind(forward, place, recompute, found, is_whole=is_whole)
        one, other = forward[place : divergence.end], recompute[found : divergence.end_found]
        moved = len(one) == len(other) and all(map(_same_kinds, one, other))
        if not moved and ((one and other) or any(entry.grad for entry in (*one, *other))):
            return divergence
        first = first or (None if moved else divergence)
        place, found = divergence.end, divergence.end_found


def up_to(divergence: Divergence | None, forward: Sequence[Entry], recompute: Sequence[Entry]) -> Sequence[Entry]:
    """Returns the recompute's operators up to a divergence, and the first of it if forward ran the same operator there."""
    if divergence is None:
        return recompute
    start, end, found, end_found = divergence
    return recompute[: found + int(start < end and found < end_found and _same_operator(forward[start], recompute[found]))]


def _same_kinds(one: Entry, other: Entry) -> bool:
    """Whether two operators are the same, with arguments and results of the same kinds; draws may differ in a generator."""
    if one.operator is not other.operator:
        return same_operator(one.operator, other.operator)
    kinds, others = one.kinds(), other.kinds()
    return kinds == others or repr(kinds) == repr(others)  # as for arguments that are not a number


def _same_operator(one: Entry, other: Entry) -> bool:
    return same_operator(one.operator, other.operator)


def _same_line(one: Entry, other: Entry) -> bool:
    """Whether the same operator ran at the same line, as far as the lines are of the region."""
    if not _same_operator(one, other):
        return False
    (code, line, _, is_inside), (code_found, line_found, _, is_inside_too) = one.place, other.place
    return not (is_inside and is_inside_too) or (code is code_found and line == line_found)


def _same(one: Entry, other: Entry) -> bool:
    return _same_line(one, other) and _same_kinds(one, other)


def _behind(forward: Sequence[Entry], place: int, recompute: Sequence[Entry], found: int, *, is_whole: bool) -> Divergence:
    """Returns the divergence that begins at two places: the fewest operators before two that agree, or before both ends.

    Operators of the same line are looked for first, then the same operators at whatever line.
    """
    most, most_found = min(_WINDOW, len(forward) - place), min(_WINDOW, len(recompute) - found)
    for match in (_same_line, _same_operator):
        for distance in range(most + most_found + 1):
            for count in range(max(0, distance - most_found), min(distance, most) + 1):
                one, other = place + count, found + distance - count
                if one == len(forward) or other == len(recompute):
                    agree = is_whole and match is _same_operator and one == len(forward) and other == len(recompute)
                else:
                    is_last = not distance or one + 1 == len(forward) or other + 1 == len(recompute)
                    agree = match(forward[one], recompute[other]) and (is_last or match(forward[one + 1], recompute[other + 1]))
                if agree and distance:
                    return Divergence(place, one, found, other)
                if agree:  # the same operator, of other kinds or at another line
                    return Divergence(place, place + 1, found, found + 1)
    return Divergence(place, place + (most if is_whole else min(most, 1)), found, found + most_found)


def divergence_in_words(
    divergence: Divergence, forward: Sequence[Entry], recompute: Sequence[Entry], names: Mapping[int, str]
) -> str:
    """Returns sentences on a divergence: operators, lines and modules of both runs, and the operators around.

    Args:
        divergence: The divergence.
        forward: The operators of forward.
        recompute: The operators of the recompute.
        names: The names of modules (:func:`module_names`).
    """
    place, end, found, end_found = divergence
    one, other = forward[place] if place < end else None, recompute[found] if found < end_found else None
    lines = [entry for entry in (one, other) if entry is not None]
    if one is not None and other is not None:
        (code, line, *_), (code_found, line_found, *_) = one.place, other.place
        if code is code_found:
            lines.sort(key=lambda entry: entry.place[1])  # the earlier line is one that the other run has passed by
        if (code, line) == (code_found, line_found):
            lines.pop()
    blamed = lines[0]
    if one is None:
        head = f"The recompute ran {blamed.operator}, and forward did not"
    elif other is None:
        head = f"Forward ran {blamed.operator}, and the recompute did not"
    elif _same_operator(one, other):
        head = f"{blamed.operator} had other arguments, or another result, in the recompute than in forward"
    else:
        head = f"Forward ran {one.operator}, and the recompute ran {other.operator}"
    also = "".join(f"\nwhere {'forward' if entry is one else 'the recompute'} is at {entry.line(names)}" for entry in lines[1:])
    runs = [
        _run_in_words("forward", one or (forward[place] if place < len(forward) else None), one is None, names),
        _run_in_words("recompute", other or (recompute[found] if found < len(recompute) else None), other is None, names),
    ]
    return (
        f"the recompute first differs at {blamed.line(names)}{also}\n{head}.\n{''.join(runs)}"
        f"{_modes(one, forward, recompute, names)}"
        f"Operators around it in forward:\n{_around(forward, place, end)}"
        f"Operators around it in the recompute:\n{_around(recompute, found, end_found)}"
    )


def _run_in_words(name: str, entry: Entry | None, is_next: bool, names: Mapping[int, str]) -> str:
    if entry is None:
        return f"  {name}: nothing more\n"
    return f"  {name}{', next' if is_next else ''}: {entry.in_words()}\n    at {entry.line(names)}\n"


def _modes(one: Entry | None, forward: Sequence[Entry], recompute: Sequence[Entry], names: Mapping[int, str]) -> str:
    """Returns a sentence on a module in another mode in the recompute than in forward, the module of an operator first."""
    modes = {entry.place[2]: entry.training for entry in forward if entry.training is not None}
    found = {entry.place[2]: entry.training for entry in recompute if entry.training is not None}
    references = sorted(modes, key=lambda reference: one is None or reference is not one.place[2])
    for reference in references:
        module = None if reference is None else reference()
        if module is None:
            continue
        # A module in evaluation mode may run no operator, as dropout does.
        now = found.get(reference, module.training if one is not None and reference is one.place[2] else modes[reference])
        if now != modes[reference]:
            before, after = ("training" if mode else "evaluation" for mode in (modes[reference], now))
            return (
                f"{module_in_words(module, names)} was in {before} mode in forward, and is in {after} mode in the recompute: "
                "call train() and eval() after backward.\n"
            )
    return ""


def _around(entries: Sequence[Entry], start: int, end: int) -> str:
    first, last = max(0, start - _AROUND), min(len(entries), max(end, start) + _AROUND)
    lines = []
    for place in range(first, last):
        if start + _AROUND <= place < end - 1:  # the middle of many
            continue
        mark = ">" if start <= place < end else " "
        lines.append(f"  {mark} {place:4} {entries[place].in_words()}  {entries[place].site()}\n")
    return "".join(lines) or "    none\n"
