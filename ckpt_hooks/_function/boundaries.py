"""Where regions inside a function frame take numbers of it, in forward and in a rerun.

A region inside a frame saves its inputs in that frame, and a frame fills its handles by number. A rerun in which an inner
region gets one tensor more than in forward would fill the handles behind it with the values of others, of one shape perhaps. So
each inner region leaves a *mark* with its frame before it saves: how many tensors the frame has saved by then, and how many
will follow. A rerun compares its marks with those of forward before it hands out any value.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

from ckpt_hooks._core.frame import Mark

__all__ = ["NO_MARKS", "first_difference"]

#: What frames have that no region was inside; never filled.
NO_MARKS: list[Mark] = []

_position = itemgetter(0)


def first_difference(forward: Sequence[Mark], rerun: Sequence[Mark], last: int) -> tuple[int, str, str] | None:
    """Compares the marks of a rerun with those of forward.

    Args:
        forward: The marks of forward.
        rerun: Those of the rerun, which may have ended early.
        last: The number of the last tensor that is wanted. Marks behind it do not matter.

    Returns:
        Of the first mark that differs: the number of the tensor, and the inner region in forward and in the rerun, in words.
        None if none differs.
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
