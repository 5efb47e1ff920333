"""Memory borrowed for a run of operators: each owner's from the first operator that reads it to the last.

So a replay of several units has one unit's parameters at a time, as forward had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ckpt_hooks._tensors.refilling import Loan, Owner, borrow, give_back, is_lent
from ckpt_hooks._torch.tensors import is_freed, storage_of

from .values import Op, Value, values_on_tape


class Borrowing:
    """Parts of one run, each with the memory that the part reads. Leaving the ``with`` block gives back the rest."""

    __slots__ = ("_first", "_last", "_loans", "_steps")

    def __init__(
        self, steps: Mapping[int, Op | Value], tensors: Mapping[int, torch.Tensor], owners: Mapping[int, Owner]
    ) -> None:
        self._steps = sorted(steps.items())
        self._loans: dict[Owner, Loan | None] = {}
        first: dict[Owner, int] = {}
        last: dict[Owner, int] = {}
        by_store: dict[int, Owner | None] = {}
        for number, op in self._steps:
            if type(op) is Value:
                continue
            assert type(op) is Op
            for value in (value for argument in (*op.args, *op.kwargs.values()) for value in values_on_tape(argument)):
                key = id(value.store)
                if key not in by_store:
                    tensor = tensors.get(value.number)
                    if tensor is None:  # made in this run, from memory of its own or met already
                        continue
                    owner = owners.get(storage_of(tensor) or 0)
                    by_store[key] = owner if owner is not None and (is_freed(tensor) or is_lent(owner)) else None
                owner = by_store[key]
                if owner is not None:
                    first.setdefault(owner, number)
                    last[owner] = number
        self._first, self._last = _turned(first), _turned(last)

    def __enter__(self) -> Borrowing:
        return self

    def __exit__(self, *exc_info: object) -> None:
        while self._loans:
            self._give_back(next(iter(self._loans)))

    def parts(self) -> Iterator[dict[int, Op | Value]]:
        """Yields the steps part by part; the memory read by a part is there meanwhile."""
        part: dict[int, Op | Value] = {}
        for number, step in self._steps:
            if number in self._first:
                if part:
                    yield part
                    part = {}
                for owner in self._first[number]:
                    self._loans[owner] = borrow(owner)
            part[number] = step
            if number in self._last:
                yield part
                part = {}
                for owner in self._last[number]:
                    self._give_back(owner)
        if part:
            yield part

    def _give_back(self, owner: Owner) -> None:
        loan = self._loans.pop(owner)
        if loan is not None:
            give_back(owner, loan)


def _turned(numbers: Mapping[Owner, int]) -> dict[int, list[Owner]]:
    turned: dict[int, list[Owner]] = {}
    for owner, number in numbers.items():
        turned.setdefault(number, []).append(owner)
    return turned
