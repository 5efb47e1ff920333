"""The options of each block, and the choice of an option for each: the least cost under a budget.

At a given price for each byte, the results to keep are a minimum cut: a needed result is kept, at its price, or its operator
runs again, at its cost, and then needs its inputs. A sweep of prices gives the convex hull; single results fill the gaps.

The choice is a greedy search with exchanges. While a block runs, options of the other blocks only add constants to the memory.
So time falls into windows, and the peak in each is a maximum over the changes of a single block, plus constants of the others.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from .profiling import BlockCall, Profile, Run, recorded_in
from .ranks import Ranks
from .simulating import Delta, Effect, effect_of, effect_with, function_effect_of, last_needs, nested_effect_of, timeline_of

# With fewer of these a plan leaves more of the budget unused; with more the search takes longer.
_PRICES = 28  # prices in the sweep for a block's options
_MOST = 40  # the most options of a block that the search tries
_MOST_INSIDE = 12  # the most options of a block in which modules inside are regions


@dataclasses.dataclass(frozen=True)
class Choice:
    """An option of a block."""

    kept: tuple[int, ...] | None  # operators whose results are kept; None for no region, where autograd decides
    nbytes: float  # of kept results; bytes that another block holds anyway count little
    cost: float = 0.0  # of the operators that run again
    is_nested: bool = False  # whether blocks inside are regions, too
    is_function: bool = False  # whether backward calls the block again, and replays no operators
    parts: tuple[str, ...] = ()  # modules that are regions in place of the block


class _Graph:
    """A block's operators, and the results that each needs; an operator that writes to a result is grouped with its maker."""

    def __init__(self, profile: Profile, entry: BlockCall, lasting: Collection[int]) -> None:
        owner: dict[int, int] = {}  # the operator that made each allocation
        leader = list(range(len(entry.ops)))
        for at, op in enumerate(entry.ops):
            for number in op.fresh:
                owner[number] = at
            for number, _ in op.makes:
                if number not in op.fresh and number in owner:
                    leader[at] = owner[number]
        self.cost: dict[int, float] = collections.defaultdict(float)
        self.needs: dict[int, set[int]] = collections.defaultdict(set)
        self.size: dict[int, float] = {}
        for at, op in enumerate(entry.ops):
            group = leader[at]
            self.cost[group] += op.cost + (profile.replay_cost if op.cost else 0.0)
            for value in op.reads:
                maker = entry.maker.get(value)
                if maker is not None and leader[maker] != group:
                    self.needs[group].add(leader[maker])
            if op.run is not None and op.fresh:
                sizes = (profile.allocations[number].nbytes * (_SHORT if number in lasting else 1) for number in op.fresh)
                self.size[group] = sum(sizes)
        self.roots = {
            leader[maker]
            for handle in entry.handles
            if handle.restored is not None and handle.value is not None and (maker := entry.maker.get(handle.value)) is not None
        }

        # Equal blocks share the options that ``_choices_of`` caches.
        needs = tuple((reader, *sorted(of)) for reader, of in self.needs.items())
        self._key = (*self.cost.items(),), needs, (*self.size.items(),), (*sorted(self.roots),)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Graph) and self._key == other._key

    def choice(self, kept: Iterable[int]) -> Choice:
        """Returns the option that keeps ``kept``, without results that backward does not need."""
        kept, todo, again, needed = set(kept), list(self.roots), set[int](), set[int]()
        while todo:
            node = todo.pop()
            if node in again or node in needed:
                continue
            if node in kept:
                needed.add(node)
            else:
                again.add(node)
                todo += self.needs[node]
        return Choice(tuple(sorted(needed)), sum(self.size[node] for node in needed), sum(self.cost[node] for node in again))

    def cheapest(self, price: float) -> Choice:
        """Returns the option with the least cost, at a price for each byte kept."""
        import networkx  # the import takes a third of a second

        flow = networkx.DiGraph()  # edges without a capacity are never cut
        flow.add_node("sink")
        flow.add_edges_from(("source", ("needed", root)) for root in self.roots)
        reached, todo = set[int](), list(self.roots)
        while todo:
            node = todo.pop()
            if node in reached:
                continue
            reached.add(node)
            size = self.size.get(node)
            flow.add_edge(("needed", node), ("again", node), **({} if size is None else {"capacity": price * size}))
            flow.add_edge(("again", node), "sink", capacity=self.cost[node])
            for other in self.needs[node]:
                flow.add_edge(("again", node), ("needed", other))
                todo.append(other)
        if not reached:
            return self.choice(())
        solve = networkx.algorithms.flow.boykov_kolmogorov  # the fastest algorithm in networkx
        _, (side, _) = networkx.minimum_cut(flow, "source", "sink", flow_func=solve)
        return self.choice(node for node in reached if ("needed", node) in side and ("again", node) not in side)


