"""The data of a ledger: allocations, changes, entries of regions, phases, and what holds memory at each moment."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_hooks._core.events import Region
from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.misuse import integer_in, wrong
from ckpt_hooks.report.printing import NOWHERE, Maker, Origin, json_of

from .rows import Row


@dataclasses.dataclass
class Hold:
    """A time for which a storage is held.

    Attributes:
        reason: The reason.
        region: The region; None for backward's graph.
        entry: The number of the region's entry; None for backward's graph.
        begin: The number of changes before.
        end: The number of changes before its end; None if that was not seen.
        allocation: The index of the allocation.
    """

    reason: Reason
    region: str | None
    entry: int | None
    begin: int
    end: int | None
    allocation: int


@dataclasses.dataclass
class Allocation:
    """Memory allocated in a step.

    Attributes:
        nbytes: Size in bytes.
        address: The address.
        origin: What made it.
        born: Index of the change that allocated it.
        freed: Index of the change that freed it; None if it outlives the ledger.
        is_gradient: Whether it is the gradient of a leaf.
        holds: When regions or backward held it, as far as known.
        entry: Number of the innermost region entry around; None outside of regions.
    """

    nbytes: int
    address: int
    origin: Origin
    born: int
    freed: int | None = None
    is_gradient: bool = False
    holds: list[Hold] = dataclasses.field(default_factory=list)
    entry: int | None = None


@dataclasses.dataclass
class RegionEntry:
    """An entry into a region.

    Attributes:
        name: Names of the module and the region, such as ``"layers.0 Block"``.
        module: The module that the region runs, or the module around; None if unknown.
        site: The line that entered; None if unknown.
        is_again: Whether a recompute of an outer region entered.
    """

    name: str
    module: str | None
    site: str | None
    is_again: bool


class Change(NamedTuple):
    """An allocation or a free.

    Attributes:
        time: Time in nanoseconds on the profiler's clock.
        allocation: Index of the allocation; None for memory from before.
        nbytes: Bytes allocated; negative for a free.
        live: Bytes in use afterwards, above those in use when the ledger began.
        place: The operator, node, optimizer and line around, from the profiler's ranges.
    """

    time: int
    allocation: int | None
    nbytes: int
    live: int
    place: Origin


class _Opened(NamedTuple):
    key: int | None  # the number of the region; None for a module
    origin: Origin  # of memory that is made inside, without the operator
    entry: int | None  # the number of the region around, or of this region; None outside


_OUTSIDE = _Opened(None, NOWHERE, None)
_IN_REGION = (Maker.RECOMPUTE, Maker.REGION)
_FORWARD = (Maker.REGION, Maker.MODULE, Maker.OUTSIDE)


class StepReader:
    """Reads the rows of a step in the order of time; a mark in a row calls the method of its name, such as ``entered``."""

    def __init__(self, older: Mapping[int, int], device: str) -> None:
        self.allocations: list[Allocation] = []
        self.changes: list[Change] = []
        self.entries: dict[int, RegionEntry] = {}
        self._older, self._device, self._live = {**older}, device, 0
        self._alive: dict[int, int] = {}  # allocations, by address
        self._opened: list[_Opened] = [_OUTSIDE]
        self._holds: dict[int, dict[Any, Hold]] = {}  # by region and key
        # The module or region that was open when nodes of autograd were made, each with the number of the first node.
        self._numbers: list[int] = []
        self._makers: list[_Opened] = []

    def run(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.mark is not None:
                self._row, around = row, self._opened[-1]
                getattr(self, row.mark.event)(*row.mark.args)
                if self._opened[-1] is not around and row.mark.sequence is not None:
                    self._numbers.append(row.mark.sequence)
                    self._makers.append(self._opened[-1])
            elif str(row.device) == self._device:
                (self._allocate if row.nbytes > 0 else self._free)(row)

    def _change(self, row: Row, allocation: int | None, nbytes: int) -> None:
        self._live += nbytes
        self.changes.append(Change(row.time, allocation, nbytes, self._live, row.place))

    def _allocate(self, row: Row) -> None:
        number = self._alive[row.address] = len(self.allocations)
        allocation = Allocation(row.nbytes, row.address, self._origin_of(row), len(self.changes))
        allocation.entry = self._opened[-1].entry
        self.allocations.append(allocation)
        self._change(row, number, row.nbytes)

    def _free(self, row: Row) -> None:
        number = self._alive.pop(row.address, None)
        if number is None:
            # On the host ``older_freed`` counts memory from before. The profiler may report such a free too, but with the size
            # of another allocation at this address, from an earlier profile.
            if self._device != "cpu":
                self._change(row, None, row.nbytes)
            return
        allocation = self.allocations[number]
        allocation.freed = len(self.changes)
        if row.place.node is not None and allocation.origin.maker in _FORWARD and not allocation.holds:
            # Backward freed it, so only the graph held it: a result that the program also keeps is freed elsewhere.
            allocation.holds.append(Hold(Reason.SAVED, None, None, allocation.born, allocation.freed, number))
        self._change(row, number, row.nbytes)

    def _origin_of(self, row: Row) -> Origin:
        opened, place = self._opened[-1], row.place
        maker, line = opened.origin.maker, place.line
        if maker not in _IN_REGION and place.node is not None:
            at = bisect.bisect_right(self._numbers, row.sequence) - 1
            maker, line, opened = Maker.BACKWARD, None, self._makers[at] if at >= 0 and row.sequence >= 0 else _OUTSIDE
        elif maker is Maker.OUTSIDE and place.optimizer is not None:
            maker = Maker.OPTIMIZER
        around = opened.origin
        return place._replace(maker=maker, region=around.region, module=around.module, line=line or around.line)

    def entered(self, region: Region, *, is_recompute: bool = False) -> None:
        maker = Maker.RECOMPUTE if is_recompute or region.in_recompute else Maker.REGION
        name = region.path[-1]
        name = name if not region.module or region.module == name else f"{region.module} {name}"
        origin = Origin(maker, name, self._opened[-1].origin.module, line=region.site)
        self._opened.append(_Opened(region.id, origin, region.id))
        if region.id not in self.entries:
            self.entries[region.id] = RegionEntry(name, region.module, region.site, region.in_recompute)

    def exited(self, key: int | None) -> None:
        for at in reversed(range(1, len(self._opened))):
            if self._opened[at].key == key:
                del self._opened[at:]
                return

    recomputed = exited

    def recomputing(self, region: Region, in_order: bool) -> None:
        self.entered(region, is_recompute=True)

    def module_begins(self, name: str) -> None:
        around = self._opened[-1]
        maker = around.origin.maker if around.origin.maker in _IN_REGION else Maker.MODULE
        self._opened.append(_Opened(None, around.origin._replace(maker=maker, module=name), around.entry))

    def holds(self, region: int, key: Any, reason: Reason, address: int) -> None:
        number = self._alive.get(address)
        if number is None:
            return
        self.let_go(region, key)
        name = self.entries[region].name if region in self.entries else None
        hold = self._holds.setdefault(region, {})[key] = Hold(reason, name, region, len(self.changes), None, number)
        self.allocations[number].holds.append(hold)

    def let_go(self, region: int, key: Any) -> None:
        hold = self._holds.get(region, {}).pop(key, None)
        if hold is not None:
            hold.end = len(self.changes)

    def frame_gone(self, region: int) -> None:
        for hold in self._holds.pop(region, {}).values():
            hold.end = len(self.changes)

    def older_freed(self, address: int) -> None:
        if address in self._older:
            self._change(self._row, None, -self._older.pop(address))

    def gradients(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            if address in self._alive:
                self.allocations[self._alive[address]].is_gradient = True


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a step.

    Attributes:
        name: ``"forward"`` (up to a backward), ``"backward"``, ``"optimizer"`` or ``"rest"``.
        begin: Index of its first change.
        end: Index after its last change.
        peak_nbytes: Its peak in bytes, above those in use when the ledger began.
        end_nbytes: Bytes in use at its end, above those in use when the ledger began.
    """

    name: str
    begin: int
    end: int
    peak_nbytes: int
    end_nbytes: int


