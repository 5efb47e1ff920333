"""Recorded regions in tests: one program with and without them, and what a replay runs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import grad

from ckpt_hooks import checkpoint_region
from tests.measure import CountOps

#: Makes the context manager that a program runs a block in: ``checkpoint_region``, or :func:`plain`.
Region = Callable[..., contextlib.AbstractContextManager[Any]]


def plain(**options: Any) -> contextlib.AbstractContextManager[Any]:
    """Stands for ``checkpoint_region`` where there is to be none."""
    return contextlib.nullcontext()


def gradients(program: Callable[[Region], torch.Tensor], region: Region, inputs: Any, **options: Any) -> list[torch.Tensor]:
    """Runs a program from one seed; returns its output, and the gradients of the sum of that."""
    torch.manual_seed(0)
    y = program(region)
    return [y.detach(), *grad(y.sum(), inputs, **options)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Asserts that tensors are equal bit for bit."""
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def assert_as_eager(
    program: Callable[[Region], torch.Tensor], *inputs: torch.Tensor, region: Region = checkpoint_region
) -> None:
    """Asserts that a program comes to the same with regions as without (Rule 12)."""
    assert_same(gradients(program, region, inputs), gradients(program, plain, inputs))


def replayed(
    program: Callable[[Region], torch.Tensor], *inputs: torch.Tensor, region: Region = checkpoint_region
) -> dict[str, int]:
    """Returns which operators run in the backward of a program on behalf of its regions, and how often.

    That is: more often than without regions, to whose gradients those with are asserted to be equal.
    """
    counts, found = [], []
    for how in (region, plain):
        torch.manual_seed(0)
        y = program(how)
        with CountOps() as ops:
            found.append(grad(y.sum(), inputs))
        counts.append(ops.counts)
    assert_same(*map(list, found))
    more = Counter(counts[0])
    more.subtract(counts[1])
    return {name: count for name, count in more.items() if count}