#: The fraction of its bytes that a result counts if another block holds the result anyway, as an input. That block lets go of
#: its input when the backward of this block begins, so keeping the result costs memory only from then on. More than nothing,
#: so that of several such results the smaller is cheaper.
_SHORT = 0.02


def lasting_in(profile: Profile) -> list[set[int]]:
    """Returns for each call of a block the allocations that another call needs in backward, whatever is kept."""
    needed = [{*effect_of(profile, entry, ()).ends} for entry in profile.entries]
    counts = collections.Counter(number for ends in needed for number in ends)
    return [{number for number in counts if counts[number] > (number in ends)} for ends in needed]


def choices_of(profile: Profile, entry: BlockCall, lasting: Collection[int], *, is_function: bool = False) -> list[Choice]:
    """Returns the options of a block that are worth choosing, from the fewest bytes up; the last has no region."""
    graph = _Graph(profile, entry, lasting)
    parts = [region for region in entry.inside if region.part]
    nested = [Choice((), 0, is_nested=True)] if len(parts) < len(entry.inside) else []
    called = [Choice((), 0, is_function=True)] if is_function else []
    inside = _choices_inside(profile, entry, parts, lasting, is_function)
    return [*nested, *_choices_of(graph, len(entry.ops)), *inside, *called, Choice(None, sum(graph.size.values()))]


def _choices_inside(
    profile: Profile, entry: BlockCall, parts: Iterable[BlockCall], lasting: Collection[int], is_function: bool
) -> list[Choice]:
    """Returns options in which up to three modules inside are regions that keep nothing, and the rest keeps all."""
    regions: list[tuple[BlockCall, Choice]] = []
    plain = effect_of(profile, entry, (), is_plain=True).ends.keys() - lasting
    for region in parts:
        effect = _effect_of(profile, Choice((), 0, is_function=is_function), (), entry, [region])
        sizes = {number: profile.allocations[number].nbytes for number in plain ^ (effect.ends.keys() - lasting)}
        nbytes = sum(-size if number in plain else size for number, size in sizes.items())
        if nbytes < 0:
            regions.append((region, Choice((), nbytes, effect.cost, is_function=is_function, parts=(region.part,))))
    choices = []
    for sets in itertools.chain(*(itertools.combinations(regions, count) for count in (1, 2, 3))):
        if all(part.end <= peer.begin or peer.end <= part.begin for (part, _), (peer, _) in itertools.combinations(sets, 2)):
            sums = sum(choice.nbytes for _, choice in sets), sum(choice.cost for _, choice in sets)
            choices.append(Choice((), *sums, is_function=is_function, parts=tuple(region.part for region, _ in sets)))
    return _front(choices, _MOST_INSIDE)