@dataclasses.dataclass(frozen=True)
class Holder:
    """Storages with the same origin, held for the same reason.

    Attributes:
        nbytes: Their bytes.
        count: Their number.
        origin: What made them.
        reason: Why backward holds them; None if only the program holds them.
    """

    nbytes: int
    count: int
    origin: Origin
    reason: Reason | None

    def to_json(self) -> dict[str, Any]:
        """Returns the holder as values for ``json.dumps``, with those of its origin."""
        values = json_of(self)
        return {**values.pop("origin"), **values}


@dataclasses.dataclass(frozen=True)
class LedgerPeak:
    """The moment with the most memory in use.

    Attributes:
        nbytes: Bytes in use, above those in use when the ledger began.
        total_nbytes: All bytes in use.
        older_nbytes: Bytes in use from before the ledger.
        change: Index of the change that reached the peak; -1 for the start.
        phase: The phase, such as ``"backward"``.
        origin: What made the last allocation before the peak; None at the start.
        holders: The storages in use that were allocated in the ledger, by origin and reason, the largest first.
    """

    nbytes: int
    total_nbytes: int
    older_nbytes: int
    change: int
    phase: str
    origin: Origin | None
    holders: tuple[Holder, ...]

    to_json = json_of


class LedgerData:
    """The memory of one device in a step; see :class:`MemoryLedger` for the attributes."""

    device: str
    base_nbytes: int
    allocations: Sequence[Allocation]
    changes: Sequence[Change]
    devices: Sequence[str]
    entries: Mapping[int, RegionEntry]

    def __getattr__(self, name: str) -> Any:
        if name in LedgerData.__annotations__:
            raise RuntimeError(f"{name!r} of a ledger was read while its block runs. Read it after the `with` block.")
        return object.__getattribute__(self, name)  # raises AttributeError

    def fill(self, rows: Sequence[Row], older: Mapping[int, int], device: str | None = None) -> None:
        """Fills the ledger from the rows of the step, and from the sizes of older storages by address."""
        # By default an accelerator that allocated: its memory runs out before the host's.
        devices = list(dict.fromkeys(str(row.device) for row in rows if row.mark is None)) or ["cpu"]
        self.device = device or next((name for name in devices if name != "cpu"), "cpu")
        is_on_host = self.device == "cpu"
        replay = StepReader(older if is_on_host else {}, self.device)
        replay.run(rows)
        first = next((row for row in rows if row.mark is None and str(row.device) == self.device), None)
        self.base_nbytes = sum(older.values()) if is_on_host or first is None else first.total - first.nbytes
        self.allocations, self.changes, self.entries = tuple(replay.allocations), tuple(replay.changes), replay.entries
        self.devices, self._taken = tuple(devices), (rows, older)
        for number, allocation in enumerate(self.allocations):
            reason = _IN_BACKWARD.get(allocation.origin.maker)
            if reason is not None and allocation.freed is not None:
                phase = self.phases[bisect.bisect_right(self.phases, allocation.born, key=operator.attrgetter("begin")) - 1]
                if phase.name == "backward" and allocation.freed < phase.end:
                    allocation.holds.append(Hold(reason, None, None, allocation.born, allocation.freed, number))

    @functools.cached_property
    def peak(self) -> LedgerPeak:
        """The moment with the most memory in use; the first of several."""
        at = max(range(len(self.changes)), key=lambda change: self.changes[change].live, default=-1)
        if at >= 0 and self.changes[at].live <= 0:
            at = -1
        live = self.changes[at].live if at >= 0 else 0
        holders = self.holders_at(at)
        new = sum(holder.nbytes for holder in holders)
        number = self.changes[at].allocation if at >= 0 else None
        phase = next((phase.name for phase in self.phases if phase.begin <= at < phase.end), "forward")
        origin = None if number is None else self.allocations[number].origin
        return LedgerPeak(live, self.base_nbytes + live, self.base_nbytes + live - new, at, phase, origin, holders)

    def holders_at(self, change: int) -> tuple[Holder, ...]:
        """Returns what is in use after a change, of what was allocated in the ledger; the largest first.

        Args:
            change: The index of the change.
        """
        if (number := integer_in(change)) is None or not -1 <= number < len(self.changes):
            wanted = f"the index of a change, below {len(self.changes)}"
            raise wrong(change, "change", wanted, "Pass -1 for the start.", TypeError if number is None else ValueError)
        sizes: dict[tuple[Origin, Reason | None], list[int]] = {}
        for alloc in self.allocations:
            if alloc.born <= change and (alloc.freed is None or change < alloc.freed):
                reasons = {
                    hold.reason for hold in alloc.holds if hold.begin <= change + 1 and (hold.end is None or change < hold.end)
                }
                reasons |= {Reason.GRADIENT} if alloc.is_gradient else set()
                key = alloc.origin, next((reason for reason in Reason if reason in reasons), None)
                sizes.setdefault(key, []).append(alloc.nbytes)
        holders = (Holder(sum(of), len(of), *key) for key, of in sizes.items())
        return tuple(sorted(holders, key=operator.attrgetter("nbytes"), reverse=True))

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, each a :class:`Phase`, in order."""
        changes, places = self.changes, (change.place for change in self.changes)
        parts = [
            "backward" if place.node is not None else "optimizer" if place.optimizer is not None else "rest" for place in places
        ]
        runs = [(name, [*numbers]) for name, numbers in itertools.groupby(range(len(changes)), parts.__getitem__)]
        phases: list[tuple[str, int, int]] = []
        for at, (name, numbers) in enumerate(runs):
            begin, end = numbers[0], numbers[-1] + 1
            # A run that allocates nothing, such as a pause between two nodes of backward, belongs to the phase before.
            if name == "rest" and phases and all(change.nbytes < 0 for change in changes[begin:end]):
                name = phases[-1][0]
            elif name == "rest" and next((later for later, _ in runs[at + 1 :] if later != "rest"), None) == "backward":
                name = "forward"
            if phases and phases[-1][0] == name:
                begin = phases.pop()[1]
            phases.append((name, begin, end))
        if phases and phases[0][0] == "rest" and all(name != "backward" for name, *_ in phases):
            phases[0] = "forward", *phases[0][1:]
        live = [change.live for change in changes]
        return tuple(Phase(name, begin, end, max(live[begin:end]), live[end - 1]) for name, begin, end in phases)


#: The reasons for results that a backward made, used and freed.
_IN_BACKWARD = {Maker.RECOMPUTE: Reason.RECOMPUTED, Maker.BACKWARD: Reason.BACKWARD}


def maker_in_words(origin: Origin, where: str | None = None) -> str:
    """Returns the maker of an allocation in words, as in ``"recompute of layers.0 Block"``."""
    where = origin.region or origin.module or "" if where is None else where
    words = {
        Maker.REGION: where if where == "region" else f"region {where}",
        Maker.RECOMPUTE: f"recompute of {where}",
        Maker.BACKWARD: f"backward of {where}" if where else f"backward ({origin.node})",
        Maker.OPTIMIZER: origin.optimizer or "an optimizer",
    }
    return words.get(origin.maker) or where or "code outside of modules"
