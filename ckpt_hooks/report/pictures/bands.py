"""Bands of a picture: the bytes of each block, and of the rest, at moments of a step."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_hooks.report.ledger.allocations import Allocation, Maker
from ckpt_hooks.report.ledger.data import LedgerData

from .blocks import Blocks

__all__ = ["Band", "BandKind", "bands_of", "freed_of"]


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
    """One band.

    Attributes:
        part: The kind.
        block: The number of its block; None for a band of no block.
        nbytes: The bytes at each moment.
    """

    part: BandKind
    block: int | None
    nbytes: Sequence[int]


def bands_of(ledger: LedgerData, number: int, blocks: Blocks, most: int) -> tuple[list[int], list[Band]]:
    """Returns moments of a ledger, and its bands from the bottom up.

    Args:
        ledger: The ledger.
        number: The number among those of the blocks.
        blocks: The blocks.
        most: The number of moments at most, about. Of the moments in between the highest and the last one are there.

    Returns:
        The moments, as indices of changes, and the bands.
    """
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


def freed_of(ledger: LedgerData) -> int:
    """Returns the bytes from before which were freed in the step."""
    return -sum(change.nbytes for change in ledger.changes if change.allocation is None)


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