def _between(graph: _Graph, prices: Sequence[float]) -> list[Choice]:
    """Returns the cheapest options at falling prices, by bisection: prices between two with equal options have that option."""
    by_position = {at: graph.cheapest(prices[at]) for at in (0, len(prices) - 1)}
    todo = [(0, len(prices) - 1)]
    while todo:
        first, last = todo.pop()
        if last - first > 1 and by_position[first].kept != by_position[last].kept:
            middle = (first + last) // 2
            by_position[middle] = graph.cheapest(prices[middle])
            todo += (first, middle), (middle, last)
    return [by_position[at] for at in sorted(by_position)]


@functools.lru_cache(1024)
def _choices_of(graph: _Graph, num_ops: int) -> list[Choice]:
    nothing = graph.choice(())
    largest = max(graph.cost.values(), default=0.0)
    smallest = min(graph.size.values(), default=1)
    highest, least = max(largest, 1.0) / max(smallest, 1) * num_ops, 1e-3
    ratio = (least / highest) ** (1 / (_PRICES - 1)) if highest > least else 0.5
    hull = _between(graph, [highest * ratio**number for number in range(_PRICES)])
    by_kept = {choice.kept: choice for choice in (nothing, *hull)}
    # With only the hull, peaks were up to 5.6% below the budget; with single results added or dropped, 0.03 to 2.2%.
    for choice in [*by_kept.values()]:
        kept = set(choice.kept or ())
        for group in graph.size:
            varied = graph.choice(kept ^ {group})
            by_kept.setdefault(varied.kept, varied)
    return _front(by_kept.values())


def _front(choices: Iterable[Choice], most: int = _MOST) -> list[Choice]:
    """Returns the options that no other beats in both bytes and cost, thinned to ``most``."""
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, choice.cost)):
        if not front or choice.cost < front[-1].cost:
            front.append(choice)
    while len(front) > most:
        # Drop the option whose loss leaves the smallest gap.
        gaps = [front[at + 1].nbytes - front[at - 1].nbytes for at in range(1, len(front) - 1)]
        del front[gaps.index(min(gaps)) + 1]
    return front


@dataclasses.dataclass
class BlockOption:
    """An option of a block, with its effect in each of the block's calls."""

    choice: Choice
    effects: list[Effect]
    cost: float  # of the operators that run again, and of regions, in all calls
    region_seconds: float = 0.0  # seconds that recorded regions add to forward
    replay_seconds: float = 0.0  # seconds that regions add to the operators that run again


