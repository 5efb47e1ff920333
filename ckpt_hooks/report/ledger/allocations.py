"""Allocations of a step, and entries of its regions: makers, lines, lives and holders, by a replay of the rows."""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from ckpt_hooks._core.events import Region
from ckpt_hooks._core.holdings import Reason

from .rows import Mark, Moment, Place, Row


class Maker(str, enum.Enum):
    """What made an allocation. Of several, the first in this list counts."""

    #: The recompute of a region.
    RECOMPUTE = "recompute"
    #: Forward of a region.
    REGION = "region"
    #: A node of backward.
    BACKWARD = "backward"
    #: Forward of a module, outside of regions.
    MODULE = "module"
    #: An optimizer.
    OPTIMIZER = "optimizer"
    #: None of these.
    OUTSIDE = "outside"


class Origin(NamedTuple):
    """Where an allocation comes from.

    Attributes:
        maker: The maker.
        region: The innermost region, by module and name, as in ``"layers.0 Block"``; None outside. Of a node of backward, the
            region in whose forward the node was made.
        module: The innermost called module, by its name in the outermost one and its class, as in ``"layers.0.mlp Linear"``;
            None outside. Of a node of backward, the module in whose forward the node was made.
        operator: The outermost operator, as in ``"aten::linear"``; None outside of operators.
        node: The running node of backward, as in ``"AddmmBackward0"``; None outside of backward.
        optimizer: The running call of an optimizer, as in ``"AdamW.step"``; None outside.
        line: The line of the program which called into torch, or else which entered the region, as in ``"model.py:12"``; None
            where unknown.
    """

    maker: Maker
    region: str | None
    module: str | None
    operator: str | None
    node: str | None
    optimizer: str | None
    line: str | None


@dataclasses.dataclass
class Hold:
    """A time for which a storage is held.

    Attributes:
        reason: The reason.
        region: The holding region; None for backward's graph.
        entry: The number of the region's entry; None for backward's graph.
        begin: The number of changes before.
        end: The number of changes before its end; None if that was not seen.
    """

    reason: Reason
    region: str | None
    entry: int | None
    begin: int
    end: int | None = None


@dataclasses.dataclass
class Allocation:
    """Memory allocated in a step.

    Attributes:
        nbytes: The size in bytes.
        address: The address.
        origin: The origin.
        born: The index of the change which allocated the memory.
        freed: The index of the change which freed the memory; None if the memory outlives the ledger.
        is_gradient: Whether the memory is the gradient of a leaf.
        holds: The holds, as far as known.
        entry: The number of the innermost region entry around; None outside of regions.
        requires_grad: Whether the operator made a node of autograd.
    """

    nbytes: int
    address: int
    origin: Origin
    born: int
    freed: int | None = None
    is_gradient: bool = False
    holds: list[Hold] = dataclasses.field(default_factory=list)
    entry: int | None = None
    requires_grad: bool = False

    def is_alive_at(self, change: int) -> bool:
        """Whether the memory is in use after a change."""
        return self.born <= change and (self.freed is None or change < self.freed)

    def reason_at(self, change: int) -> Reason | None:
        """Returns the reason for the use of the memory after a change; None where no region and no backward is the reason."""
        reasons = {hold.reason for hold in self.holds if hold.begin <= change + 1 and (hold.end is None or change < hold.end)}
        if self.is_gradient:
            reasons.add(Reason.GRADIENT)
        return next((reason for reason in Reason if reason in reasons), None)


@dataclasses.dataclass
class Need:
    """A storage which backward needs of a region.

    Attributes:
        allocation: The index of the allocation.
        is_dropped: Whether the region holds no reference to the storage.
        begin: The number of changes before.
        end: The number of changes before its end; None if that was not seen.
    """

    allocation: int
    is_dropped: bool
    begin: int
    end: int | None = None


@dataclasses.dataclass
class RegionEntry:
    """One entry of a region.

    Attributes:
        name: The module and the name of the region, as in ``"layers.0 Block"``.
        path: The names of the regions around and its own, outermost first.
        module: The region's module, or that around; None where unknown.
        site: The entering line; None where unknown.
        is_again: Whether the recompute of a region around entered the region.
        parent: The number of the region around; None without.
        begin: The number of changes before.
        end: The number of changes before the end of forward.
        modules: The number of calls of modules in its forward.
        recomputes: For each recompute, the numbers of changes before its begin and its end.
        needs: The storages which backward needs.
    """

    name: str
    path: tuple[str, ...]
    module: str | None
    site: str | None
    is_again: bool
    parent: int | None
    begin: int
    end: int
    modules: int = 0
    recomputes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    needs: list[Need] = dataclasses.field(default_factory=list)


