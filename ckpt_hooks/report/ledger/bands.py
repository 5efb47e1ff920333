"""Bands of a picture: the bytes of each block of the model, and of the rest, at moments of a step."""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckpt_hooks.report.formatting import alike, fold_names, name_pattern

from .allocations import Allocation, Maker
from .data import LedgerData

_SMALL = 0.05  # of the bytes of the largest block
#: The label of all blocks whose bands would not be seen.
OTHERS = "smaller blocks"


class BandKind(enum.Enum):
    """A kind of band, from the bottom up."""

    OLDER = "from before the step"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside of blocks"
    BLOCK = "block"
    AGAIN = "recomputed"
    BACKWARD = "made by backward"


class Band(NamedTuple):
    """One band."""

    part: BandKind
    block: int | None  # the number of its block; None for a band of no block
    nbytes: Sequence[int]  # at each moment


def bands_of(ledger: LedgerData, number: int, blocks: Blocks, most: int) -> tuple[list[int], list[Band]]:
    """Returns about ``most`` moments of a ledger, as indices of changes, and its bands from the bottom up."""
    keys = [_key_of(one, number, blocks) for one in ledger.allocations]
    before = BandKind.OLDER, None
    order = sorted({before, *keys}, key=_place)
    rows = {key: row for row, key in enumerate(order)}
    live = [0] * len(order)
    live[rows[before]] = ledger.base_nbytes
    if not keys:
        return [0, 1], [Band(*before, [ledger.base_nbytes] * 2)]
    moments = _moments_of(ledger, most)
    wanted, values = set(moments), list[list[int]]()
    for at, change in enumerate(ledger.changes):
        live[rows[before if change.allocation is None else keys[change.allocation]]] += change.nbytes
        if at in wanted:
            values.append([*live])
    return moments, [Band(*key, column) for key, column in zip(order, zip(*values, strict=True), strict=True) if any(column)]


def _key_of(allocation: Allocation, number: int, blocks: Blocks) -> tuple[BandKind, int | None]:
    maker = allocation.origin.maker
    if allocation.is_gradient:
        return BandKind.GRADIENTS, None
    if maker is Maker.BACKWARD:
        return BandKind.BACKWARD, None
    if maker is Maker.OPTIMIZER:
        return BandKind.OPTIMIZER, None
    block = blocks.of(number, allocation)
    if block is None:
        return BandKind.OUTSIDE, None
    return BandKind.AGAIN if maker is Maker.RECOMPUTE else BandKind.BLOCK, block


_PARTS = list(BandKind)


def _place(key: tuple[BandKind, int | None]) -> tuple[int, int, int]:
    """Returns the place from the bottom up: recomputed bytes on their block, the bytes of backward on top."""
    part, block = key
    if block is None:
        return (2 if part is BandKind.BACKWARD else 0), 0, _PARTS.index(part)
    return 1, block, part is BandKind.AGAIN


def _moments_of(ledger: LedgerData, most: int) -> list[int]:
    """Returns the moments that are drawn: all, or of each stretch the highest and the last."""
    live = [change.live for change in ledger.changes]
    stretch = max(1, 2 * len(live) // most)
    found: set[int] = set()
    for begin in range(0, len(live), stretch):
        end = min(begin + stretch, len(live))
        found |= {max(range(begin, end), key=live.__getitem__), end - 1}
    return sorted(found)


class Blocks:
    """The blocks of some ledgers: the part of the model to which an allocation belongs, the same in all of the ledgers."""

    # A module's block is the outermost region of any of the ledgers around it, or else its name up to the first number, as in
    # ``"model.layers.3"``.
    def __init__(self, ledgers: Sequence[LedgerData], most: int) -> None:
        self._regions = {entry.module for ledger in ledgers for entry in ledger.entries.values() if entry.module}
        names = [name for ledger in ledgers for one in ledger.allocations if (name := _module_of(one)) is not None]
        numbered = {end for name in [*names, *self._regions] if (end := _up_to_number(name)) is not None}
        self._containers = {name[:at] for name in numbered for at, letter in enumerate(name) if letter == "."}
        self._of_entries = [self._blocks_of_entries(ledger) for ledger in ledgers]
        sizes: collections.Counter[str] = collections.Counter()
        for number, ledger in enumerate(ledgers):
            for one in ledger.allocations:
                name = self._name_of(number, one)
                if name is not None:
                    sizes[name] += one.nbytes
        small = [name for name, nbytes in sizes.items() if nbytes < _SMALL * max(sizes.values())]
        shown = [name for name in sizes if name not in small]
        labels = _labels_of(shown, most - bool(small))
        self._labels = {name: labels.get(name) or (OTHERS if len(small) > 1 else name) for name in sizes}
        # In the order of forward. Equal layers share a label where there are many.
        self.labels = list(dict.fromkeys(self._labels.values()))

    def of(self, ledger: int, allocation: Allocation) -> int | None:
        """Returns the number of an allocation's label; None for one of no block."""
        name = self._name_of(ledger, allocation)
        return None if name is None else self.labels.index(self._labels[name])

    def _name_of(self, ledger: int, allocation: Allocation) -> str | None:
        entry = None if allocation.entry is None else self._of_entries[ledger].get(allocation.entry)
        if entry is not None:
            return entry
        name = _module_of(allocation)
        return None if name is None else self._block_of(name)

    def _block_of(self, module: str) -> str:
        parts = module.split(".")
        ends = [".".join(parts[: number + 1]) for number in range(len(parts))]
        found = next((end for end in ends if end in self._regions), None) or _up_to_number(module)
        return found or next((end for end in ends if end not in self._containers), module)

    def _blocks_of_entries(self, ledger: LedgerData) -> dict[int, str]:
        """Returns the block of each entry: of its module, or else of most bytes of its forward."""
        sizes: dict[int, collections.Counter[str]] = {}
        for one in ledger.allocations:
            name = _module_of(one)
            if one.entry is not None and name:
                sizes.setdefault(one.entry, collections.Counter())[self._block_of(name)] += one.nbytes
        found = {}
        for number, entry in ledger.entries.items():
            inside = sizes.get(number)
            found[number] = (
                self._block_of(entry.module) if entry.module else max(inside, key=inside.__getitem__) if inside else entry.name
            )
        return found


def _module_of(allocation: Allocation) -> str | None:
    """Returns the name of the module of an allocation; None for none, and for the outermost."""
    origin = allocation.origin
    if origin.maker is Maker.BACKWARD or origin.module is None or " " not in origin.module:
        return None
    return origin.module.rpartition(" ")[0]


def _up_to_number(name: str) -> str | None:
    parts = name.split(".")
    return next((".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdigit()), None)


def _labels_of(names: Iterable[str], most: int) -> dict[str, str]:
    """Returns a label for each name: for runs of names that differ by numbers alone, one a run."""
    groups = alike(names, name_pattern)
    room = most - sum(len(group) == 1 for group in groups)
    many = sum(len(group) for group in groups if len(group) > 1)
    found = {}
    for group in groups:
        runs = min(len(group), max(1, room * len(group) // max(1, many)))
        for at, name in enumerate(group):
            run = at * runs // len(group)
            members = [other for place, other in enumerate(group) if place * runs // len(group) == run]
            found[name] = fold_names(members)
    return found
