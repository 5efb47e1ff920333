"""Counting the Python memory that an implementation keeps from forward to backward, for each saved tensor or operator."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks

import ckpt_hooks

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
    """Measures the Python objects alive after forward and not before, in bytes a saved tensor."""
    return all_python_bytes(program, implementation) / saved_tensors(program)


def python_bytes_an_operator(chain: Callable[[int], Program], implementation: str) -> float:
    """Measures the same in bytes an operator of a chain, without what a region takes however long it is.

    Args:
        chain: Makes a program of one region of so many operators.
        implementation: What runs the region.
    """
    short, long = (all_python_bytes(chain(ops), implementation) for ops in (100, 300))
    return (long - short) / 200


def all_python_bytes(program: Program, implementation: str) -> int:
    """Measures the Python objects alive after forward and not before, in bytes.

    Memory of tensors' elements and of torch's C++ objects is not Python's and not in the figure.
    """
    region = REGIONS[implementation]
    tracemalloc.start()
    try:
        with ckpt_hooks.set_self_check(False):  # a compared pass keeps numbers of each tensor, and few passes are compared
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
    return after - before
