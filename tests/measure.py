"""Counting what runs and what is alive, and functions that several tests share."""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import pathlib
import threading
import types
from collections import Counter, UserDict
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_hooks._core.events import Observer, observe

T = TypeVar("T")


def in_turns(first: Iterable[Any], second: Iterable[Any], *others: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns cases for ``parametrize``: the product of two parameters, with values of the others by turns."""
    cases, lists = [], [list(values) for values in others]
    for (row, one), (column, other) in itertools.product(enumerate(first), enumerate(second)):
        turn, values = row + column, []
        for chosen in lists:
            values.append(chosen[turn % len(chosen)])
            turn //= len(chosen)
        cases.append((one, other, *values))
    return cases


@functools.cache
def _tests_in(path: str) -> frozenset[str]:
    file = pathlib.Path(__file__).parent.parent / path
    found = ast.parse(file.read_text()).body if file.is_file() else ()
    return frozenset(node.name for node in found if isinstance(node, ast.FunctionDef))


def is_a_test(name: str) -> bool:
    """Whether a file has a test, as in ``tests/test_region.py::test_a_test``."""
    path, _, test = name.partition("::")
    return test.startswith("test_") and test in _tests_in(path)


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


class Log(SimpleQueue[Any]):
    """A list of what happened, in reruns too: its entries are where no region finds them, in an object of C.

    A plain list that a region's function reaches is after a rerun what it was before.
    """

    append = SimpleQueue.put

    def __new__(cls, entries: Iterable[Any] = ()) -> Log:
        return super().__new__(cls)

    def __init__(self, entries: Iterable[Any] = ()) -> None:
        self.extend(entries)

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self.append(value)

    def clear(self) -> None:
        for _ in range(self.qsize()):
            self.get()

    def pop(self, index: int = -1) -> Any:
        entries = list(self)
        popped = entries.pop(index)
        self.clear()
        self.extend(entries)
        return popped

    def __iter__(self) -> Iterator[Any]:
        entries = [self.get() for _ in range(self.qsize())]
        self.extend(entries)
        return iter(entries)

    def __len__(self) -> int:
        return self.qsize()

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        entries = list(self)
        entries[index] = value
        self.clear()
        self.extend(entries)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, Log)) else NotImplemented

    def __iadd__(self, values: Iterable[Any]) -> Log:
        self.extend(values)
        return self

    def __repr__(self) -> str:
        return repr(list(self))

    __hash__ = object.__hash__


def as_library(kind: type[T]) -> type[T]:
    """Has a class pass for one of a library, whose objects no region puts back: a stand-in for a device, say."""
    kind.__module__ = "torch.stand_ins"
    return kind


@as_library
class Table(UserDict[Any, Any]):
    """A dict that no region puts back."""


class Calls:
    """Wraps a function and counts its calls, in reruns too."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._calls = Log()

    @property
    def count(self) -> int:
        return len(self._calls)

    @count.setter
    def count(self, value: int) -> None:
        self._calls.clear()
        self._calls.extend(range(value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(1)
        return self.function(*args, **kwargs)


class Token:
    """Something to hang on a frame's lifetime: a weak reference to it dies with whatever holds it."""


def renew(*functions: types.FunctionType) -> None:
    """Gives functions code of their own, so that no test has passed their ``with`` lines: each counts its checked passes."""
    for function in functions:
        function.__code__ = function.__code__.replace()


def leaf(*shape: int) -> torch.Tensor:
    """Returns a new leaf that requires grad."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits: of 0.0 and -0.0, which are equal, they are others."""
    if one.shape != other.shape or one.dtype is not other.dtype or one.layout is not torch.strided:
        return torch.equal(one, other)
    bits = (tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


class Saves(torch.autograd.Function):
    """Saves a tensor, and hands it to a function in backward. Returns a copy of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: torch.Tensor, take: Any = None) -> torch.Tensor:
        ctx.save_for_backward(saved)
        ctx.take = take
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        if ctx.take is not None:
            ctx.take(saved)
        return gradient, None, None


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


def _allocations(program):
    """Returns what a program returns, and the bytes of each allocation, below zero for what is freed, in order."""
    gc.disable()  # garbage from before, freed in between, would count
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            result = program()
    finally:
        gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return result, [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def allocated(program):
    """Returns what a program returns, and how many bytes it has allocated and not freed, by the allocator's own count."""
    result, sizes = _allocations(program)
    return result, sum(sizes)


def peak_of(program):
    """Returns how many bytes a program has at most at once, beyond those there were before."""
    return max(itertools.accumulate(_allocations(program)[1], initial=0))


class Watch(Observer):
    """Hears of the regions that begin in its ``with`` block; what it hears is what reports are made of."""

    _blocks = threading.local()  # several threads may be in blocks of one

    def __enter__(self):
        block = observe(self)
        block.__enter__()
        vars(self._blocks).setdefault("open", []).append(block)
        return self

    def __exit__(self, *exc_info):
        self._blocks.open.pop().__exit__(*exc_info)


class Frames(Watch):
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
