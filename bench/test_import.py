"""What it costs to import the package and to run a first checkpointed step, in fresh processes."""

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

CHECKPOINTS = {
    "ours": "from ckpt_hooks import checkpoint",
    "torch": "from functools import partial; from torch.utils import checkpoint as module; "
    "checkpoint = partial(module.checkpoint, use_reentrant=False)",
}

SCRIPT = """
import json, sys
from time import perf_counter
start = perf_counter()
import torch
torch.set_num_threads(1)
# A step without checkpointing, so that what any first step sets up is not counted.
torch.ones(4, requires_grad=True).sin().sum().backward()
ready = perf_counter()
{imports}
imported = perf_counter()
dynamo_after_import = "torch._dynamo" in sys.modules
x = torch.ones(4, requires_grad=True)
begin = perf_counter()
checkpoint(torch.sin, x).sum().backward()
end = perf_counter()
print(json.dumps({{
    "torch_ms": 1e3 * (ready - start),
    "import_ms": 1e3 * (imported - ready),
    "first_step_ms": 1e3 * (end - begin),
    "dynamo_after_import": dynamo_after_import,
    "dynamo_after_step": "torch._dynamo" in sys.modules,
}}))
"""


def run(implementation: str) -> dict[str, float]:
    """Imports and steps once in a new process, and returns what the process measured."""
    script = SCRIPT.format(imports=CHECKPOINTS[implementation])
    # From the repository's root, so that the package is found without being installed as well.
    root = Path(__file__).resolve().parents[1]
    # Bytecode is kept, as for whoever has installed the package: without it, each import compiles the package anew.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


@pytest.mark.benchmark(group="import and first step")
def test_import(benchmark: BenchmarkFixture, note: Callable[[str], None]) -> None:
    """Importing the package and running a first step never load Dynamo, which takes seconds."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CHECKPOINTS}

    def one_round() -> None:
        for name, results in runs.items():
            results.append(run(name))

    benchmark.pedantic(one_round, rounds=ROUNDS)  # type: ignore[no-untyped-call]
    for name, results in runs.items():
        least = {key: min(result[key] for result in results) for key in results[0]}
        benchmark.extra_info[name] = least
        loaded = "loaded" if least["dynamo_after_step"] else "not loaded"
        note(
            f"{name}: import {least['import_ms']:.1f} ms beyond torch ({least['torch_ms']:.0f} ms), "
            f"first step {least['first_step_ms']:.1f} ms, torch._dynamo {loaded}"
        )
    for result in runs["ours"]:
        assert not result["dynamo_after_import"]
        assert not result["dynamo_after_step"]