class Problem:
    """The bytes of each option of each block, in each window of a step."""

    def __init__(self, profile: Profile, options: Mapping[str, Sequence[BlockOption]], natural: Sequence[int]) -> None:
        self.profile = profile
        self.blocks = [*options]
        self.options = [options[name] for name in self.blocks]
        self.costs = [torch.tensor([option.cost for option in of], dtype=torch.float64) for of in self.options]
        spans: list[tuple[int, int, int]] = []  # begin, end, block
        for entry in profile.entries:
            number = self.blocks.index(entry.block)
            asked = [row for handle in entry.handles for row in (handle.restored, handle.let_go) if row is not None]
            spans.append((entry.begin, entry.end + 1, number))
            if asked:
                spans.append((min(asked), max(asked) + 1, number))
        bounds = sorted({0, profile.num_rows, *(row for begin, end, _ in spans for row in (begin, end))})
        self.natural = _with_common(natural, options, bounds)
        changes = [[self._changes_of(option.effects) for option in of] for of in self.options]
        # A window inside of a block's span has changes of that block alone. Between the spans several blocks may free memory:
        # there each of their rows begins a window, so that the bytes of the blocks add up in each window.
        owned = [(begin, end) for begin, end, _ in spans]
        rows = {row for of in changes for option_changes in of for row, *_ in option_changes}
        rows_between = {row for row in rows if not any(begin <= row < end for begin, end in owned)}
        self._bounds = sorted({*bounds, *rows_between})
        self._owners: list[int | None] = [None] * (len(self._bounds) - 1)
        for begin, end, number in spans:
            first, last = (bisect.bisect_left(self._bounds, min(row, profile.num_rows)) for row in (begin, end))
            self._owners[first:last] = [number] * (last - first)
        self._base = self._by_window(
            moment for moment in timeline_of(profile, (), self.natural) if moment[0] < profile.num_rows
        )
        # The bytes in each window without any block; then, for each block, the bytes that each option adds.
        self.base = torch.tensor([float(self._most(window)) for window in range(len(self._owners))], dtype=torch.float64)
        self.memory = [self._memory_of(number, of) for number, of in enumerate(changes)]

    def add_windows(self, ranks: Ranks) -> None:
        """Adds the windows of other ranks, so that a peak is the largest of any rank; ranks with equal memory count once."""
        distinct = list[tuple[torch.Tensor, list[torch.Tensor], list[int | None]]]()
        for base, memory, owners in ranks.all((self.base, self.memory, self._owners)):
            if not any(base.equal(other) and all(map(torch.equal, memory, others)) for other, others, _ in distinct):
                distinct.append((base, memory, owners))
        bases, memories, of_windows = zip(*distinct, strict=True)
        self.base, self._owners = torch.cat(bases), [*itertools.chain(*of_windows)]
        self.memory = [torch.cat(of_ranks, 1) for of_ranks in zip(*memories, strict=True)]

    def _by_window(self, moments: Iterable[Delta]) -> list[tuple[int, list[Delta]]]:
        """Returns for each window the sum of the changes before it, and the changes inside."""
        inside: list[list[Delta]] = [[] for _ in range(len(self._bounds) - 1)]
        for moment in moments:
            inside[bisect.bisect_right(self._bounds, moment[0]) - 1].append(moment)
        sums = [0, *itertools.accumulate(sum(nbytes for *_, nbytes in window) for window in inside)]
        return list(zip(sums, inside, strict=False))

    def _most(self, window: int, changes: Iterable[Delta] = (), before: int = 0) -> int:
        start, base = self._base[window]
        live = start + before
        moments = sorted((*base, *changes))
        # The memory before a change in the first row belongs to the window before.
        most: float = live if not moments or moments[0][0] > self._bounds[window] else -math.inf
        for _, _, nbytes in moments:
            live += nbytes
            most = max(most, live)
        return int(most)

    def _memory_of(self, number: int, options: Sequence[Sequence[Delta]]) -> torch.Tensor:
        rows = torch.empty(len(options), len(self._owners), dtype=torch.float64)
        for row, option in zip(rows, options, strict=True):
            inside = collections.defaultdict(list)
            for change in option:
                inside[bisect.bisect_right(self._bounds, change[0]) - 1].append(change)
            before = first = 0
            for window, changes in sorted(inside.items()):  # other windows have no changes
                row[first:window] = before
                changed = sum(nbytes for *_, nbytes in changes)
                if self._owners[window] == number:
                    row[window] = self._most(window, changes, before) - float(self.base[window])
                elif self._owners[window] is None:
                    row[window] = before + changed
                else:
                    row[window] = max(itertools.accumulate((nbytes for *_, nbytes in sorted(changes)), initial=before))
                before, first = before + changed, window + 1
            row[first:] = before
        return rows

    def _changes_of(self, effects: Sequence[Effect]) -> list[Delta]:
        """Returns the changes that a block's effects make to the timeline without any block."""
        changes: list[Delta] = []
        for effect in effects:
            changes += effect.deltas
            for number in effect.spared:
                allocation = self.profile.allocations[number]
                changes += [(allocation.born, -1, -allocation.nbytes), (self.natural[number], -1, allocation.nbytes)]
        for number, end in last_needs(effects).items():
            allocation, natural = self.profile.allocations[number], self.natural[number]
            if end > natural and not allocation.is_again:
                changes += [(natural, -1, allocation.nbytes), (end, -1, -allocation.nbytes)]
        return [change for change in changes if change[0] < self.profile.num_rows]

    # A descent, since the best option of each block by itself gave up to 1.8 times the least peak (Mixtral).
    @functools.cached_property
    def least(self) -> list[int]:
        """The choice with the least known peak, by a descent from four starts that changes a single block at a time."""
        alone = [int((memory + self.base).amax(1).argmin()) for memory in self.memory]
        starts = [alone, [0] * len(self.blocks), *([len(costs) - back for costs in self.costs] for back in (1, 2))]
        # Descend also without options with regions inside of blocks: among more options a descent gets stuck earlier.
        return min((self._descent([*start], without) for start in starts for without in self.without), key=self.peak)

    @functools.cached_property
    def without(self) -> list[list[list[int]]]:
        """Two sets of options to leave out, by block: none, and, if there are any, options with regions inside of the block."""
        inside = [[at for at, option in enumerate(of) if option.choice.parts] for of in self.options]
        return [[[] for _ in inside], *([inside] if any(inside) else [])]

    def _descent(self, chosen: list[int], without: Sequence[list[int]]) -> list[int]:
        total = self.total(chosen)
        peak = math.inf
        while float(total.max()) < peak:
            peak = float(total.max())
            for block, memory in enumerate(self.memory):
                peaks = (total + memory - memory[chosen[block]]).amax(1)
                peaks[without[block]] = math.inf
                option = int(peaks.argmin())
                if float(peaks[option]) < float(total.max()):
                    _take(self, chosen, total, block, option)
        return chosen

    def bottleneck(self) -> str | None:
        """Returns the block in whose forward or backward the least peak is; None if the peak is outside of blocks."""
        owner = self._owners[int(self.total(self.least).argmax())]
        return None if owner is None else self.blocks[owner]

    def total(self, chosen: Sequence[int]) -> torch.Tensor:
        """Returns the most bytes in each window."""
        total = self.base.clone()
        for memory, option in zip(self.memory, chosen, strict=True):
            total += memory[option]
        return total

    def peak(self, chosen: Sequence[int]) -> int:
        return int(self.total(chosen).max())

    def next_peak(self, chosen: Sequence[int]) -> float:
        """Returns the least peak after a single block takes a cheaper option; the present peak if no block has any."""
        total = self.total(chosen)
        peaks = [
            float((total + memory[costs < costs[option]] - memory[option]).amax(1).min())
            for memory, costs, option in zip(self.memory, self.costs, chosen, strict=True)
            if bool((costs < costs[option]).any())
        ]
        return min(peaks, default=float(total.max()))

    def cost(self, chosen: Sequence[int]) -> float:
        return sum(float(costs[option]) for costs, option in zip(self.costs, chosen, strict=True))


