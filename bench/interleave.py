"""Timing several implementations of one program so that their ratio can be trusted on a noisy machine.

Measuring one implementation after the other compares different minutes of a machine: clock rates, caches and neighbours
drift by more than what is to be measured. Here every implementation runs for a short slice in each round, so that all
of them see the same minutes, and the minimum over the rounds is taken for each, since noise only ever adds time. The
order turns from round to round, so that nobody always runs after the same neighbour.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from time import perf_counter

Step = Callable[[], object]

# A full garbage collection falls into some steps of a long program only. With slices of one step, the minimum would be a step
# without a collection, and some implementations have no such step.
_LEAST = 4


def interleave(
    steps: Mapping[str, Step], *, seconds: float = 4.0, slice_seconds: float = 0.03, min_rounds: int = 10
) -> dict[str, float]:
    """Times each step against the others.

    The garbage collector stays on, as in a training program: what an implementation makes it do is part of the cost. The
    youngest generation is collected between slices, so that nobody pays for the one before.

    Args:
        steps: Implementations by name. Each is called many times and must leave things as it found them.
        seconds: How long to go on for, all implementations together.
        slice_seconds: How long an implementation runs in one round, at least four steps.
        min_rounds: How many rounds to run, though it take longer than `seconds`.

    Returns:
        Seconds a step, for each name in the order of `steps`: the mean over a slice, the minimum over the rounds.
    """
    # The first step may import modules and fill caches: were it in the estimate, slices would be a single step, and
    # that one always cold.
    for step in steps.values():
        step()
    counts = {name: max(_LEAST, round(slice_seconds / _slice(step, 3))) for name, step in steps.items()}
    best = dict.fromkeys(steps, float("inf"))
    order = list(steps)
    end = perf_counter() + seconds
    rounds = 0
    while rounds < min_rounds or perf_counter() < end:
        for name in order:
            best[name] = min(best[name], _slice(steps[name], counts[name]))
        order.append(order.pop(0))
        rounds += 1
    return best


def compare(seconds: Mapping[str, float], name: str) -> dict[str, float]:
    """Says how one implementation compares with those named "floor" and "torch", from the times of `interleave`.

    Returns:
        `us_per_step`; `us_over_floor`, what the implementation adds to the floor; `share_of_torch_overhead`, that
        divided by what torch adds; and `ratio_to_torch`, of the whole steps. There is no share for what lies below the
        floor, nor when torch adds less than 5% to it: a small difference of large times is noise, and a share of it
        would be noise that looks like a result.
    """
    step, floor, torch = seconds[name], seconds["floor"], seconds["torch"]
    figures = {"us_per_step": step * 1e6, "us_over_floor": (step - floor) * 1e6, "ratio_to_torch": step / torch}
    if torch > 1.05 * floor and step >= floor:
        figures["share_of_torch_overhead"] = (step - floor) / (torch - floor)
    return figures


def _slice(step: Step, count: int) -> float:
    gc.collect(0)
    start = perf_counter()
    for _ in range(count):
        step()
    return (perf_counter() - start) / count
