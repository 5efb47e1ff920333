"""The data of a ledger: allocations, changes, entries of regions, phases, and who holds what at each moment."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ckpt_hooks._core.holdings import Reason

from .allocations import Allocation, Change, Hold, Maker, Origin, RegionEntry, RowReader
from .rows import Row


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a step.

    Attributes:
        name: ``"forward"`` up to a backward, ``"backward"``, ``"optimizer"``, or ``"rest"``.
        begin: The index of its first change.
        end: The index after its last change.
        peak_nbytes: The most bytes in use in it, above those in use when the ledger began.
        end_nbytes: The bytes in use at its end, above those in use when the ledger began.
    """

    name: str
    begin: int
    end: int
    peak_nbytes: int
    end_nbytes: int


@dataclasses.dataclass(frozen=True)
class Holder:
    """Storages of one origin, held for one reason.

    Attributes:
        nbytes: Their bytes.
        count: Their number.
        origin: Where they come from.
        reason: The reason of the use; None where the program alone holds the storages.
    """

    nbytes: int
    count: int
    origin: Origin
    reason: Reason | None

    def to_json(self) -> dict[str, Any]:
        """Returns the holder as values for ``json.dumps``."""
        return {
            "nbytes": self.nbytes,
            "count": self.count,
            **self.origin._asdict(),
            "reason": None if self.reason is None else self.reason.value,
        }


@dataclasses.dataclass(frozen=True)
class LedgerPeak:
    """The moment with the most memory in use.

    Attributes:
        nbytes: The bytes in use, above those in use when the ledger began.
        total_nbytes: All bytes in use.
        older_nbytes: Those from before the ledger.
        change: The index of the change that led there; -1 for the begin.
        phase: The phase, as in ``"backward"``.
        origin: Where the last allocation before comes from; None at the begin.
        holders: The storages in use which were allocated in the ledger, by origin and reason, the largest first.
    """

    nbytes: int
    total_nbytes: int
    older_nbytes: int
    change: int
    phase: str
    origin: Origin | None
    holders: tuple[Holder, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the peak as values for ``json.dumps``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        origin = None if self.origin is None else self.origin._asdict()
        return {**values, "origin": origin, "holders": [holder.to_json() for holder in self.holders]}


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
            raise RuntimeError(f"{name!r} of a ledger was read while its block runs. Read it when the block has ended.")
        return object.__getattribute__(self, name)  # which raises

    def fill(self, rows: Sequence[Row], differentiable: Set[int], older: Mapping[int, int], device: str | None = None) -> None:
        """Takes the rows of the step, the runs of operators which made a node, and the sizes of older storages by address."""
        # Without a device that of the first accelerator counts, or else the host.
        devices = list(dict.fromkeys(str(row.device) for row in rows if row.mark is None)) or ["cpu"]
        self.device = device or next((name for name in devices if name != "cpu"), "cpu")
        is_on_host = self.device == "cpu"
        replay = RowReader(older if is_on_host else {}, self.device, differentiable)
        replay.run(rows)
        first = next((row for row in rows if row.mark is None and str(row.device) == self.device), None)
        self.base_nbytes = sum(older.values()) if is_on_host or first is None else first.total - first.nbytes
        self.allocations, self.changes, self.entries = tuple(replay.allocations), tuple(replay.changes), replay.entries
        self.devices, self._taken = tuple(devices), (rows, differentiable, older)
        for allocation in self.allocations:
            _note_backward(allocation, self.phases)

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
        sizes: collections.Counter[tuple[Origin, Reason | None]] = collections.Counter()
        counts: collections.Counter[tuple[Origin, Reason | None]] = collections.Counter()
        for allocation in self.allocations:
            if allocation.is_alive_at(change):
                key = allocation.origin, allocation.reason_at(change)
                sizes[key] += allocation.nbytes
                counts[key] += 1
        return tuple(Holder(nbytes, counts[key], *key) for key, nbytes in sizes.most_common())

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, each a :class:`Phase`, in order."""
        return _phases_of(self.changes)


def _phases_of(changes: Sequence[Change]) -> tuple[Phase, ...]:
    places = (change.place for change in changes)
    parts = ["backward" if one.node is not None else "optimizer" if one.optimizer is not None else "rest" for one in places]
    runs = []
    for name, numbers in itertools.groupby(range(len(changes)), parts.__getitem__):
        first, *others = numbers
        runs.append((name, first, first + len(others) + 1))
    found: list[tuple[str, int, int]] = []
    for at, (name, begin, end) in enumerate(runs):
        # What allocates nothing, as a pause between two nodes of backward, belongs to the phase before.
        if name == "rest" and found and all(change.nbytes < 0 for change in changes[begin:end]):
            name = found[-1][0]
        elif name == "rest" and next((later for later, *_ in runs[at + 1 :] if later != "rest"), None) == "backward":
            name = "forward"
        if found and found[-1][0] == name:
            begin = found.pop()[1]
        found.append((name, begin, end))
    if found and found[0][0] == "rest" and all(name != "backward" for name, *_ in found):
        found[0] = "forward", *found[0][1:]
    live = [change.live for change in changes]
    return tuple(Phase(name, begin, end, max(live[begin:end]), live[end - 1]) for name, begin, end in found)


def _note_backward(allocation: Allocation, phases: Sequence[Phase]) -> None:
    """Notes a result which a backward made, used and freed."""
    if allocation.origin.maker in _IN_BACKWARD and allocation.freed is not None:
        phase = phases[bisect.bisect_right(phases, allocation.born, key=operator.attrgetter("begin")) - 1]
        if phase.name == "backward" and allocation.freed < phase.end:
            reason = _IN_BACKWARD[allocation.origin.maker]
            allocation.holds.append(Hold(reason, None, None, allocation.born, allocation.freed))


_IN_BACKWARD = {Maker.RECOMPUTE: Reason.RECOMPUTED, Maker.BACKWARD: Reason.BACKWARD}


def maker_in_words(origin: Origin, where: str | None = None) -> str:
    """Returns what made an allocation in words, as in ``"recompute of layers.0 Block"``."""
    where = origin.region or origin.module or "" if where is None else where
    maker = origin.maker
    if maker is Maker.REGION:
        return where if where == "region" else f"region {where}"
    if maker is Maker.RECOMPUTE:
        return f"recompute of {where}"
    if maker is Maker.BACKWARD:
        return f"backward of {where}" if where else f"backward ({origin.node})"
    if maker is Maker.OPTIMIZER:
        return origin.optimizer or "an optimizer"
    return where or "code outside of modules"