def _with_common(natural: Sequence[int], options: Mapping[str, Sequence[BlockOption]], bounds: Sequence[int]) -> list[int]:
    """Returns the ends of allocations that hold for every choice: a block needs an input whatever the option."""
    common = [*natural]
    longest: dict[int, int] = {}
    for of in options.values():
        last = [last_needs(option.effects) for option in of]
        for number, end in itertools.chain(*(ends.items() for ends in last)):
            longest[number] = max(longest.get(number, 0), end)
        for number in set(last[0]).intersection(*last):
            common[number] = max(common[number], min(ends[number] for ends in last))
    # A storage that both its maker and its reader hold would count twice. If the maker may hold the storage longer than the
    # reader, the storage counts to the end of the window in which the reader lets go of it.
    for number, end in longest.items():
        if natural[number] < common[number] < end:
            common[number] = bounds[bisect.bisect_left(bounds, common[number])]
    return common


def choose(problem: Problem, budget: float) -> list[int] | None:
    """Returns the option of each block with the least cost known under a budget; None if none fits."""
    sets = problem.without if len(problem.blocks) <= _FEW_TO_REPEAT else problem.without[:1]
    attempts = [chosen for without in sets if (chosen := _choose(problem, budget, without)) is not None]
    return min(attempts, key=problem.cost, default=None)


