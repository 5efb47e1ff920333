"""What comparing values costs, reruns that return, and regions that draw or have buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckpt_hooks

from .interleave import interleave
from .programs import build


@pytest.mark.benchmark(group="determinism_check, block of width 256")
def test_determinism_check(benchmark: BenchmarkFixture, note: Callable[[str], None]) -> None:
    """A step of a block whose values are compared, against one whose metadata are."""
    program = build("block of width 256")

    def step_with(determinism_check: str) -> Callable[[], None]:
        def region(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return ckpt_hooks.checkpoint(function, x, determinism_check=determinism_check)

        return lambda: program.forward(region).sum().backward()  # type: ignore[no-untyped-call]

    check = "values"
    step = step_with(check)
    if not benchmark.disabled:
        seconds = interleave({name: step_with(name) for name in ("default", check)}, seconds=8.0)
        ratio = seconds[check] / seconds["default"]
        benchmark.extra_info["ratio_to_default"] = ratio
        note(f"determinism_check={check!r}, block of width 256: {ratio:.3f} of the default")
    benchmark(step)


@pytest.mark.benchmark(group="early_stop=False")
@pytest.mark.parametrize("name", ["chain of 10 ops", "block of width 32"])
def test_running_to_the_end(benchmark: BenchmarkFixture, note: Callable[[str], None], name: str) -> None:
    """A step of small operators whose reruns run to the end, against the default, which stops them if work is left."""
    program = build(name)
    steps = {early_stop: program.step_in(partial(ckpt_hooks.checkpoint, early_stop=early_stop)) for early_stop in (True, False)}
    if not benchmark.disabled:
        seconds = interleave({str(early_stop): step for early_stop, step in steps.items()}, seconds=8.0)
        ratio = seconds["False"] / seconds["True"]
        benchmark.extra_info["ratio_to_default"] = ratio
        note(f"early_stop=False, {name}: {ratio:.3f} of the default")
    benchmark(steps[False])


def _batch_norms() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, *layers), torch.randn(2, 8, 8, 8, requires_grad=True)


def _dropouts() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, *layers), torch.randn(16, 32, requires_grad=True)


@pytest.mark.benchmark(group="state to rewind")
@pytest.mark.parametrize("make", [_batch_norms, _dropouts], ids=["batch norm", "dropout"])
def test_state(
    benchmark: BenchmarkFixture, note: Callable[[str], None], make: Callable[[], tuple[nn.Module, torch.Tensor]]
) -> None:
    """Regions whose recompute has something to set back, against torch's, which leaves buffers updated twice."""
    module, x = make()
    implementations = {"ours": ckpt_hooks.checkpoint, "torch": partial(torch_checkpoint, use_reentrant=False)}
    steps = {name: partial(_step, run, module, x) for name, run in implementations.items()}
    if not benchmark.disabled:
        seconds = interleave(steps)
        ratio = seconds["ours"] / seconds["torch"]
        benchmark.extra_info["ratio_to_torch"] = ratio
        note(f"small region with {make.__name__.strip('_').replace('_', ' ')}: {ratio:.3f} of torch's step")
    benchmark(steps["ours"])


def _step(run: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> None:
    run(module, x).sum().backward()  # type: ignore[no-untyped-call]


class _Buffered(nn.Module):
    """Takes sines in turn, and has buffers that nobody writes to."""

    def __init__(self, ops: int, buffers: int) -> None:
        super().__init__()
        self.ops = ops
        for number in range(buffers):
            self.register_buffer(f"buffer{number}", torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.ops):
            x = x.sin()
        return x


@pytest.mark.benchmark(group="64 buffers that are not written to")
@pytest.mark.parametrize(("ops", "size"), [(8, 4), (24, 64)], ids=["region of 100 us", "region of 1 ms"])
def test_unwritten_buffers(benchmark: BenchmarkFixture, note: Callable[[str], None], ops: int, size: int) -> None:
    """A step of a region whose module has buffers, against one of the same module without."""
    x = torch.randn(size, size, requires_grad=True)
    steps = {str(count): partial(_step, ckpt_hooks.checkpoint, _Buffered(ops, count), x) for count in (0, 64)}
    if not benchmark.disabled:
        seconds = interleave(steps, seconds=8.0)
        ratio = seconds["64"] / seconds["0"]
        benchmark.extra_info["ratio_to_none"] = ratio
        note(f"64 buffers that are not written to, region of {seconds['0'] * 1e6:.0f} us: {ratio:.3f} of none")
    benchmark(steps["64"])
