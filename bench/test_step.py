"""One step of forward and backward: time, peak of tensors' bytes, and Python bytes a saved tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from train_charlm import peak_bytes

from .bookkeeping import python_bytes
from .interleave import compare
from .programs import IMPLEMENTATIONS, PROGRAMS, build


@pytest.mark.benchmark(max_time=0.5, min_rounds=5)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_step(
    benchmark: BenchmarkFixture,
    seconds: Callable[[str], dict[str, float]],
    record: Callable[[str, str, dict[str, float]], None],
    name: str,
    implementation: str,
) -> None:
    """Every implementation gives the gradients of the plain program, bit by bit; its figures go to the tables."""
    program = build(name)
    benchmark.group = name
    if not benchmark.disabled:
        figures = compare(seconds(name), implementation)
        figures["peak_bytes"] = peak_bytes(program.step(implementation))
        if implementation != "floor":
            figures["python_bytes_per_saved_tensor"] = python_bytes(program, implementation)
        benchmark.extra_info.update(figures)
        record(name, implementation, figures)
    step = program.step(implementation)
    benchmark(step)
    for ours, plain in zip(program.gradients(step), program.gradients(program.step("none")), strict=True):
        assert torch.equal(ours, plain)
