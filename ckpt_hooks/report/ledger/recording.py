"""Taking a ledger: of a block, or of a call of a step, under the profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, overload

from ckpt_hooks._core.misuse import described_as
from ckpt_hooks._torch.profiling import is_profiling, profile_memory
from ckpt_hooks.report.formatting import noting_out_of_memory

from .ledger import MemoryLedger
from .marks import Marks
from .rows import rows_of
from .watching import OlderMemory, watch

__all__ = ["memory_ledger"]


@overload
def memory_ledger() -> contextlib.AbstractContextManager[MemoryLedger]: ...


@overload
def memory_ledger(step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> MemoryLedger: ...


def memory_ledger(step: Any = None, /, *args: Any, **kwargs: Any) -> Any:
    """Notes every allocation of a training step, or of a block, and what made it.

    Called with a step, runs it once: ``memory_ledger(step, *args)``. Called with nothing, returns a context manager, as in
    ``with memory_ledger() as found:``, whose ledger can be read when the block has ended.

    The ledger is of what the profiler tells: it is byte for byte the sum of the allocator. Of an accelerator it has the
    rounded sizes of the caching allocator's blocks. Memory from before is counted once, as ``base_nbytes``; its end inside of
    the step, as by ``zero_grad``, makes the sum fall. What other threads of the program allocate is not seen: the profiler is
    of this thread, and of the threads of a backward begun here.

    A step in a ledger computes the same, and takes longer: some microseconds for each call into torch, whose line is noted by
    a function mode, and what the profiler takes. Code that ``torch.compile`` has compiled is compiled once more. No tensor is
    kept alive. In eval mode ``nn.TransformerEncoder`` has a fast path which rounds otherwise, and not under a function mode.

    Args:
        step: Runs forward and backward, and an optimizer if one is of interest. Its result is dropped.
        *args: The arguments.
        **kwargs: The keyword arguments.

    Returns:
        The :class:`MemoryLedger`: ``peak`` with its ``holders``, ``phases``, ``allocations``, ``changes``, ``to_json()``. Where
        several devices have allocated, that of the first accelerator; ``on("cpu")`` is that of the host.

    Raises:
        TypeError: If the step cannot be called.
        RuntimeError: If a profiler runs on this thread already, or another thread takes a ledger: torch has one at a time.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, memory_ledger
        >>> x = torch.ones(4096, requires_grad=True)
        >>> found = memory_ledger(lambda: checkpoint(lambda x: x.sin().exp(), x).sum().backward())
        >>> [phase.name for phase in found.phases]
        ['forward', 'backward']
        >>> [(holder.nbytes, holder.reason.value) for holder in found.peak.holders if holder.reason]
        [(16384, 'backward'), (16384, 'backward'), (16384, 'gradient')]
    """
    if step is None:
        return _block()
    if not callable(step):
        raise TypeError(
            f"memory_ledger takes a step to run, a function, but got {described_as(step)}. Write `memory_ledger(step, *args)`, "
            "or `with memory_ledger() as found:` around the step."
        )
    with _block() as found:
        step(*args, **kwargs)
    return found


@contextlib.contextmanager
def _block() -> Iterator[MemoryLedger]:
    if is_profiling():
        raise RuntimeError(
            "memory_ledger was begun while a profiler runs on this thread, and torch has one a thread at most. Leave the block "
            "of the profiler, or of the ledger around this one, first."
        )
    found, marks = MemoryLedger(), Marks()
    older = OlderMemory(marks)
    profile = profile_memory()
    with noting_out_of_memory(found.largest_now):
        try:
            with profile, watch(marks):
                yield found
        finally:
            marks.close()
            older.forget()
            found.fill(*rows_of(profile.events(), marks), older.sizes)
