"""The memory of a step under a plan, from the profile of the step in which blocks keep nothing.

Allocations outside of recomputes stay as measured, except for their ends: a kept result lives until backward has let go of the
last tensor that needs it. Replays take place where backward asks for a tensor that is not there, each operator once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from .profiling import BlockCall, OpRun, Profile, Request, StorageVersion

#: A change of memory: the row, a number that orders changes at the same row, and the bytes.
Delta = tuple[int, int, int]


@dataclasses.dataclass
class Effect:
    """The effect of a block's call on memory, for some choice of kept results."""

    deltas: list[Delta]  # in addition to the deltas of the profile, in order
    ends: dict[int, int]  # by allocation of the profile that this call needs: the row of the last need
    cost: float  # of the operators that run again
    again: list[int]  # the operators that run again
    spared: list[int]  # allocations of the profile that are not made, since only second runs of other operators need them


def effect_of(profile: Profile, entry: BlockCall, kept: Collection[int], *, is_plain: bool = False) -> Effect:
    """Returns the effect of keeping the results of some operators."""
    if is_plain:  # no region: autograd keeps all, and nothing runs again
        kept = range(len(entry.ops))
    # A kept result is held with all later writes to it, so every version of its allocation counts as kept.
    retained = {number for at in kept for number in entry.ops[at].fresh}
    ends: dict[int, int] = {}
    again: set[int] = set()
    needs: list[tuple[int, list[int]]] = []  # in the order of asking: the row, and the operators to run
    for handle in sorted(entry.handles, key=lambda handle: (handle.restored is None, handle.restored or 0)):
        if handle.value is None:
            continue
        run = _needed(entry, handle.value, retained, handle.let_go, ends)
        if handle.restored is None:
            continue
        new = sorted(run - again)
        again |= run
        if new:
            needs.append((handle.restored, new))
    if entry.in_order and needs:
        needs = [(needs[0][0], sorted(again))]
    spared = [number for at, op in enumerate(entry.ops) if at not in again for number in op.extras]
    cost = sum(entry.ops[at].cost for at in again)
    ends = {number: end for number, end in ends.items() if not profile.allocations[number].is_lent}
    return Effect(_replays(profile, entry, retained, again, needs), ends, cost, sorted(again), spared)


def nested_effect_of(profile: Profile, entry: BlockCall) -> Effect:
    """Returns the effect of a region that keeps nothing around regions that keep nothing."""
    # In a backward, the region around brings back the values that regions inside read from it, once, and holds each value until
    # the last reader has it. So the region around is simulated as a call whose handles are these values.
    inner = [effect_of(profile, region, ()) for region in entry.inside]
    outer = dataclasses.replace(entry, handles=[*entry.direct_handles])
    made = {number for op in entry.ops for number in op.fresh}
    for region in entry.inside:
        for number, (first, last) in region.outside().items():
            versions = [value for value, at in entry.maker.items() if value[0] == number and at < region.first]
            if versions:
                outer.handles.append(Request(max(versions), first, last))
    effect = effect_of(profile, outer, ())
    for region, inside in zip(entry.inside, inner, strict=True):
        _add(effect, entry, region, inside, made)
    again = {*effect.again}
    effect.spared = [number for at, op in enumerate(entry.ops) if at not in again for number in op.extras]
    return effect


def effect_with(profile: Profile, entry: BlockCall, regions: Sequence[BlockCall], of: Callable[[BlockCall], Effect]) -> Effect:
    """Returns the effect of a block's call in which all of the call or parts of it are regions; the rest has no region."""
    if [*map(id, regions)] == [id(entry)]:
        return of(entry)
    theirs = {id(handle) for region in regions for handle in region.handles}
    rest = [handle for handle in entry.handles if id(handle) not in theirs]
    effect = effect_of(profile, dataclasses.replace(entry, handles=rest), (), is_plain=True)
    for region in regions:
        inside = of(dataclasses.replace(region, in_order=entry.in_order))
        _add(effect, entry, region, inside)
        extras = {number for op in region.ops for number in op.extras}
        effect.spared = [*inside.spared, *(number for number in effect.spared if number not in extras)]
    return effect


def _add(effect: Effect, entry: BlockCall, region: BlockCall, inside: Effect, made: Collection[int] = ()) -> None:
    # At the same row, replays of the region come after replays of the region around.
    effect.deltas += [(row, order + len(entry.ops) * 8, nbytes) for row, order, nbytes in inside.deltas]
    for number, end in inside.ends.items():
        if number not in made:
            effect.ends[number] = max(effect.ends.get(number, 0), end)
    effect.cost += inside.cost
    effect.again += [region.first + at for at in inside.again]


