"""What a step costs on a thread that is not the main one, and beside a thread that once ran a region, in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 5

SCRIPT = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, thread_time
import torch
torch.set_num_threads(1)
import ckpt_hooks
from bench.programs import build

where, name, seconds = *sys.argv[1:3], float(sys.argv[3])
step = build(name).step("ours")
pool = ThreadPoolExecutor(1)

def measure():
    for _ in range(300 if seconds else 0):  # warm
        step()
    best = float("inf")
    end = perf_counter() + seconds
    while best == float("inf") or perf_counter() < end:
        start = thread_time()
        for _ in range(10):
            step()
        best = min(best, (thread_time() - start) / 10)
    return best

if where == "beside an idle thread":
    pool.submit(lambda: ckpt_hooks.checkpoint(torch.sin, torch.ones(2, requires_grad=True)).sum().backward()).result()
print(pool.submit(measure).result() if where == "worker thread" else measure())
"""

PLACES = ["main thread", "worker thread", "beside an idle thread"]


def seconds_a_step(where: str, name: str, seconds: float) -> float:
    """Returns the seconds of a step in a new process that measures for some seconds."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, where, name, str(seconds)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'examples'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    result: float = json.loads(done.stdout)
    return result


@pytest.mark.benchmark(group="threads")
@pytest.mark.parametrize("name", ["chain of 10 ops", "block of width 32"])
def test_threads(benchmark: BenchmarkFixture, note: Callable[[str], None], name: str) -> None:
    """A step on a worker thread, and one on the main thread beside an idle one, against one on the main thread alone."""
    results: dict[str, list[float]] = {where: [] for where in PLACES}

    def one_round() -> None:
        for where, seconds in results.items():
            seconds.append(seconds_a_step(where, name, 0.0 if benchmark.disabled else 1.5))

    benchmark.pedantic(one_round, rounds=1 if benchmark.disabled else ROUNDS)  # type: ignore[no-untyped-call]
    for where in PLACES[1:]:
        ratio = min(results[where]) / min(results["main thread"])
        benchmark.extra_info[where] = ratio
        note(f"{where}, {name}: {ratio:.3f} of the main thread alone")
