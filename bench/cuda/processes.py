"""What only a new process can tell: the first step, and steps on threads and beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .measure import Bench, Row, compared
from .small import Table

_ROOT = Path(__file__).resolve().parents[2]

_CHECKPOINTS = {
    "ours": "from ckpt_hooks import checkpoint",
    "torch": "from functools import partial; from torch.utils import checkpoint as module; "
    "checkpoint = partial(module.checkpoint, use_reentrant=False)",
}

_IMPORT = """
import json, sys
from time import perf_counter
import torch
device = sys.argv[1]
synchronize = torch.get_device_module(device).synchronize
# A step without checkpointing, so that what any first step sets up is not counted.
torch.ones(4, device=device, requires_grad=True).sin().sum().backward()
synchronize()
ready = perf_counter()
{imports}
imported = perf_counter()
x = torch.ones(4, device=device, requires_grad=True)
begin = perf_counter()
checkpoint(torch.sin, x).sum().backward()
told = perf_counter()
synchronize()
end = perf_counter()
print(json.dumps([imported - ready, told - begin, end - begin, "torch._dynamo" in sys.modules]))
"""

_THREADS = """
import functools, json, sys
from concurrent.futures import ThreadPoolExecutor
import torch
torch.set_num_threads(1)
import ckpt_hooks
from bench.cuda.measure import Bench
from bench.cuda.small import build

device, rounds, place, name, *words = sys.argv[1:]
bench = Bench(torch.device(device), rounds=int(rounds))
program = build(name, bench)
steps = {key: program.step(key) for key in ("ours", "torch", "region")}
pool = ThreadPoolExecutor(1)

def measure():
    for _ in range(300 if bench.rounds > 1 else 0):  # until other threads count no more
        steps["ours"]()
    return bench.times(steps)

if place == "beside an idle thread":
    x = torch.ones(2, device=device, requires_grad=True)
    pool.submit(lambda: ckpt_hooks.checkpoint(torch.sin, x).sum().backward()).result()
print(json.dumps(pool.submit(measure).result() if place == "worker thread" else measure()))
"""


def _run(script: str, *arguments: str) -> Any:
    """Runs a script in a new process, and returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{_ROOT / 'examples'}"
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process of a benchmark failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def import_table(bench: Bench) -> list[Row]:
    """Times the import beyond torch's, as host, and the first step after it."""
    imported, stepped = [], []
    for name, imports in _CHECKPOINTS.items():
        seconds, host, wall, dynamo = _run(_IMPORT.format(imports=imports), str(bench.device))
        imported.append(Row("import", name, {"host_us": seconds * 1e6}))
        note = "loads torch._dynamo" if dynamo else ""
        stepped.append(Row("first step", name, {"wall_us": wall * 1e6, "host_us": host * 1e6}, note=note))
    return imported + compared(stepped)


def thread_table(bench: Bench) -> list[Row]:
    """Times a step on the main thread, on another one, and beside one that once ran a region."""
    rows = []
    for name in ("chain of 10 ops",) if bench.is_tiny else ("chain of 10 ops", "block of width 32"):
        for place in ("main thread", "worker thread", "beside an idle thread"):
            found = _run(_THREADS, str(bench.device), str(bench.rounds), place, name)
            rows += compared(
                [
                    Row(f"{name}, {place}", key, {"wall_us": wall * 1e6, "host_us": host * 1e6})
                    for key, (wall, host) in found.items()
                ]
            )
    return rows


def process_tables(bench: Bench) -> Iterator[Table]:
    """Yields the tables that need processes, by name."""
    yield "import and first step", import_table
    yield "threads", thread_table
