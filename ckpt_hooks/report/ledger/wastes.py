"""Wastes that a ledger shows. Their bytes are simulated: the ledger's changes without the wasted ones."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks.report.entries import (
    NOWHERE,
    REMEDIES,
    Advice,
    Maker,
    Origin,
    Waste,
    alike,
    fold_names,
    name_pattern,
    up_to_number,
)
from ckpt_hooks.report.tracing import Asked, unmatched_policies

from .data import NEVER, Allocation, Holder, LedgerData, RegionEntry, is_forward

_CODE = {
    Waste.HELD_INPUT: "compute it inside of the region: checkpoint(lambda x: block(x, make_mask(x.shape)), x)",
    Waste.SAVES_NOTHING: "leave the region out",
    Waste.HELD_OUTSIDE: "del value before backward, or clear the list or attribute that has it",
    Waste.FOREACH: "foreach=False",
}

#: A waste is told of from this part of the peak on, or of all that is computed again.
_LEAST = 0.01
#: Some are told of from this part of the peak on: smaller ones are the way of things, as positions, or the last result in a
#: variable of a function that has called backward.
_SHARES = {Waste.HELD_INPUT: 0.05, Waste.HELD_OUTSIDE: 0.05, Waste.FOREACH: 0.05}
#: A region that drops at most this part of what its backward needs drops next to nothing: a norm's statistics, say.
_NEXT_TO_NOTHING = 0.05

#: The begin, the end (both indices of changes), and the bytes of a difference.
_Edit = tuple[int, int, int]
_Place = tuple[Sequence[str], str | None]  # the names of regions, and a line
_Entries = Mapping[int, RegionEntry]  # entries of regions in forward, by number


def wastes_of(ledger: LedgerData) -> tuple[Advice, ...]:
    """Returns the wastes of a step, the largest first."""
    again = _LEAST * sum(one.nbytes for one in ledger.allocations if one.origin.maker is Maker.RECOMPUTE)
    entries = {number: entry for number, entry in ledger.entries.items() if not entry.is_again}
    kinds = (_held_inputs, _saving_nothing, _held_outside, _of_foreach)
    found = [
        one
        for kind in kinds
        for one in kind(ledger, entries)
        if one.peak_nbytes > _SHARES.get(one.waste, _LEAST) * ledger.peak.nbytes or one.recomputed_nbytes > again
    ]
    regions = []
    for entry in entries.values():
        nbytes = sum(ledger.allocations[at].nbytes for at in {need.allocation for need in entry.needs if need.is_dropped})
        regions.append(Asked(entry.policy, entry.policy_keeps, nbytes, entry.module or entry.path[-1], entry.site))
    return (*sorted(found, key=lambda one: (-one.peak_nbytes, -one.recomputed_nbytes)), *unmatched_policies(regions))


def remedy_for(ledger: LedgerData, holder: Holder) -> str:
    """Returns what takes away memory that is held; nothing where nothing does."""
    origin, reason = holder.origin, holder.reason
    if origin.maker is Maker.OPTIMIZER:
        return _CODE[Waste.FOREACH] if _is_of_foreach(origin) else "an optimizer with less state"
    is_of_module = origin.maker is Maker.MODULE and origin.module is not None
    if reason is None and is_of_module and all(phase.name != "backward" for phase in ledger.phases):
        reason = Reason.SAVED  # most likely: of what the graph alone holds, backward tells
    if reason is Reason.SAVED and is_of_module and (block := up_to_number((origin.module or "").rpartition(" ")[0])):
        return _region_for(block)
    return REMEDIES.get(reason, "")


def _region_for(block: str) -> str:
    return f'apply_checkpointing(model, "{block.rstrip("0123456789")}*")'


def _advice(
    ledger: LedgerData, waste: Waste, place: _Place, edits: Collection[_Edit], again: int = 0, code: str = ""
) -> Advice:
    names, site = place
    where = " ".join(fold_names(dict.fromkeys(of)) for of in zip(*(name.split(" ", 1) for name in names), strict=False))
    saved, peak = 0, ledger.peak.nbytes
    if -sum(min(nbytes, 0) for *_, nbytes in edits) > _LEAST * peak:  # a walk for each of many small groups would take minutes
        steps = [0] * (len(ledger.changes) + 1)
        for begin, end, nbytes in edits:
            if begin < end:
                steps[min(begin, len(ledger.changes))] += nbytes
                steps[min(end, len(ledger.changes))] -= nbytes
        sums = itertools.accumulate(steps)
        saved = max(0, peak - max(change.live + more for change, more in zip(ledger.changes, sums, strict=False)))
    # What these give depends on what else holds the memory, or on what takes its place.
    is_at_most = bool(saved) and (waste in (Waste.HELD_OUTSIDE, Waste.FOREACH) or bool(code))
    return Advice(waste, where, len(names), site, saved, again, code or _CODE[waste], is_at_most)


def _place_of(ledger: LedgerData, group: Sequence[int]) -> _Place:
    return [ledger.entries[number].name for number in group], ledger.entries[group[0]].site


def _groups(entries: _Entries, numbers: Iterable[int]) -> list[list[int]]:
    """Returns entries in groups of the same line, with names that differ by numbers alone."""
    return alike(numbers, lambda number: (*map(name_pattern, entries[number].name.split(" ")), entries[number].site))


_FOR_RECOMPUTE = (Reason.INPUT, Reason.STATE)
#: Changes between the end of the last hold and the free, where nothing else holds a storage.
_SOON = 3


def _held_inputs(ledger: LedgerData, entries: _Entries) -> Iterator[Advice]:
    """Tensors from outside of a region which need no gradient, beside one that does."""
    sources: dict[int, list[tuple[int, Allocation]]] = {}
    alone: set[int] = set()  # indices of sources which nothing but their region holds
    with_gradient: set[int | None] = set()
    for at, one in enumerate(ledger.allocations):
        holders = {hold.entry for hold in one.holds if hold.reason in _FOR_RECOMPUTE and hold.entry is not None}
        with_gradient |= {hold.entry for hold in one.holds if hold.reason is Reason.PARAMETER or one.requires_grad}
        if len(holders) == 1 and not one.requires_grad and one.entry not in holders and is_forward(one):
            (entry,) = holders
            sources.setdefault(entry, []).append((at, one))
            last = max(hold.end or NEVER for hold in one.holds)
            if last < NEVER and (one.freed or NEVER) - last <= _SOON:
                alone.add(at)
    for group in _groups(entries, sorted({*sources} & entries.keys())):
        # A first region without gradients has an input without, too: its mask is known by that of others.
        kinds = {_kind_of(one) for entry in group if entry in with_gradient for _, one in sources[entry]}
        found = [(entry, at, one) for entry in group for at, one in sources[entry] if _kind_of(one) in kinds]
        if not found or 2 * len(alone.intersection(at for _, at, _ in found)) < len(found):
            continue  # but for the last in a loop's variable: the program holds these in any case
        edits = []
        for entry, at, one in found:
            begin = min((begin for begin, _ in entries[entry].recomputes), default=NEVER)
            needed = max((need.end or NEVER for need in entries[entry].needs if need.allocation == at), default=begin)
            edits += [(entries[entry].end, begin, -one.nbytes), (needed, one.freed or NEVER, -one.nbytes)]
        yield _advice(ledger, Waste.HELD_INPUT, _place_of(ledger, [*dict.fromkeys(entry for entry, *_ in found)]), edits)


def _saving_nothing(ledger: LedgerData, entries: _Entries) -> Iterator[Advice]:
    idle, outer = [], {entry.parent for entry in entries.values()}  # which drop the inputs of regions inside
    for number, entry in entries.items():
        if number in outer or len(entry.path) > 1 or not (entry.recomputes or entry.needs):
            continue
        needed = [
            (ledger.allocations[at], dropped) for at, dropped in {n.allocation: n.is_dropped for n in entry.needs}.items()
        ]
        backwards = (one.begin for one in ledger.phases if one.name == "backward" and one.begin >= entry.end)
        backward = next(backwards, NEVER)
        dropped = sum(one.nbytes for one, is_dropped in needed if is_dropped and (one.freed or NEVER) < backward)
        if dropped <= _NEXT_TO_NOTHING * sum(one.nbytes for one, _ in needed):
            idle.append(number)
    for group in _groups(entries, idle):
        again = sum(one.nbytes for one in ledger.allocations if one.origin.maker is Maker.RECOMPUTE and one.entry in group)
        place, edits, module = _place_of(ledger, group), [*_without(ledger, group)], entries[group[0]].module or ""
        if (block := up_to_number(module)) and block != module:
            edits = [edit for edit in edits if edit[2] < 0] + [*_with_blocks(ledger, block)]
            yield _advice(ledger, Waste.SAVES_NOTHING, place, edits, 0, _region_for(block))
        else:
            yield _advice(ledger, Waste.SAVES_NOTHING, place, edits, again)


def _with_blocks(ledger: LedgerData, block: str) -> Iterator[_Edit]:

    def key(one: Allocation) -> tuple[bool, str]:
        return is_forward(one), up_to_number((one.origin.module or "").partition(" ")[0]) or ""

    backward: dict[str, int] = {}  # the begin of each block's next one
    for (is_in_forward, name), run in itertools.groupby(reversed(ledger.allocations), key):
        last, *others = run  # the last is the block's result
        if name_pattern(name) != name_pattern(block):
            continue
        if is_in_forward:
            end = backward.get(name, last.born)
            yield from ((last.born, min(end, one.freed or NEVER), -one.nbytes) for one in others)
        else:
            backward[name] = [last, *others][-1].born


def _without(ledger: LedgerData, entries: Collection[int]) -> Iterator[_Edit]:
    ends: dict[int, int] = {}
    for entry in entries:
        for need in ledger.entries[entry].needs:
            ends[need.allocation] = max(ends.get(need.allocation, 0), need.end or NEVER)
    for at, one in enumerate(ledger.allocations):
        freed, own = one.freed or NEVER, [hold for hold in one.holds if hold.entry in entries]
        is_for_recompute = bool(own) and all(hold.reason in _OF_REGIONS for hold in one.holds)
        if one.entry in entries and (one.origin.maker is Maker.RECOMPUTE or is_for_recompute):
            yield one.born, freed, -one.nbytes
        elif at in ends:
            yield freed, ends[at], one.nbytes
        elif own and all(hold.reason in _FOR_RECOMPUTE for hold in one.holds):
            others = [hold.end or NEVER for hold in one.holds if hold.entry not in entries]
            left = [ledger.entries[entry].end for entry in {hold.entry for hold in own} if entry is not None]
            yield max([*others, *left]), freed, -one.nbytes


_OF_REGIONS = frozenset({Reason.STATE, Reason.RANDOM_STATE})


def _held_outside(ledger: LedgerData, entries: _Entries) -> Iterator[Advice]:
    """Results that the program, and not the graph alone, holds in backward, with what is freed at once: their graph, too."""
    begins = [phase.begin for phase in ledger.phases if phase.name == "backward"]
    together: list[list[tuple[Allocation, _Edit]]] = []
    before = -1
    for one in sorted(ledger.allocations, key=lambda one: one.freed or NEVER):
        freed = one.freed or NEVER
        is_of_graph = one.freed is not None and ledger.changes[freed].place.node is not None
        if is_of_graph or one.is_gradient or not is_forward(one) or not any(one.born <= begin < freed for begin in begins):
            continue
        if not together or any(change.nbytes > 0 for change in ledger.changes[before:freed]):
            together.append([])
        end, before = entries[one.entry].end if one.entry in entries else one.born + 1, freed  # type: ignore[index]
        begin = min(freed, max([end, *(hold.end or NEVER for hold in one.holds)]))
        together[-1].append((one, (begin, freed, -one.nbytes)))
    found: dict[Origin, tuple[list[Allocation], list[_Edit]]] = {}
    for group in together:  # named by the most
        results = [one for one, (begin, end, _) in group if end - begin > _SOON and (one.entry in entries or one.requires_grad)]
        most = max(alike(results, _kind_of), default=[], key=lambda of: sum(one.nbytes for one in of))
        values, edits = found.setdefault(_kind_of(most[0]) if most else NOWHERE, ([], []))
        values += most
        edits += [edit for _, edit in group]
    for origin, (values, edits) in found.items():
        if sum(one.nbytes for one in values) > _SHARES[Waste.HELD_OUTSIDE] * ledger.peak.nbytes:
            names = [one.origin.region or one.origin.module or "" for one in values]
            yield _advice(ledger, Waste.HELD_OUTSIDE, (names, origin.line), edits)


def _kind_of(one: Allocation) -> Origin:
    module, region = name_pattern((one.origin.module or "").partition(" ")[0]), name_pattern(one.origin.region or "")
    return one.origin._replace(module=module, region=region)


def _of_foreach(ledger: LedgerData, entries: _Entries) -> Iterator[Advice]:
    """Results of an optimizer's operators on lists, of all parameters at once."""
    made = [one for one in ledger.allocations if one.origin.maker is Maker.OPTIMIZER and _is_of_foreach(one.origin)]
    for group in alike(made, lambda one: (one.origin.optimizer, one.origin.line)):
        edits = [(one.born, one.freed or NEVER, -one.nbytes) for one in group]
        yield _advice(ledger, Waste.FOREACH, ([group[0].origin.optimizer or ""], group[0].origin.line), edits)


def _is_of_foreach(origin: Origin) -> bool:
    return (origin.operator or "").startswith("aten::_foreach_")
