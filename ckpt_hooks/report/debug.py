"""Debug mode: errors of a recompute begin with the first operator that differs from forward, and its line.

The logs of both runs are aligned, by lines and then by operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_hooks._core.call_sites import module_names, outermost_module
from ckpt_hooks._core.descriptions import region_in_words
from ckpt_hooks._core.misuse import flag_or_none
from ckpt_hooks._core.settings import override
from ckpt_hooks._operators.facts import facts_of, routing_advice, same_operator
from ckpt_hooks._operators.operator_log import Entry, OperatorLog
from ckpt_hooks.errors import DeterminismError, rebuild_error

_WINDOW = 100  # operators of each run in which to look for the place where both agree again
_AROUND = 3  # operators of context before and after
_MOST = 4  # the most operators that an error names because they may have chosen otherwise in the recompute


@contextlib.contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Switches debug mode on or off for all regions whose forward runs in the block.

    In debug mode errors name operators, lines and modules; small operators take a few times as long, since each is recorded.
    The setting belongs to this thread and context. The innermost block wins, also over the ``debug`` of a region.

    - In :func:`ckpt_hooks.checkpoint`, a :class:`ckpt_hooks.DeterminismError` begins with the first operator that forward and
      recompute do not share, its line and its module. ``operators`` and ``recomputed_operators`` hold both logs. ``routing``
      names earlier operators that compare floating-point numbers (top-k, sort, comparisons) and may have chosen otherwise.
    - In :class:`ckpt_hooks.checkpoint_region`, a :class:`ckpt_hooks.MutationError` names the operator that needs the changed
      tensor and its line. The operator is named if any of nested regions is in debug mode.

    Args:
        enabled: Whether debug mode is on. None leaves it to each region.

    Raises:
        TypeError: If ``enabled`` is not a boolean or None.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, set_checkpoint_debug_enabled
        >>> x = torch.ones(2, requires_grad=True)
        >>> with set_checkpoint_debug_enabled(True):
        ...     y = checkpoint(torch.sin, x)
    """
    with override(debug=flag_or_none(enabled, "enabled")):
        yield


class _RecomputeLog(OperatorLog):
    """The context of recomputes: makes a new log for each, and puts the log into a list when the recompute has ended."""

    def __init__(self, latest: list[OperatorLog]) -> None:
        super().__init__()
        self._latest = latest

    def _recreate_cm(self) -> _RecomputeLog:
        return _RecomputeLog(self._latest)

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._latest[:] = [self]


