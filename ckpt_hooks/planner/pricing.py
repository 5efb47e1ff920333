"""What regions cost on this machine: recorded ones in forward and in replays, others where they call a block again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.nn import Module

from ckpt_hooks.modules.forward import RegionRunner
from ckpt_hooks.modules.selecting import selector_of
from ckpt_hooks.policies import everything_saveable

from .chunked import Chunking, applied
from .profiling import Profile
from .restoring import as_before
from .simulating import effect_of

_ROUNDS = 3
#: Steps that are run for the time of one: regions get ready in the first.
NUM_STEPS = 1 + _ROUNDS
#: Of a busy machine, whose steps differ by more than this part, times say nothing.
MOST_SPREAD = 0.05


class Prices(NamedTuple):
    """Seconds of a step without regions, and what regions add."""

    spread: float  # of equal steps, as a part
    plain: float
    record: float  # to an operator of forward
    replay: float  # to one that runs again


def region_prices(
    model: Module, step: Callable[[Module], Any], profile: Profile, blocks: Sequence[str], chunking: Chunking
) -> Prices:
    """Returns the prices of recorded regions."""

    def seconds(**options: Any) -> tuple[float, float]:
        made = {selector_of(name): RegionRunner(True, {"name": name, "replay_whole": False, **options}) for name in blocks}
        return seconds_of(model, step, made, chunking)

    times = seconds_of(model, step, {}, chunking), seconds(policy=everything_saveable), seconds()
    (plain, all_kept, none_kept), spreads = zip(*times, strict=True)
    ops = sum(len(entry.ops) for entry in profile.entries)
    again = [entry.ops[at] for entry in profile.entries for at in effect_of(profile, entry, ()).again]
    replays = none_kept - all_kept - sum(op.seconds for op in again)
    record = max(0.0, all_kept - plain) / max(1, ops)
    return Prices(max(spreads), plain, record, max(0.0, replays) / max(1, sum(op.cost > 0 for op in again)))


def seconds_of(
    model: Module, step: Callable[[Module], Any], runners: Mapping[Any, RegionRunner], chunking: Chunking
) -> tuple[float, float]:
    """Returns the seconds of the fastest of equal steps, and by what part the middle one is slower."""
    times = []
    with applied(model, runners, chunking):
        for _ in range(NUM_STEPS):
            with as_before(model):
                # Of this thread: what other programs take of the processor is not counted.
                begun = time.thread_time()
                step(model)
                times.append(time.thread_time() - begun)
    fastest = min(times[1:])
    return fastest, statistics.median(times[1:]) / fastest - 1
