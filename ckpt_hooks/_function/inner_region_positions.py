"""Marks: where regions inside a function frame take numbers of the frame, in forward and in a rerun.

A region inside a frame saves its inputs in the frame, and the frame fills its handles by number. If an inner region of a rerun
gets one more tensor than in forward, the later handles would be filled with values of others, perhaps of the same shape. So
each inner region leaves a *mark* with its frame before it saves: the number of tensors saved by the frame so far, and the
number to follow. A rerun compares its marks with the marks of forward before any value is handed out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

from ckpt_hooks._core.frame import Mark

__all__ = ["first_other_mark"]

_position = itemgetter(0)


def first_other_mark(forward: Sequence[Mark], rerun: Sequence[Mark], last: int) -> tuple[int, str, str] | None:
    """Compares the marks of a rerun with the marks of forward.

    Args:
        forward: The marks of forward.
        rerun: The marks of the rerun, which may have ended early.
        last: The number of the last tensor wanted. Later marks do not matter.

    Returns:
        The number of the tensor at the first difference, with the inner regions of forward and rerun there, in words. None if
        all marks agree.
    """
    total, total_found = (bisect_right(marks, last, key=_position) for marks in (forward, rerun))
    for index in range(max(total, total_found)):
        expected = forward[index] if index < total else None
        found = rerun[index] if index < total_found else None
        if expected is None or found is None or expected[:2] != found[:2]:
            position = min(mark[0] for mark in (expected, found) if mark is not None)
            return position, _in_words(expected), _in_words(found)
    return None


def _in_words(mark: Mark | None) -> str:
    if mark is None:
        return "no region there"
    position, count, (name, _) = mark
    return f"region {name!r} with {count} tensor{'' if count == 1 else 's'} from around it, after {position} saved ones"