def function_effect_of(profile: Profile, entry: BlockCall) -> Effect:
    """Returns the effect of a region that calls the block again, up to the last operator that backward needs."""
    row, last, lasts = profile.num_rows, -1, dict[int, int]()
    for handle in entry.handles:
        if handle.restored is not None and handle.value is not None:
            row, last = min(row, handle.restored), max(last, entry.maker.get(handle.value, -1))
            lasts[handle.value[0]] = max(lasts.get(handle.value[0], 0), handle.let_go)
    again = [*range(last + 1)]
    made = {number for at in again for number in entry.ops[at].fresh}
    # Values from outside are arguments of the call, held to the end even if no rerun reads them.
    outside = {value[0] for op in entry.ops for value in op.reads if value not in entry.maker} | {*lasts}
    ends = dict.fromkeys(outside - made, max(lasts.values(), default=0))
    ends = {number: end for number, end in ends.items() if not profile.allocations[number].is_lent}
    deltas: list[Delta] = []
    living: list[int] = []
    order = 0
    for at in again:
        op = entry.ops[at]
        # The rerun frees results where forward did.
        born = min((profile.allocations[number].born for number in op.fresh), default=None)
        for number in [candidate for candidate in living if born is not None and profile.allocations[candidate].freed < born]:
            living.remove(number)
            deltas.append((max(lasts.get(number, row), row), order, -profile.allocations[number].nbytes))
        deltas.append((row, order + 1, _bytes(profile, op.fresh) + max(0, op.temporary)))
        deltas.append((row, order + 2, -max(0, op.temporary)))
        living += op.fresh
        order += 3
    deltas += [(max(lasts.get(number, row), row), order, -profile.allocations[number].nbytes) for number in living]
    spared = [number for op in entry.ops for number in op.extras][1:]  # all but the first: a second call needs only one state
    return Effect(deltas, ends, sum(entry.ops[at].cost for at in again), again, spared)


def _needed(entry: BlockCall, value: StorageVersion, retained: set[int], let_go: int, ends: dict[int, int]) -> set[int]:
    """Returns the operators that bring back a value, and notes in ``ends`` what they need until backward lets go of it."""
    todo, seen, operators = [value], set[StorageVersion](), set[int]()
    while todo:
        wanted = todo.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        at = entry.maker.get(wanted)
        if at is None or wanted[0] in retained:
            ends[wanted[0]] = max(ends.get(wanted[0], 0), let_go)
        else:
            operators.add(at)
            todo += entry.ops[at].reads
    return operators


def _replays(
    profile: Profile, entry: BlockCall, retained: set[int], again: set[int], needs: list[tuple[int, list[int]]]
) -> list[Delta]:
    readers: dict[int, int] = {}
    for at in again:
        for number in _inside(entry, entry.ops[at], retained):
            readers[number] = readers.get(number, 0) + 1
    lasts: dict[int, int] = {}
    for handle in entry.handles:
        value = handle.value
        if value is not None and value[0] not in retained and value in entry.maker and handle.restored is not None:
            lasts[value[0]] = max(lasts.get(value[0], 0), handle.let_go)
    deltas: list[Delta] = []
    order = 0
    for row, run in needs:
        for at in run:
            op = entry.ops[at]
            made = [number for number in op.fresh if readers.get(number) or number in lasts]
            lost = [number for number in op.fresh if number not in made]
            size = _bytes(profile, op.fresh)
            if size or op.temporary > 0:
                deltas.append((row, order, size + max(0, op.temporary)))
                deltas.append((row, order + 1, -max(0, op.temporary) - _bytes(profile, lost)))
                order += 2
            for number in _inside(entry, op, retained):
                readers[number] -= 1
                if not readers[number]:
                    end = lasts.get(number, row)
                    deltas.append((max(end, row), order, -profile.allocations[number].nbytes))
                    order += 1
            for number in made:
                if not readers.get(number):
                    deltas.append((max(lasts[number], row), order, -profile.allocations[number].nbytes))
                    order += 1
    return deltas


def _bytes(profile: Profile, numbers: Iterable[int]) -> int:
    return sum(profile.allocations[number].nbytes for number in numbers)


def _inside(entry: BlockCall, op: OpRun, retained: set[int]) -> set[int]:
    """Returns the allocations that an operator reads and a replay makes."""
    return {value[0] for value in op.reads if value in entry.maker and value[0] not in retained and value[0] not in op.fresh}


def natural_ends(profile: Profile) -> list[int]:
    """Returns the row in which each allocation would be freed if no block needed it in backward."""
    natural = [allocation.freed for allocation in profile.allocations]
    # If a free follows a block's last need, only the block is assumed to have held the allocation since the block's forward.
    for entry in profile.entries:
        for number, end in effect_of(profile, entry, ()).ends.items():
            if natural[number] <= end + _SOON or natural[number] == entry.end:
                natural[number] = entry.end
    return natural


#: The most rows from the last need of an allocation to a free that counts as following from it. With fewer, predicted peaks are
#: too high; with more, memory that the program holds counts as the block's, and they are too low.
_SOON = 4


def last_needs(effects: Iterable[Effect]) -> dict[int, int]:
    """Returns the row of the last need of each allocation that any of some calls needs."""
    ends: dict[int, int] = {}
    for effect in effects:
        for number, end in effect.ends.items():
            ends[number] = max(ends.get(number, 0), end)
    return ends


def timeline_of(profile: Profile, effects: Sequence[Effect], natural: Sequence[int]) -> list[Delta]:
    """Returns the changes of memory in a step, in order; ``natural`` is from :func:`natural_ends`."""
    moments: list[Delta] = [(row, -1, nbytes) for row, nbytes in profile.older]
    moments += [delta for effect in effects for delta in effect.deltas]
    ends, spared = last_needs(effects), {number for effect in effects for number in effect.spared}
    for number, allocation in enumerate(profile.allocations):
        if not allocation.is_again and number not in spared:
            moments.append((allocation.born, -1, allocation.nbytes))
            moments.append((max(natural[number], ends.get(number, 0)), -1, -allocation.nbytes))
    moments.sort()
    return moments


def peak_of(profile: Profile, effects: Sequence[Effect], natural: Sequence[int]) -> int:
    """Returns the peak of a plan, above the memory in use when the step begins."""
    live = most = 0
    for row, _, nbytes in timeline_of(profile, effects, natural):
        if row < profile.num_rows:
            live += nbytes
            most = max(most, live)
    return most
