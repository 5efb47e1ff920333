"""Counting the Python memory that an implementation keeps for each saved tensor, from forward to backward."""

from __future__ import annotations

import gc
import tracemalloc

import torch
from torch.autograd.graph import saved_tensors_hooks

from .programs import REGIONS, Program, plain


def saved_tensors(program: Program) -> int:
    """Counts the tensors that autograd saves for backward when nothing is checkpointed."""
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        program.forward(plain)
    return count


def python_bytes(program: Program, implementation: str) -> float:
    """Measures the Python objects alive after forward and not before, in bytes a saved tensor.

    Memory of tensors' elements and of torch's C++ objects is not Python's and not in the figure.
    """
    region = REGIONS[implementation]
    tracemalloc.start()
    try:
        # Warm up under tracing, so that caches and free lists are as they will be after the forward that counts.
        for _ in range(3):
            program.forward(region).sum().backward()  # type: ignore[no-untyped-call]
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        output = program.forward(region)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        del output
    finally:
        tracemalloc.stop()
    return (after - before) / saved_tensors(program)