def _choose(problem: Problem, budget: float, without: Sequence[list[int]]) -> list[int] | None:
    chosen = [int(costs.argmin()) for costs in problem.costs]
    total = problem.total(chosen)
    while float(total.max()) > budget:
        best, step = 0.0, None
        excess = (total - budget).clamp(min=0).sum()
        for block, (memory, costs) in enumerate(zip(problem.memory, problem.costs, strict=True)):
            gain = excess - (total + memory - memory[chosen[block]] - budget).clamp(min=0).sum(1)
            price = (costs - costs[chosen[block]]).clamp(min=1e-9)
            rates = gain.clamp(min=0) / price
            rates[without[block]] = 0.0
            option = int(rates.argmax())
            if float(rates[option]) > best:
                best, step = float(rates[option]), (block, option)
        if step is None:
            return None
        _take(problem, chosen, total, *step)
    _exchange(problem, chosen, total, budget)
    return chosen


_FEW = 8  # the most blocks for which exchanges try any three blocks together
_FEW_TO_REPEAT = 64  # the most blocks for which the choice is also made without regions inside of blocks
_PASSES = 3  # passes over all pairs, if there are more than ``_FEW`` blocks


def _exchange(problem: Problem, chosen: list[int], total: torch.Tensor, budget: float) -> None:
    """Improves a choice by new options of single blocks, of pairs, and, with few blocks, of any three."""
    few = len(chosen) <= _FEW
    combinations = list(itertools.combinations(range(len(chosen)), min(3, len(chosen)))) if few else []
    for _ in itertools.count() if few else range(_PASSES):
        while _improve_one(problem, chosen, total, budget):
            pass
        if not (
            _improve_two(problem, chosen, total, budget)
            or any(_improve_jointly(problem, chosen, total, budget, blocks) for blocks in combinations)
        ):
            break


def _improve_jointly(problem: Problem, chosen: list[int], total: torch.Tensor, budget: float, blocks: Sequence[int]) -> bool:
    """Takes the cheapest options of ``blocks`` that fit with the present options of all other blocks."""
    memory, cost = total[None], torch.zeros(1, dtype=torch.float64)
    for block in blocks:
        memory = memory - problem.memory[block][chosen[block]]
    for block in blocks:
        memory = (memory[:, None] + problem.memory[block][None]).flatten(0, 1)
        cost = (cost[:, None] + problem.costs[block][None]).flatten()
    present = sum(float(problem.costs[block][chosen[block]]) for block in blocks)
    at = int(torch.where(memory.amax(1) <= budget, cost, math.inf).argmin())
    if not float(memory[at].max()) <= budget or float(cost[at]) >= present * (1 - 1e-12):
        return False
    for block in reversed(blocks):
        at, option = divmod(at, len(problem.costs[block]))
        _take(problem, chosen, total, block, option)
    return True


def _improve_one(problem: Problem, chosen: list[int], total: torch.Tensor, budget: float) -> bool:
    best, step = 1e-9, None
    for block, (memory, costs) in enumerate(zip(problem.memory, problem.costs, strict=True)):
        fits = (total + memory - memory[chosen[block]]).amax(1) <= budget
        saved = torch.where(fits, costs[chosen[block]] - costs, 0.0)
        option = int(saved.argmax())
        if float(saved[option]) > best:
            best, step = float(saved[option]), (block, option)
    if step is None:
        return False
    _take(problem, chosen, total, *step)
    return True


