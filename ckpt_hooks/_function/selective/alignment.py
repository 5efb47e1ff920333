"""Laying the operators of a recompute beside those of forward, where one of the two runs has operators that the other lacks.

A table that is cached is built in one run and found in the other. The rule: *a recompute runs the operators of forward in their
order, and those that only one of the two runs has are passed over if no gradient flows through them and they draw no random
numbers; anything else is an error.*

Two operators are counterparts if they are the same operator and run after as many saved tensors and as many nodes of autograd's
graph. An operator through which gradients flow has a node. So a recompute that leaves such an operator out counts fewer nodes
from there on and finds no more counterparts, while a table that is built moves no count. Between two pairs of counterparts
only one of the two runs may have operators of its own. Where several operators of a kind run at the same counts, any pairing
in their order will do: nothing that was kept is handed out by it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence

from ckpt_hooks._operators.facts import facts_of, same_operator
from ckpt_hooks.errors import DeterminismError

from .sequence import Counts, OperatorSequence

__all__ = ["compare_all"]

#: Places of two counterparts: in forward, in the recompute.
_Pair = tuple[int, int]


def compare_all(
    forward: OperatorSequence,
    rerun: OperatorSequence,
    unequal: Collection[_Pair],
    nodes_found: Sequence[int],
    index: int,
) -> DeterminismError | None:
    """Returns the error for operators of a recompute that part from those of forward; None if they do not.

    Args:
        forward: The operators of forward.
        rerun: Those of the recompute, which has ended.
        unequal: Pairs of places of operators that returned different values.
        nodes_found: Numbers of the nodes that forward made and the recompute found.
        index: The last tensor that was wanted of the recompute; what ran after that does not matter.
    """
    end, end_found = bisect_right(forward.marks, index), bisect_right(rerun.marks, index)
    counts, counts_found = forward.counts(nodes_found)[:end], rerun.counts()[:end_found]

    def match(place: int, found: int) -> bool:
        return (place, found) not in unequal and same_operator(forward.operators[place], rerun.operators[found])

    place = found = 0  # behind the latest pair
    for pair in _pairs(counts, counts_found, match):
        if pair is None or not _passes(forward, range(place, pair[0]), rerun, range(found, pair[1])):
            break
        place, found = pair[0] + 1, pair[1] + 1
    else:
        if _passes(forward, range(place, end), rerun, range(found, end_found)):
            last = counts[place - 1][1] if place else 0
            behind = [nodes for _, nodes in [*counts[place:], *counts_found[found:]]]
            # Those behind the last pair have made no node, or what stopped the recompute has made the last one in both runs.
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
    """Goes through counterparts in order; yields None where both runs have operators at some counts that cannot be paired."""
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
    """Returns each of a few places with the first of many that will do, in order; None if one finds none."""
    others = iter(many)
    pairs = [(one, other) for one in few if (other := next((other for other in others if match(one, other)), -1)) >= 0]
    return pairs if len(pairs) == len(few) else None


def _passes(forward: OperatorSequence, alone: range, rerun: OperatorSequence, alone_found: range) -> bool:
    """Whether operators between two pairs may be passed over: one run has some, and a run may lack them."""
    if alone and alone_found:
        return False
    operators = [forward.operators[place] for place in alone] + [rerun.operators[place] for place in alone_found]
    return all(facts_of(operator).may_be_left_out for operator in operators)
