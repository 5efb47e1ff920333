"""Wastes that a ledger shows. Their bytes are simulated: the ledger's changes without the wasted ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks.report.entries import REMEDIES, Advice, Maker, Waste
from ckpt_hooks.report.formatting import alike, fold_names, name_pattern, up_to_number

from .data import Allocation, Holder, LedgerData, RegionEntry

_CODE = {
    Waste.HELD_INPUT: "compute it inside of the region: checkpoint(lambda x: block(x, make_mask(x.shape)), x)",
    Waste.SAVES_NOTHING: "leave the region out, or put more into it",
    Waste.LEAF: "make the module around the region: apply_checkpointing(model, Block)",
    Waste.HELD_OUTSIDE: "keep value.detach().cpu(), or delete it before backward",
    Waste.NESTED: "leave out the innermost region, if the peak allows",
}

#: A waste is told of from this part of the peak on, or of all that is computed again.
_LEAST = 0.01
#: Some are told of from this part of the peak on: smaller ones are the way of things, as positions, or the last result in a
#: variable of a function that has called backward.
_SHARES = {Waste.HELD_INPUT: 0.05, Waste.HELD_OUTSIDE: 0.05}
#: A region that drops at most this part of what its backward needs drops next to nothing: a norm's statistics, say.
_NEXT_TO_NOTHING = 0.05
_DEEP = 3

#: The begin, the end (both indices of changes), and the bytes of a difference.
_Edit = tuple[int, int, int]
_Entries = Mapping[int, RegionEntry]  # entries of regions in forward, by number


def wastes_of(ledger: LedgerData) -> tuple[Advice, ...]:
    """Returns the wastes of a step, the largest first."""
    again = sum(one.nbytes for one in ledger.allocations if one.origin.maker is Maker.RECOMPUTE)
    entries = {number: entry for number, entry in ledger.entries.items() if not entry.is_again}
    kinds = (_held_inputs, _saving_nothing, _held_outside, _nested)
    found = [advice for kind in kinds for advice in kind(ledger, entries)]
    worth = [
        one
        for one in found
        if one.peak_nbytes > _SHARES.get(one.waste, _LEAST) * ledger.peak.nbytes or one.recomputed_nbytes > _LEAST * again
    ]
    return tuple(sorted(worth, key=lambda one: (-one.peak_nbytes, -one.recomputed_nbytes)))


def remedy_for(ledger: LedgerData, holder: Holder) -> str:
    """Returns what takes away memory that is held; nothing where nothing does."""
    origin, reason = holder.origin, holder.reason
    if origin.maker is Maker.OPTIMIZER:
        return "foreach=False, or an optimizer with less state"
    is_of_module = origin.maker is Maker.MODULE and origin.module is not None
    if reason is None and is_of_module and all(phase.name != "backward" for phase in ledger.phases):
        reason = Reason.SAVED  # most likely: of what the graph alone holds, backward tells
    if reason is Reason.SAVED and is_of_module and (block := up_to_number((origin.module or "").rpartition(" ")[0])):
        return f'apply_checkpointing(model, "{block.rstrip("0123456789")}*")'
    return REMEDIES.get(reason, "")


def _advice(ledger: LedgerData, waste: Waste, group: Sequence[int], edits: Iterable[_Edit], recomputed: int = 0) -> Advice:
    names = zip(*(ledger.entries[number].name.split(" ", 1) for number in group), strict=False)
    where, site = " ".join(fold_names(dict.fromkeys(of)) for of in names), ledger.entries[group[0]].site
    edits = list(edits)
    most = -sum(nbytes for _, _, nbytes in edits if nbytes < 0)
    # A walk over all changes for each of many small groups would take minutes.
    saved = max(0, ledger.peak.nbytes - _peak_with(ledger, edits)) if most > _LEAST * ledger.peak.nbytes else 0
    return Advice(waste, where, len(group), site, saved, recomputed, _CODE[waste])


def _peak_with(ledger: LedgerData, edits: Iterable[_Edit]) -> int:
    steps = [0] * (len(ledger.changes) + 1)
    for begin, end, nbytes in edits:
        if begin < end:
            steps[begin] += nbytes
            steps[min(end, len(ledger.changes))] -= nbytes
    sums = itertools.accumulate(steps)
    return max((change.live + more for change, more in zip(ledger.changes, sums, strict=False)), default=0)


def _end_of(ledger: LedgerData, end: int | None) -> int:
    return len(ledger.changes) if end is None else end


def _groups(entries: _Entries, numbers: Iterable[int]) -> list[list[int]]:
    """Returns entries in groups of the same line, with names that differ by numbers alone."""
    return alike(numbers, lambda number: (*map(name_pattern, entries[number].name.split(" ")), entries[number].site))


_FOR_RECOMPUTE = (Reason.INPUT, Reason.STATE)


def _held_inputs(ledger: LedgerData, entries: _Entries) -> Iterator[Advice]:
    """Tensors from outside of a region which need no gradient, beside one that does, and copies of a closure's tensors."""
    sources: dict[int, list[Allocation]] = {}
    copies: dict[int, list[Allocation]] = {}
    with_gradient: set[int] = set()
    captured: set[tuple[int, int]] = set()  # the size of tensors that closures hold, by entry
    for one in ledger.allocations:
        holders = {hold.entry for hold in one.holds if hold.reason in _FOR_RECOMPUTE and hold.entry is not None}
        by_gradient = {hold.entry for hold in one.holds if hold.reason is Reason.PARAMETER or one.requires_grad}
        with_gradient |= {entry for entry in by_gradient if entry is not None}
        is_from_outside = one.entry not in holders and one.origin.maker not in (Maker.RECOMPUTE, Maker.BACKWARD)
        if not holders or one.requires_grad:
            continue
        for entry in holders & entries.keys():
            if is_from_outside and any(hold.reason is Reason.STATE for hold in one.holds):
                captured.add((entry, one.nbytes))
        ends = [hold.end for hold in one.holds]
        (entry, *others) = holders
        is_alone = not others and one.freed is not None and None not in ends and one.freed - max(filter(None, ends)) <= _SOON
        if is_from_outside and is_alone and entry in entries:
            sources.setdefault(entry, []).append(one)
        elif one.entry in holders and one.entry in entries and one.origin.maker is Maker.REGION:
            copies.setdefault(one.entry, []).append(one)
    for entry in [*copies]:
        copies[entry] = [one for one in copies[entry] if (entry, one.nbytes) in captured]
    for group in _groups(entries, sorted(({*sources} & with_gradient) | {entry for entry, of in copies.items() if of})):
        edits = [(one.born, _end_of(ledger, one.freed), -one.nbytes) for entry in group for one in copies.get(entry, ())]
        for entry in group:
            begin = min((begin for begin, _ in entries[entry].recomputes), default=len(ledger.changes))
            if entry in with_gradient:
                edits += [(entries[entry].end, min(begin, one.freed or 0), -one.nbytes) for one in sources.get(entry, ())]
        yield _advice(ledger, Waste.HELD_INPUT, group, edits)