def _improve_two(problem: Problem, chosen: list[int], total: torch.Tensor, budget: float) -> bool:
    """Gives blocks cheaper options for which another block, at less cost, makes room; returns whether any block got one."""
    memory, all_costs = torch.cat(problem.memory), torch.cat(problem.costs)
    owners = torch.cat([torch.full((len(block_costs),), block) for block, block_costs in enumerate(problem.costs)])
    has_improved = False
    for first in range(len(chosen)):
        costs = problem.costs[first]
        present = torch.stack([block_memory[option] for block_memory, option in zip(problem.memory, chosen, strict=True)])
        prices = torch.stack([block_costs[option] for block_costs, option in zip(problem.costs, chosen, strict=True)])
        dearer = all_costs - prices[owners]
        best, step = 1e-9, None
        for option in [option for option in range(len(costs)) if float(costs[option]) < float(costs[chosen[first]])]:
            after = total + problem.memory[first][option] - problem.memory[first][chosen[first]]
            saved = float(costs[chosen[first]] - costs[option]) - dearer
            # Compare whole rows, which is slow, only for options that save cost and make room in the fullest window.
            rows, least = ((saved > best) & (owners != first)).nonzero().flatten(), int(after.argmax())
            rows = rows[after[least] + (memory[rows, least] - present[owners[rows], least]) <= budget]
            rows = rows[(after + (memory[rows] - present[owners[rows]])).amax(1) <= budget] if len(rows) else rows
            if len(rows):
                row = int(rows[saved[rows].argmax()])
                best, step = float(saved[row]), (option, row)
        if step is not None:
            option, row = step
            second = int(owners[row])
            _take(problem, chosen, total, first, option)
            _take(problem, chosen, total, second, row - int((owners < second).sum()))
            has_improved = True
    return has_improved


def _take(problem: Problem, chosen: list[int], total: torch.Tensor, block: int, option: int) -> None:
    total += problem.memory[block][option] - problem.memory[block][chosen[block]]
    chosen[block] = option


def _regions_of(choice: Choice, entry: BlockCall) -> list[BlockCall]:
    """Returns the regions of a block's call: none, a region around the call, or regions of modules inside."""
    if choice.parts:
        return [region for region in entry.inside if region.part in choice.parts]
    return [] if choice.kept is None else [entry]


def _effect_of(
    profile: Profile, choice: Choice, runs: Collection[Run | None], entry: BlockCall, regions: Sequence[BlockCall]
) -> Effect:
    def of(region: BlockCall) -> Effect:
        if choice.is_function:
            return function_effect_of(profile, region)
        return effect_of(profile, region, [at for at, op in enumerate(region.ops) if op.run in runs])

    return nested_effect_of(profile, entry) if choice.is_nested else effect_with(profile, entry, regions, of)


def block_options(profile: Profile, choices: Mapping[str, Sequence[Choice]]) -> dict[str, list[BlockOption]]:
    """Returns the options of each block, from its choices by its first call."""
    options: dict[str, list[BlockOption]] = {}
    for block, of in choices.items():
        entries = profile.calls_of(block)
        first = entries[0]
        options[block] = []
        for choice in of:
            regions = [_regions_of(choice, entry) for entry in entries]
            runs = {first.ops[at].run for at in choice.kept or ()}
            effects = [_effect_of(profile, choice, runs, *call) for call in zip(entries, regions, strict=True)]
            if choice.is_function and not choice.parts:
                # Autocast casts a parameter once for all calls of forward, and once more in each call by backward.
                for entry, effect in zip(entries, effects, strict=True):
                    effect.cost += max(0.0, first.cast_cost - entry.cast_cost)
            num_calls = sum(map(len, regions)) if choice.is_function else 0
            recorded = 0 if choice.is_function else sum(map(recorded_in, itertools.chain(*regions)))
            pairs = zip(entries, effects, strict=True)
            replayed = sum(entry.ops[at].cost > 0 for entry, effect in pairs for at in effect.again) if recorded else 0
            cost = sum(effect.cost for effect in effects) + recorded * profile.record_cost + replayed * profile.replay_cost
            cost += num_calls * profile.call_cost
            again = profile.replay_seconds * replayed + profile.call_seconds * num_calls
            options[block].append(BlockOption(choice, effects, cost, profile.record_seconds * recorded, again))
    return options
