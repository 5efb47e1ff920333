"""Counting what runs and what is alive, and functions that several tests share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_hooks._core.events import Observer


class CountOps(TorchDispatchMode):
    """Counts operators below autograd by name, without the ``detach`` calls that any checkpointing runtime makes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """Wraps a function and counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


class Token:
    """Something to hang on a frame's lifetime: a weak reference to it dies with whatever holds it."""


def leaf(*shape: int) -> torch.Tensor:
    """Returns a new leaf that requires grad."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


class SavesItsResult(torch.autograd.Function):
    """The exponential function, which hands out what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0]


def allocated(program):
    """Returns what a program returns, and how many bytes it has allocated and not freed, by the allocator's own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = program()
    return result, sum(event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")


class Frames(Observer):
    """Weak references to the frames of a block, and the storages of what was brought back that are not freed."""

    def __init__(self):
        self.frames = []
        self.storages = set()

    def entered(self, region):
        self.frames.append(region.frame)

    def restored(self, region, position, tensor):
        self.storages.add(tensor.storage)

    def freed(self, storage):
        self.storages.discard(storage)

    def alive(self):
        return [r() is not None for r in self.frames]

    def values_alive(self):
        return len(self.storages)
