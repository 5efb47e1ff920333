"""Laying the operators of a recompute beside the operators of forward, where one of the two runs has additional operators.

A cached table is built in one run and found in the other. The rule: *a recompute runs the operators of forward in their order.
Operators of only one of the two runs are passed over if no gradient flows through them and they draw no random numbers;
anything else is an error.*

Two operators are counterparts if they are the same operator and run after as many saved tensors and as many nodes of autograd's
graph. An operator through which gradients flow has a node. So a recompute without such an operator counts fewer nodes from
there on and finds no more counterparts, while building a table moves no count. Between two pairs of counterparts only one of
the two runs may have operators of its own. Where several operators of a kind run at the same counts, any pairing in their order
will do: no kept output is handed out by a pairing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence

from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks.errors import DeterminismError

from .sequence import Counts, OperatorSequence

#: The places of two counterparts: in forward, and in the recompute.
_Pair = tuple[int, int]


def compare_all(
    forward: OperatorSequence,
    rerun: OperatorSequence,
    unequal: Collection[_Pair],
    nodes_found: Sequence[int],
    index: int,
) -> DeterminismError | None:
    """Returns the error for a recompute whose operators part from the operators of forward; None if they do not."""
    end, end_found = bisect_right(forward.marks, index), bisect_right(rerun.marks, index)
    counts, counts_found = forward.counts(nodes_found)[:end], rerun.counts()[:end_found]

    def match(place: int, found: int) -> bool:
        return (place, found) not in unequal and forward.operators[place] is rerun.operators[found]

    place = found = 0  # behind the latest pair
    for pair in _pairs(counts, counts_found, match):
        if pair is None or not _passes(forward, range(place, pair[0]), rerun, range(found, pair[1])):
            break
        place, found = pair[0] + 1, pair[1] + 1
    else:
        if _passes(forward, range(place, end), rerun, range(found, end_found)):
            last = counts[place - 1][1] if place else 0
            behind = [nodes for _, nodes in [*counts[place:], *counts_found[found:]]]
            # Operators behind the last pair made no node, or the operator of the stop made the last node of both runs.
            ends = forward.nodes_at(end, nodes_found), rerun.nodes_at(end_found)
            if all(nodes == last for nodes in behind) or (ends[0] == ends[1] and max(behind) < ends[0]):
                return None
    expected, now = forward.name_at(place), rerun.name_at(found, "missing")
    for one, other in sorted(unequal):
        if one == place and other >= found:
            name = forward.name_at(one)
            found, expected, now = other, f"{name} that returned what the policy kept", f"{name} that returned other values"
            break
    return forward.error(found, expected, now)


def _pairs(
    counts: Sequence[Counts], counts_found: Sequence[Counts], match: Callable[[int, int], bool]
) -> Iterator[_Pair | None]:
    """Yields counterparts in order; None where both runs have operators at the same counts without a pairing."""
    place = found = 0
    while place < len(counts) and found < len(counts_found):
        at = min(counts[place], counts_found[found])
        end, end_found = bisect_right(counts, at, place), bisect_right(counts_found, at, found)
        here, there = range(place, end), range(found, end_found)
        if here and there:
            if len(here) <= len(there):
                yield from _embedded(here, there, match) or (None,)
            else:
                turned = _embedded(there, here, lambda one, other: match(other, one))
                yield from ((first, second) for second, first in turned) if turned else (None,)
        place, found = end, end_found


def _embedded(few: range, many: range, match: Callable[[int, int], bool]) -> list[_Pair] | None:
    """Pairs each of a few places with the first matching place of many, in order; returns None if a place has no match."""
    others = iter(many)
    pairs = [(one, other) for one in few if (other := next((other for other in others if match(one, other)), -1)) >= 0]
    return pairs if len(pairs) == len(few) else None


def _passes(forward: OperatorSequence, alone: range, rerun: OperatorSequence, alone_found: range) -> bool:
    """Whether operators between two pairs may be passed over: only one run has some, and a run may lack these."""
    if alone and alone_found:
        return False
    operators = [forward.operators[place] for place in alone] + [rerun.operators[place] for place in alone_found]
    return all(facts_of(operator).may_be_left_out for operator in operators)
