"""What regions cost on this machine: recorded ones, and others which call a block again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.nn import Module

from ckpt_hooks._operators.operator_log import thread_seconds
from ckpt_hooks.modules.forward import RegionRunner
from ckpt_hooks.modules.selecting import selector_of
from ckpt_hooks.policies import everything_saveable

from .planned import Chunking, applied
from .profiling import Profile, recorded_in
from .ranks import Ranks
from .restoring import as_before
from .simulating import effect_of

#: Rounds of steps that are timed: regions get ready in the first.
_LEAST_ROUNDS, NUM_ROUNDS = 3, 7
_ENOUGH = 2.0  # seconds for each way to run a step


class Prices(NamedTuple):
    """What regions add."""

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

    def runners(**options: Any) -> dict[Any, RegionRunner]:
        return {selector_of(name): RegionRunner(True, {"name": name, "replay_whole": False, **options}) for name in blocks}

    all_kept, none_kept = seconds_added(model, step, (runners(policy=everything_saveable), runners()), chunking, ranks)
    ops = [op for entry in profile.entries for op in entry.ops]
    again = [entry.ops[at] for entry in profile.entries for at in effect_of(profile, entry, ()).again]
    record = max(0.0, all_kept) / sum(map(recorded_in, profile.entries))
    replays = max(0.0, none_kept - all_kept - sum(op.seconds for op in again))
    per_second = sum(op.cost for op in ops) / sum(op.seconds for op in ops)
    own = Prices(record, replays / max(1, sum(op.cost > 0 for op in again)), per_second)
    return Prices(*map(max, zip(*ranks.all(own), strict=True)))


def seconds_added(
    model: Module,
    step: Callable[[Module], Any],
    ways: Sequence[Mapping[Any, RegionRunner]],
    chunking: Chunking,
    ranks: Ranks,
) -> list[float]:
    """Returns what each way to run a step adds to the seconds of a step without regions."""
    # All ways take turns, and the median is of differences in one round: a busy minute of the machine is in both.
    rounds: list[list[float]] = []
    spent = 0.0
    with as_before(model):
        while len(rounds) < _LEAST_ROUNDS or (len(rounds) < NUM_ROUNDS and spent < _ENOUGH * (1 + len(ways))):
            times = []
            for runners in ({}, *ways):
                with applied(model, runners, chunking):
                    begun = thread_seconds()
                    step(model)
                    times.append(thread_seconds() - begun)
            rounds.append(times)
            spent = max(ranks.all(spent + sum(times)))  # ranks meet: a step that fails on one leaves none in the next
    added = [[seconds - plain for seconds in others] for plain, *others in rounds[1:]]
    return [statistics.median(times) for times in zip(*added, strict=True)]


def cost_by_seconds(profile: Profile, prices: Prices) -> None:
    """Makes all costs of a profile times, in the unit of the cost by operations."""
    profile.record_seconds, profile.replay_seconds = prices.record, prices.replay
    profile.record_cost, profile.replay_cost = prices.record * prices.per_second, prices.replay * prices.per_second
    for op in [op for entry in profile.entries for op in entry.ops]:
        op.cost = op.seconds * prices.per_second if op.cost else 0.0  # views are free
