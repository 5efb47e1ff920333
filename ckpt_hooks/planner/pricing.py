"""What recorded regions cost on this machine: in forward, and in replays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from ckpt_hooks.modules import apply_checkpointing
from ckpt_hooks.modules.selecting import selector_of
from ckpt_hooks.policies import everything_saveable

from .chunked import Chunking, chunk
from .profiling import Profile
from .restoring import as_before
from .simulating import effect_of

_ROUNDS = 3  # of each kind of step, of which the fastest counts
#: Steps that are run for the prices.
NUM_STEPS = 3 * _ROUNDS


def region_prices(
    model: Module, step: Callable[[Module], Any], profile: Profile, blocks: Sequence[str], chunking: Chunking
) -> tuple[float, float]:
    """Returns the seconds that a region adds to an operator of forward, and a replay to one that runs again."""
    kinds: list[dict[str, Any] | None] = [None, {"policy": everything_saveable}, {}]
    rounds = [[_seconds(model, step, blocks, chunking, one) for one in kinds] for _ in range(_ROUNDS)]
    plain, all_kept, none_kept = map(min, zip(*rounds, strict=True))
    ops = sum(len(entry.ops) for entry in profile.entries)
    again = [entry.ops[at] for entry in profile.entries for at in effect_of(profile, entry, ()).again]
    replays = none_kept - all_kept - sum(op.seconds for op in again)
    return max(0.0, all_kept - plain) / max(1, ops), max(0.0, replays) / max(1, sum(op.cost > 0 for op in again))


def _seconds(
    model: Module,
    step: Callable[[Module], Any],
    blocks: Sequence[str],
    chunking: Chunking,
    options: dict[str, Any] | None,
) -> float:
    with as_before(model), chunk(model, chunking, {one.name: one.name for one in chunking}), contextlib.ExitStack() as stack:
        if options is not None:
            stack.enter_context(
                apply_checkpointing(model, [*map(selector_of, blocks)], recorded=True, replay_whole=False, **options)
            )
        # Of this thread: what other programs take of the processor is not counted.
        begun = time.thread_time()
        step(model)
        return time.thread_time() - begun