class OperatorLogs:
    """Logs of a region's operators, in forward and in its latest recompute."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._latest: list[OperatorLog] = []
        self.forward = OperatorLog()
        self.recompute = _RecomputeLog(self._latest)
        self._root = outermost_module(function)

    def explain(self, error: DeterminismError) -> DeterminismError:
        """Returns an error of the same class and fields that begins with the first difference, and has both logs."""
        forward, log = self.forward.entries, self._latest[0] if self._latest else OperatorLog()
        names, recompute = module_names(self._root), log.entries
        divergence = _first_divergence(forward, recompute, is_whole=log.error is None)
        words = "Forward and recompute ran the same operators, on tensors of the same kinds, as far as the recompute got.\n"
        before: Sequence[Entry] = recompute if error.index >= 0 else []
        if divergence is not None:  # only choices up to the difference can be its cause
            words = _divergence_in_words(divergence, forward, recompute, names)
            start, end, rerun_start, rerun_end = divergence
            is_same = start < end and rerun_start < rerun_end and _same_operator(forward[start], recompute[rerun_start])
            before = before[: rerun_start + int(is_same)]
        choices = [entry for entry in before if facts_of(entry.operator).chooses(entry.args, entry.kwargs)]
        lines = list(dict.fromkeys(" at ".join(filter(None, (str(entry.operator), entry.site()))) for entry in choices))
        more = [] if len(lines) <= _MOST else [f"{len(lines) - _MOST} more"]
        advice = routing_advice(lines[:_MOST] + more) if lines else ""
        region = f"{region_in_words(error.region)}: " if error.region else ""
        explained = rebuild_error(
            type(error),
            f"{region}{words}You are seeing this error because you passed `debug=True` to checkpoint or called "
            "set_checkpoint_debug_enabled, and the tensors saved in forward and in the recompute differ. The error has both "
            f"logs, {len(forward)} operators of forward and {len(recompute)} of the recompute: "
            f"print(*error.operators, sep='\\n'), and likewise error.recomputed_operators.\n\n{error}{advice}",
            vars(error),
        )
        explained.routing = tuple(dict.fromkeys(str(entry.operator) for entry in choices))
        explained.operators = tuple(f"{entry.in_words()} at {entry.line(names)}" for entry in forward)
        explained.recomputed_operators = tuple(f"{entry.in_words()} at {entry.line(names)}" for entry in recompute)
        return explained


class _Divergence(NamedTuple):
    start: int
    end: int
    rerun_start: int
    rerun_end: int


def _first_divergence(forward: Sequence[Entry], recompute: Sequence[Entry], *, is_whole: bool) -> _Divergence | None:
    """Returns the first divergence of two runs; None without any; ``is_whole`` is False if the recompute stopped early."""
    # Prefer a divergence of operators with gradients, even a later one: a table that only one run builds is not the cause.
    first, place, rerun_place = None, 0, 0
    while True:
        while (
            place < len(forward)
            and rerun_place < len(recompute)
            and _same_line(forward[place], recompute[rerun_place])
            and _same_kinds(forward[place], recompute[rerun_place])
        ):
            place, rerun_place = place + 1, rerun_place + 1
        if rerun_place == len(recompute) and (place == len(forward) or not is_whole):
            return first
        divergence = _behind(forward, place, recompute, rerun_place, is_whole=is_whole)
        part, rerun_part = forward[place : divergence.end], recompute[rerun_place : divergence.rerun_end]
        moved = len(part) == len(rerun_part) and all(map(_same_kinds, part, rerun_part))
        if not moved and ((part and rerun_part) or any(entry.grad for entry in (*part, *rerun_part))):
            return divergence
        first = first or (None if moved else divergence)
        place, rerun_place = divergence.end, divergence.rerun_end


def _same_kinds(ran: Entry, reran: Entry) -> bool:
    """Whether two operators are the same, with arguments and results of the same kinds; draws may differ in a generator."""
    if ran.operator is not reran.operator:
        return same_operator(ran.operator, reran.operator)
    kinds, others = ran.kinds(), reran.kinds()
    return kinds == others or repr(kinds) == repr(others)  # NaN is not equal to itself


def _same_operator(ran: Entry, reran: Entry) -> bool:
    return same_operator(ran.operator, reran.operator)


def _same_line(ran: Entry, reran: Entry) -> bool:
    """Whether the same operator ran, at the same line if both lines are inside of the region."""
    if not _same_operator(ran, reran):
        return False
    (code, line, _, is_inside), (rerun_code, rerun_line, _, is_inside_too) = ran.place, reran.place
    return not (is_inside and is_inside_too) or (code is rerun_code and line == rerun_line)


def _behind(forward: Sequence[Entry], place: int, rerun: Sequence[Entry], rerun_place: int, *, is_whole: bool) -> _Divergence:
    """Returns the shortest divergence from two places on, up to two operators in a row that agree, or up to both ends."""
    most, rerun_most = min(_WINDOW, len(forward) - place), min(_WINDOW, len(rerun) - rerun_place)
    for same in (_same_line, _same_operator):
        for distance in range(most + rerun_most + 1):
            for count in range(max(0, distance - rerun_most), min(distance, most) + 1):
                end, rerun_end = place + count, rerun_place + distance - count
                if end == len(forward) or rerun_end == len(rerun):
                    agree = is_whole and same is _same_operator and end == len(forward) and rerun_end == len(rerun)
                else:
                    is_last = not distance or end + 1 == len(forward) or rerun_end + 1 == len(rerun)
                    agree = same(forward[end], rerun[rerun_end]) and (is_last or same(forward[end + 1], rerun[rerun_end + 1]))
                if agree and distance:
                    return _Divergence(place, end, rerun_place, rerun_end)
                if agree:  # the same operator, with other kinds of tensors or at another line
                    return _Divergence(place, place + 1, rerun_place, rerun_place + 1)
    return _Divergence(place, place + (most if is_whole else min(most, 1)), rerun_place, rerun_place + rerun_most)


def _divergence_in_words(
    divergence: _Divergence, forward: Sequence[Entry], recompute: Sequence[Entry], names: Mapping[int, str]
) -> str:
    place, end, rerun_place, rerun_end = divergence
    ran, reran = forward[place] if place < end else None, recompute[rerun_place] if rerun_place < rerun_end else None
    lines = [entry for entry in (ran, reran) if entry is not None]
    if ran is not None and reran is not None:
        (code, line, *_), (rerun_code, rerun_line, *_) = ran.place, reran.place
        if code is rerun_code:
            lines.sort(key=lambda entry: entry.place[1])  # the other run skipped the earlier line
        if (code, line) == (rerun_code, rerun_line):
            lines.pop()
    blamed = lines[0]
    if ran is None:
        head = f"The recompute ran {blamed.operator}, and forward did not"
    elif reran is None:
        head = f"Forward ran {blamed.operator}, and the recompute did not"
    elif _same_operator(ran, reran):
        head = f"{blamed.operator} had other arguments, or another result, in the recompute than in forward"
    else:
        head = f"Forward ran {ran.operator}, and the recompute ran {reran.operator}"
    also = "".join(f"\nwhere {'forward' if entry is ran else 'the recompute'} is at {entry.line(names)}" for entry in lines[1:])
    runs = ""
    for name, entries, start, is_next in (
        ("forward", forward, place, ran is None),
        ("recompute", recompute, rerun_place, reran is None),
    ):
        entry = entries[start] if start < len(entries) else None
        words = "nothing more\n" if entry is None else f"{entry.in_words()}\n    at {entry.line(names)}\n"
        runs += f"  {name}{', next' if is_next and entry is not None else ''}: {words}"
    return (
        f"the recompute first differs at {blamed.line(names)}{also}\n{head}.\n{runs}"
        f"Operators around it in forward:\n{_around(forward, place, end)}"
        f"Operators around it in the recompute:\n{_around(recompute, rerun_place, rerun_end)}"
    )


def _around(entries: Sequence[Entry], start: int, end: int) -> str:
    first, last = max(0, start - _AROUND), min(len(entries), max(end, start) + _AROUND)
    lines = []
    for place in range(first, last):
        if start + _AROUND <= place < end - 1:  # leaves out the middle of a long divergence
            continue
        mark = ">" if start <= place < end else " "
        lines.append(f"  {mark} {place:4} {entries[place].in_words()}  {entries[place].site()}\n")
    return "".join(lines) or "    none\n"
