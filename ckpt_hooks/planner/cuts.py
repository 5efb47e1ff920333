"""Options of a block: which results to keep, from nothing to all, each the cheapest for the bytes taken.

Which results to keep at a price for each byte is a minimum cut: a needed result is kept, at its price, or its operator runs
again, at its cost, and needs what it reads. A sweep of prices gives the convex hull; single results fill the gaps.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator

from .profiling import BlockCall, Profile
from .simulating import effect_of

# Options of the hull alone left peaks up to 5.6% below the budget; with single results added or dropped, 0.03 to 2.2%.
_PRICES = 28  # in the sweep
_MOST = 40  # options of a block


@dataclasses.dataclass(frozen=True)
class Choice:
    """An option of a block."""

    kept: tuple[int, ...] | None  # operators; None for no region, where autograd keeps what it saves
    nbytes: float  # kept; bytes that another block holds anyway count little
    cost: float = 0.0  # of the operators which run again, by which options of kept results compare
    is_nested: bool = False  # whether blocks inside are regions, too
    is_function: bool = False  # whether backward calls the block again, and replays no operators


class _Graph:
    """The needs among a block's operators; one which writes to a result belongs to the result's maker."""

    def __init__(self, profile: Profile, entry: BlockCall, lasting: Collection[int]) -> None:
        owner: dict[int, int] = {}  # of an allocation, the operator which made it
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

    def choice(self, kept: Iterable[int]) -> Choice:
        """Returns the option which keeps some results, as far as something needs these."""
        kept, todo, again, held = set(kept), list(self.roots), set[int](), set[int]()
        while todo:
            one = todo.pop()
            if one in again or one in held:
                continue
            if one in kept:
                held.add(one)
            else:
                again.add(one)
                todo += self.needs[one]
        return Choice(tuple(sorted(held)), sum(self.size[one] for one in held), sum(self.cost[one] for one in again))

    def cheapest(self, price: float) -> Choice:
        """Returns the option with the least cost, at a price for each byte kept."""
        flow = _Flow()
        for root in self.roots:
            flow.add("source", ("needed", root), _ALL)
        reached, todo = set[int](), list(self.roots)
        while todo:
            one = todo.pop()
            if one in reached:
                continue
            reached.add(one)
            size = self.size.get(one)
            flow.add(("needed", one), ("again", one), _ALL if size is None else price * size)
            flow.add(("again", one), "sink", self.cost[one])
            for other in self.needs[one]:
                flow.add(("again", one), ("needed", other), _ALL)
                todo.append(other)
        side = flow.cut()
        return self.choice(one for one in reached if ("needed", one) in side and ("again", one) not in side)


_ALL = 1e30


class _Flow:
    """A maximum flow, by shortest augmenting paths on levels (Dinic)."""

    def __init__(self) -> None:
        self._capacity: dict[object, dict[object, float]] = collections.defaultdict(dict)

    def add(self, start: object, end: object, capacity: float) -> None:
        self._capacity[start][end] = self._capacity[start].get(end, 0.0) + capacity
        self._capacity[end].setdefault(start, 0.0)

    def _levels(self) -> dict[object, int]:
        levels: dict[object, int] = {"source": 0}
        todo = collections.deque[object](["source"])
        while todo:
            one = todo.popleft()
            for other, capacity in self._capacity[one].items():
                if capacity > _LEAST and other not in levels:
                    levels[other] = levels[one] + 1
                    todo.append(other)
        return levels

    def cut(self) -> set[object]:
        """Returns the nodes on the side of the source of a minimum cut."""
        while "sink" in (levels := self._levels()):
            edges: dict[object, Iterator[object]] = {node: iter([*others]) for node, others in self._capacity.items()}
            while self._augment(levels, edges):
                pass
        return set(levels)

    def _augment(self, levels: dict[object, int], edges: dict[object, Iterator[object]]) -> bool:
        path: list[object] = ["source"]
        while path[-1] != "sink":
            one = path[-1]
            for other in edges[one]:
                if self._capacity[one][other] > _LEAST and levels.get(other) == levels[one] + 1:
                    path.append(other)
                    break
            else:
                path.pop()
                if not path:
                    return False
                # The edge to a dead end is passed by the iterator of the node before.
        amount = min(self._capacity[one][other] for one, other in itertools.pairwise(path))
        for one, other in itertools.pairwise(path):
            self._capacity[one][other] -= amount
            self._capacity[other][one] += amount
            edges[one] = iter([other, *edges[one]])  # which may have capacity left
        return True


_LEAST = 1e-9


#: The part of its bytes that a result counts which another block holds anyway, as its input. Where blocks come in a row, that
#: block lets go of the result when this one's backward begins.
_SHORT = 0.02


def lasting_in(profile: Profile) -> list[set[int]]:
    """Returns for each entry the allocations which another entry needs in backward, whatever is kept."""
    needed = [{*effect_of(profile, entry, ()).ends} for entry in profile.entries]
    counts = collections.Counter(number for one in needed for number in one)
    return [{number for number in counts if counts[number] > (number in own)} for own in needed]


def choices_of(profile: Profile, entry: BlockCall, lasting: Collection[int] = (), *, is_function: bool = False) -> list[Choice]:
    """Returns the options of a block which are worth choosing, from the fewest bytes up; the last has no region."""
    graph = _Graph(profile, entry, lasting)
    nothing = graph.choice(())
    largest = max(graph.cost.values(), default=0.0)
    smallest = min(graph.size.values(), default=1)
    found = {nothing.kept: nothing}
    price = max(largest, 1.0) / max(smallest, 1) * len(entry.ops)
    least = 1e-3
    ratio = (least / price) ** (1 / (_PRICES - 1)) if price > least else 0.5
    for _ in range(_PRICES):
        choice = graph.cheapest(price)
        found.setdefault(choice.kept, choice)
        price *= ratio
    hull = [*found.values()]
    for choice in hull:
        kept = set(choice.kept or ())
        for one in graph.size:
            other = graph.choice(kept ^ {one})
            found.setdefault(other.kept, other)
    nested = [Choice((), 0, is_nested=True)] if entry.inside else []
    called = [Choice((), 0, is_function=True)] if is_function else []
    return [*nested, *_front(found.values()), *called, Choice(None, sum(graph.size.values()))]


def _front(choices: Iterable[Choice]) -> list[Choice]:
    """Returns the options that no other beats in both bytes and cost, thinned to the most that are looked at."""
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda one: (one.nbytes, one.cost)):
        if not front or choice.cost < front[-1].cost:
            front.append(choice)
    while len(front) > _MOST:
        # The one whose loss leaves the smallest gap.
        gaps = [front[at + 1].nbytes - front[at - 1].nbytes for at in range(1, len(front) - 1)]
        del front[gaps.index(min(gaps)) + 1]
    return front
