"""Ranges and events of the profiler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

# A named range of the profiler, as a context manager: without an operator, which dispatch modes would see, and in a tenth of
# the time of ``torch.profiler.record_function``.
profiler_range: Any = torch._C._profiler._RecordFunctionFast

#: The tag of an allocation or a free in the tree of events.
IS_ALLOCATION: Any = torch._C._profiler._EventType.Allocation

#: The scopes of ranges that are no operators.
NOT_OPERATORS = frozenset({torch._C._profiler.RecordScope.USER_SCOPE, torch._C._profiler.RecordScope.BACKWARD_FUNCTION})

# Whether a profiler runs on this thread: a second profiler is an error.
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled

#: By thread, a function that ends the profile of a plan's step: a ledger of the program in that step calls it and begins.
giving_way: dict[int, Callable[[], object]] = {}

# Torch 2.11 to 2.15 crashes the process if two threads profile at a time.
_PROFILER_LOCK = threading.Lock()


class profile_memory:  # noqa: N801  # a context manager, as torch's own
    # The public profiler gives allocations without addresses, and not in the same order as ranges: the tree of events has both.
    def __init__(self) -> None:
        # An accelerator's allocator reports to the CPU's part of the profiler too; kernels are not needed.
        self._profile = profile(use_cpu=True, profile_memory=True, use_kineto=True)

    def __enter__(self) -> profile_memory:
        if not _PROFILER_LOCK.acquire(blocking=False):
            raise RuntimeError(
                "A ledger or a plan is being taken on another thread, and torch profiles one thread at a time. Take one after "
                "the other."
            )
        try:
            self._profile.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            _PROFILER_LOCK.release()
            raise
        return self

    def __exit__(self, *exc_info: Any) -> None:
        try:
            self._profile.__exit__(*exc_info)  # type: ignore[no-untyped-call]
        finally:
            _PROFILER_LOCK.release()

    def events(self) -> list[Any]:
        """Returns the roots of the tree of events, once the block has ended."""
        results = self._profile.kineto_results
        return [] if results is None else results.experimental_event_tree()
