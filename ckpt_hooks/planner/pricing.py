"""What regions cost on this machine: recorded ones, and others which call a block again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.nn import Module

from ckpt_hooks.modules.forward import RegionRunner
from ckpt_hooks.modules.selecting import selector_of
from ckpt_hooks.policies import everything_saveable

from .planned import Chunking, applied
from .profiling import Profile, recorded_in
from .ranks import Ranks
from .restoring import as_before
from .simulating import effect_of

#: Steps that are run for the time of one: regions get ready in the first.
_LEAST_STEPS, NUM_STEPS = 3, 9
_ENOUGH = 2.0
#: Of a busy machine, whose fastest steps differ by more than this part, times say nothing.
MOST_SPREAD = 0.05


class Prices(NamedTuple):
    """What regions add."""

    spread: float  # of equal steps, as a part
    plain: float  # seconds of a step without regions
    record: float  # seconds for an operator of forward
    replay: float  # and for one that runs again
    per_second: float  # operations


def region_prices(
    model: Module,
    step: Callable[[Module], Any],
    profile: Profile,
    blocks: Sequence[str],
    chunking: Chunking,
    ranks: Ranks,
) -> Prices:
    """Returns the prices of recorded regions, of the slowest rank."""

    def seconds(**options: Any) -> tuple[float, float]:
        made = {selector_of(name): RegionRunner(True, {"name": name, "replay_whole": False, **options}) for name in blocks}
        return seconds_of(model, step, made, chunking, ranks)

    times = seconds_of(model, step, {}, chunking, ranks), seconds(policy=everything_saveable), seconds()
    (plain, all_kept, none_kept), spreads = zip(*times, strict=True)
    ops = [op for entry in profile.entries for op in entry.ops]
    again = [entry.ops[at] for entry in profile.entries for at in effect_of(profile, entry, ()).again]
    record = max(0.0, all_kept - plain) / sum(map(recorded_in, profile.entries))
    replays = max(0.0, none_kept - all_kept - sum(op.seconds for op in again))
    per_second = sum(op.cost for op in ops) / sum(op.seconds for op in ops)
    own = Prices(max(spreads), plain, record, replays / max(1, sum(op.cost > 0 for op in again)), per_second)
    return Prices(*map(max, zip(*ranks.all(own), strict=True)))


def seconds_of(
    model: Module, step: Callable[[Module], Any], runners: Mapping[Any, RegionRunner], chunking: Chunking, ranks: Ranks
) -> tuple[float, float]:
    """Returns the seconds of the fastest of equal steps, and by what part the next one is slower."""
    times: list[float] = []
    spent = 0.0
    with as_before(model), applied(model, runners, chunking):
        while len(times) < _LEAST_STEPS or (len(times) < NUM_STEPS and spent < _ENOUGH):
            # Of this thread: what other programs take of the processor is not counted.
            begun = time.thread_time()
            step(model)
            times.append(time.thread_time() - begun)
            spent = max(ranks.all(sum(times)))  # ranks meet: a step that fails on one leaves none in the next
    fastest, second, *_ = sorted(times[1:])
    return fastest, second / fastest - 1


def cost_by_seconds(profile: Profile, prices: Prices) -> None:
    """Makes all costs of a profile times, in the unit of the cost by operations."""
    profile.record_seconds, profile.replay_seconds = prices.record, prices.replay
    profile.record_cost, profile.replay_cost = prices.record * prices.per_second, prices.replay * prices.per_second
    for op in [op for entry in profile.entries for op in entry.ops]:
        op.cost = op.seconds * prices.per_second if op.cost else 0.0  # views are free