class Change(NamedTuple):
    """An allocation or a free.

    Attributes:
        time: The time in ns, on the profiler's clock.
        allocation: The index of the allocation; None for older memory.
        nbytes: The bytes allocated; negative for a free.
        live: The bytes in use afterwards, above those in use when the ledger began.
        place: The ranges of the profiler around.
    """

    time: int
    allocation: int | None
    nbytes: int
    live: int
    place: Place


class _Opened(NamedTuple):
    """An open module, region or recompute."""

    key: int | None  # the number of the region; None for a module
    region: str | None  # in words; of a module, that around
    module: str | None  # in words; of a region, that around
    maker: Maker
    line: str | None  # which entered the region
    entry: int | None  # the number of the region around, or its own; None outside


_OUTSIDE = _Opened(None, None, None, Maker.OUTSIDE, None, None)
_IN_REGION = (Maker.RECOMPUTE, Maker.REGION)


class RowReader:
    """Goes through the rows of a step in the order of time."""

    def __init__(self, older: Mapping[int, int], device: str, differentiable: Set[int]) -> None:
        self._differentiable = differentiable
        self.allocations: list[Allocation] = []
        self.changes: list[Change] = []
        self.entries: dict[int, RegionEntry] = {}
        self._needs: dict[tuple[int, Any], Need] = {}
        self._older, self._device, self._live = {**older}, device, 0
        self._alive: dict[int, int] = {}  # allocations, by address
        self._opened: list[_Opened] = []
        self._holds: dict[int, dict[Any, Hold]] = {}  # by region and key
        # What was open when nodes of autograd were made: from each number of a node on.
        self._numbers: list[int] = []
        self._makers: list[_Opened] = []
        self._origins: dict[tuple[_Opened, Place], Origin] = {}

    def run(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.mark is not None:
                self._pass(row.mark, row)
            elif str(row.device) != self._device:
                continue
            elif row.nbytes > 0:
                self._allocate(row)
            else:
                self._free(row)

    def _change(self, row: Row, allocation: int | None, nbytes: int) -> None:
        self._live += nbytes
        self.changes.append(Change(row.time, allocation, nbytes, self._live, row.place))

    def _allocate(self, row: Row) -> None:
        number = self._alive[row.address] = len(self.allocations)
        made = Allocation(row.nbytes, row.address, self._origin_at(row.place), len(self.changes))
        made.entry = self._opened[-1].entry if self._opened else None
        made.requires_grad = row.run in self._differentiable
        self.allocations.append(made)
        self._change(row, number, row.nbytes)

    def _free(self, row: Row) -> None:
        number = self._alive.pop(row.address, None)
        if number is None:
            # On the host storages tell of their end, with their sizes. The profiler knows memory from before if an earlier
            # profile saw its allocation, and may tell the size of another one that had its address then.
            if self._device != "cpu":
                self._change(row, None, row.nbytes)
            return
        allocation = self.allocations[number]
        allocation.freed = len(self.changes)
        if row.place.node is not None and allocation.origin.maker in _HELD_BY_GRAPH and not allocation.holds:
            # Nothing but the graph, as freed by backward: of a result kept by the program as well, the end is elsewhere.
            allocation.holds.append(Hold(Reason.SAVED, None, None, allocation.born, allocation.freed))
        self._change(row, number, row.nbytes)

    def _origin_at(self, place: Place) -> Origin:
        opened = self._opened[-1] if self._opened else _OUTSIDE
        maker = opened.maker
        if maker not in _IN_REGION and place.node is not None:
            maker, opened = Maker.BACKWARD, self._maker_of(place.sequence)
        elif maker is Maker.OUTSIDE and place.optimizer is not None:
            maker = Maker.OPTIMIZER
        key = opened._replace(maker=maker), place
        found = self._origins.get(key)
        if found is None:
            line = place.line if maker is not Maker.BACKWARD else None
            found = self._origins[key] = Origin(
                maker,
                opened.region,
                opened.module,
                place.operator,
                place.node,
                place.optimizer,
                line or opened.line,
            )
        return found

    def _maker_of(self, sequence: int) -> _Opened:
        """Returns what was open when a node of autograd was made."""
        at = bisect.bisect_right(self._numbers, sequence) - 1
        return self._makers[at] if at >= 0 and sequence >= 0 else _OUTSIDE

    def _pass(self, mark: Mark, row: Row) -> None:
        moment, data = mark.moment, mark.data
        around = self._opened[-1] if self._opened else _OUTSIDE
        if moment is Moment.MODULE_BEGINS:
            maker = around.maker if around.maker in _IN_REGION else Maker.MODULE
            name = " ".join(filter(None, data))
            self._opened.append(_Opened(None, around.region, name, maker, around.line, around.entry))
            if around.entry is not None and around.maker is Maker.REGION:
                self.entries[around.entry].modules += 1
        elif moment is Moment.REGION_BEGINS or moment is Moment.RECOMPUTE_BEGINS:
            region: Region = data
            is_again = moment is Moment.RECOMPUTE_BEGINS or region.in_recompute
            maker = Maker.RECOMPUTE if is_again else Maker.REGION
            name, now = _region_in_words(region), len(self.changes)
            self._opened.append(_Opened(region.id, name, around.module, maker, region.site, region.id))
            entry = self.entries.get(region.id)
            if entry is None:
                place = region.module, region.site
                entry = RegionEntry(name, region.path, *place, region.in_recompute, region.parent, now, now)
                self.entries[region.id] = entry
            if moment is Moment.RECOMPUTE_BEGINS:
                entry.recomputes.append((now, now))
        elif moment in _ENDS:
            self._close(data)
            if moment is Moment.REGION_ENDS and data in self.entries:
                self.entries[data].end = len(self.changes)
            elif moment is Moment.RECOMPUTE_ENDS and data in self.entries and self.entries[data].recomputes:
                recomputes = self.entries[data].recomputes
                recomputes[-1] = recomputes[-1][0], len(self.changes)
        elif moment is Moment.HELD:
            self._hold(*data)
        elif moment is Moment.DROPPED:
            region_id, key, address = data
            self._need(region_id, key, address, is_dropped=True)
        elif moment is Moment.LET_GO:
            self._let_go(*data)
        elif moment is Moment.FRAME_GONE:
            for key in [*self._holds.get(data, ())]:
                self._let_go(data, key)
        elif moment is Moment.OLDER_FREED and data in self._older:
            self._change(row, None, -self._older.pop(data))
        elif moment is Moment.GRADIENTS:
            for address in data:
                if address in self._alive:
                    self.allocations[self._alive[address]].is_gradient = True
        if self._opened[-1:] != [around] and mark.sequence is not None:
            self._numbers.append(mark.sequence)
            self._makers.append(self._opened[-1] if self._opened else _OUTSIDE)

    def _close(self, key: int | None) -> None:
        """Closes the innermost module or region of a number, with whatever is left open inside."""
        for at in reversed(range(len(self._opened))):
            if self._opened[at].key == key:
                del self._opened[at:]
                return

    def _hold(self, region: Region, key: Any, reason: Reason, address: int) -> None:
        number = self._alive.get(address)
        if number is not None:
            self._let_go(region.id, key)
            if isinstance(key, int):  # a position of a saved tensor
                self._need(region.id, key, address, is_dropped=False)
            hold = self._holds.setdefault(region.id, {})[key] = Hold(
                reason, _region_in_words(region), region.id, len(self.changes)
            )
            self.allocations[number].holds.append(hold)

    def _let_go(self, region: int, key: Any) -> None:
        hold = self._holds.get(region, {}).pop(key, None)
        if hold is not None:
            hold.end = len(self.changes)
        need = self._needs.pop((region, key), None)
        if need is not None:
            need.end = len(self.changes)

    def _need(self, region: int, key: int, address: int, *, is_dropped: bool) -> None:
        number = self._alive.get(address)
        if number is not None and region in self.entries:
            need = self._needs[region, key] = Need(number, is_dropped, len(self.changes))
            self.entries[region].needs.append(need)


_ENDS = frozenset({Moment.MODULE_ENDS, Moment.REGION_ENDS, Moment.RECOMPUTE_ENDS})
_HELD_BY_GRAPH = frozenset({Maker.REGION, Maker.MODULE, Maker.OUTSIDE})


def _region_in_words(region: Region) -> str:
    name = region.path[-1]
    return name if not region.module or region.module == name else f"{region.module} {name}"
