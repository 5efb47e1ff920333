"""What reports cost: on a graph of 1,000 regions with 100,000 saved tensors, against its forward; and a ledger of a step."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from ckpt_hooks import checkpoint, checkpoint_region
from ckpt_hooks._torch.profiling import profile_memory
from ckpt_hooks.report import memory_ledger, saved_tensors_report

REGIONS, WIDTH = 1000, 50
ROUNDS = 5


def saves_a_hundred(x: Tensor) -> Tensor:
    """Saves two tensors in each of 50 branches: autograd's own walk over a long chain would overflow its stack."""
    return torch.stack([one.sin() for one in [x.exp() for _ in range(WIDTH)]]).sum(0)


def in_region(x: Tensor) -> Tensor:
    """Runs the same, recorded."""
    with checkpoint_region():
        return saves_a_hundred(x)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": saves_a_hundred,
    "checkpoint": lambda x: checkpoint(saves_a_hundred, x),
    "region": in_region,
}


@pytest.mark.benchmark(group="reports")
@pytest.mark.parametrize("way", WAYS)
def test_reports(benchmark: BenchmarkFixture, note: Callable[[str], None], way: str) -> None:
    """CPU seconds of a report and of its text, beside those of a plain forward of the same operators."""
    regions = 10 if benchmark.disabled else REGIONS
    x = torch.ones(4, requires_grad=True)
    seconds: dict[str, list[float]] = {"plain forward": [], "report": [], "text": []}

    def timed(name: str, function: Callable[[], object]) -> object:
        start = time.process_time()
        result = function()
        seconds[name].append(time.process_time() - start)
        return result

    def forward(run: Callable[[Tensor], Tensor]) -> Tensor:
        y = x
        for _ in range(regions):
            y = run(y)
        return y

    y = forward(WAYS[way])

    def one_round() -> None:
        timed("plain forward", lambda: forward(saves_a_hundred))
        report = timed("report", lambda: saved_tensors_report(y))
        timed("text", lambda: str(report))

    benchmark.pedantic(one_round, rounds=1 if benchmark.disabled else ROUNDS)  # type: ignore[no-untyped-call]
    best = {name: min(values) for name, values in seconds.items()}
    benchmark.extra_info.update(best)
    ratio = (best["report"] + best["text"]) / best["plain forward"]
    note(
        f"report on {regions * WIDTH * 2:,} saved tensors, {way}: {best['report']:.2f} s, its text {best['text']:.2f} s; "
        f"{ratio:.2f} of a plain forward"
    )


@pytest.mark.benchmark(group="reports")
def test_ledger(benchmark: BenchmarkFixture, note: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU seconds of a ledger's step, of the profiler's own stop, and of the ledger and its text beyond these."""
    layers = 10 if benchmark.disabled else 600
    net = torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16))
            for _ in range(layers)
        )
    )
    x, stops, counts = torch.randn(4, 16), list[float](), list[int]()
    stop, events = profile_memory.__exit__, profile_memory.events

    def timed_stop(profile: profile_memory, *exc_info: object) -> None:
        start = time.process_time()
        stop(profile, *exc_info)
        stops.append(time.process_time() - start)

    def counted(profile: profile_memory) -> list[object]:
        start = time.process_time()
        roots = events(profile)
        todo, count = [*roots], 0
        while todo:
            count += 1
            todo += todo.pop().children
        counts.append(count)
        stops[-1] += time.process_time() - start
        return roots

    monkeypatch.setattr(profile_memory, "__exit__", timed_stop)
    monkeypatch.setattr(profile_memory, "events", counted)
    beyond, steps = list[float](), list[float]()

    def step() -> None:
        start = time.process_time()
        y = x
        for block in net:
            y = checkpoint(block, y)
        y.sum().backward()
        steps.append(time.process_time() - start)

    step()
    plain = steps.pop()

    def one_round() -> None:
        start = time.process_time()
        str(memory_ledger(step))
        beyond.append(time.process_time() - start - steps[-1] - stops[-1])

    benchmark.pedantic(one_round, rounds=1 if benchmark.disabled else ROUNDS)  # type: ignore[no-untyped-call]
    note(
        f"ledger of {counts[-1]:,} events of the profiler: {min(beyond):.2f} s with its text, beyond {min(stops):.2f} s of the "
        f"profiler's own stop; the step takes {min(steps) / plain:.2f} of one without"
    )


def test_picture(benchmark: BenchmarkFixture, note: Callable[[str], None], tmp_path: pathlib.Path) -> None:
    """CPU seconds of a picture of a step with 100,000 allocations and frees."""
    pytest.importorskip("matplotlib")
    net = torch.nn.ModuleList(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(10))) for _ in range(40))
    rounds = 1 if benchmark.disabled else 22

    def step() -> None:
        x = torch.ones(4, 8, requires_grad=True)
        for _ in range(rounds):
            for block in net:
                x = checkpoint(block, x).sin()
        x.sum().backward()

    found, took = memory_ledger(step), list[float]()

    def one_round() -> None:
        start = time.process_time()
        found.plot(tmp_path / "step.png")
        took.append(time.process_time() - start)

    benchmark.pedantic(one_round, rounds=1 if benchmark.disabled else ROUNDS)  # type: ignore[no-untyped-call]
    note(f"picture of {len(found.changes):,} allocations and frees: {min(took):.2f} s as PNG")