#: Changes between the end of the last hold and the free, where nothing else holds a storage.
_SOON = 3


def _saving_nothing(ledger: LedgerData, entries: _Entries) -> Iterator[Advice]:
    idle, outer = [], {entry.parent for entry in entries.values()}  # which drop the inputs of regions inside
    for number, entry in entries.items():
        if number in outer or len(entry.path) > 1 or not (entry.recomputes or entry.needs):
            continue
        needed = {need.allocation: need for need in entry.needs}
        sizes = {at: ledger.allocations[at].nbytes for at in needed}
        backwards = (one.begin for one in ledger.phases if one.name == "backward" and one.begin >= entry.end)
        backward = next(backwards, len(ledger.changes))
        freed = {at: _end_of(ledger, ledger.allocations[at].freed) for at in needed}
        dropped = sum(sizes[at] for at, need in needed.items() if need.is_dropped and freed[at] < backward)
        if dropped <= _NEXT_TO_NOTHING * sum(sizes.values()):
            idle.append(number)
    for group in _groups(entries, idle):
        waste = Waste.LEAF if max(entries[number].modules for number in group) <= 1 else Waste.SAVES_NOTHING
        again = sum(one.nbytes for one in ledger.allocations if one.origin.maker is Maker.RECOMPUTE and one.entry in group)
        yield _advice(ledger, waste, group, _without(ledger, group), again)


def _without(ledger: LedgerData, entries: Collection[int]) -> Iterator[_Edit]:
    """Yields the differences if some regions were none."""
    ends: dict[int, int] = {}
    for entry in entries:
        for need in ledger.entries[entry].needs:
            ends[need.allocation] = max(ends.get(need.allocation, 0), _end_of(ledger, need.end))
    for at, one in enumerate(ledger.allocations):
        freed, own = _end_of(ledger, one.freed), [hold for hold in one.holds if hold.entry in entries]
        is_for_recompute = bool(own) and all(hold.reason in _OF_REGIONS for hold in one.holds)
        if one.entry in entries and (one.origin.maker is Maker.RECOMPUTE or is_for_recompute):
            yield one.born, freed, -one.nbytes
        elif at in ends:
            yield freed, ends[at], one.nbytes
        elif own and all(hold.reason in _FOR_RECOMPUTE for hold in one.holds):
            others = [_end_of(ledger, hold.end) for hold in one.holds if hold.entry not in entries]
            left = [ledger.entries[entry].end for entry in {hold.entry for hold in own} if entry is not None]
            yield max([*others, *left]), freed, -one.nbytes


_OF_REGIONS = frozenset({Reason.STATE, Reason.RANDOM_STATE})


def _held_outside(ledger: LedgerData, entries: _Entries) -> Iterator[Advice]:
    backward = next((phase.begin for phase in ledger.phases if phase.name == "backward"), len(ledger.changes))
    found: dict[tuple[str | None, str | None, str | None], dict[int, list[_Edit]]] = {}
    for one in ledger.allocations:
        is_result = one.origin.operator is not None and one.origin.maker is Maker.REGION and not one.is_gradient
        if not is_result or one.entry is None or one.entry not in entries:
            continue
        last = max([entries[one.entry].end, *(_end_of(ledger, hold.end) for hold in one.holds)])
        freed = _end_of(ledger, one.freed)
        if freed > backward and freed - last > _SOON:
            inside = one.origin.operator, one.origin.line, name_pattern((one.origin.module or "").partition(" ")[0])
            found.setdefault(inside, {}).setdefault(one.entry, []).append((last, freed, -one.nbytes))
    for (_, line, _), held in found.items():
        for group in _groups(entries, held):
            edits = [edit for number in group for edit in held[number]]
            advice = _advice(ledger, Waste.HELD_OUTSIDE, group, edits)
            yield dataclasses.replace(advice, site=line or advice.site)


def _nested(ledger: LedgerData, entries: _Entries) -> Iterator[Advice]:
    """Forwards that run in the recompute of the region around, and once more in that of the innermost region."""
    inside, again = dict.fromkeys(ledger.entries, 0), dict.fromkeys(ledger.entries, 0)
    for one in ledger.allocations:
        if one.entry in inside and one.origin.maker is Maker.RECOMPUTE:
            entry = ledger.entries[one.entry]
            (inside if entry.begin <= one.born < entry.end else again)[one.entry] += one.nbytes
    children: dict[int | None, list[int]] = {}
    for number, entry in ledger.entries.items():
        children.setdefault(entry.parent, []).append(number)
    twice: dict[int, int] = {}
    for number, around in ledger.entries.items():
        forward = [child for child in children.get(number, ()) if not ledger.entries[child].is_again]
        for begin, end in around.recomputes:  # each enters regions in forward's order
            entered = [child for child in children.get(number, ()) if begin <= ledger.entries[child].begin < end]
            for child, entered_first in zip(entered, forward, strict=False):
                twice[entered_first] = min(inside[child], again[entered_first])
    deep = [number for number, entry in entries.items() if len(entry.path) >= _DEEP]
    for group in _groups(ledger.entries, deep):
        yield _advice(ledger, Waste.NESTED, group, (), sum(twice.get(one, 0) for one in group))
