"""Debug mode and traces: forward of fifty tiny operators, against eager and against torch's debug mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckpt_hooks
from ckpt_hooks import policies

from .interleave import interleave
from .programs import in_a_row

_run = in_a_row(50)

_WAYS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "checkpoint": lambda x: ckpt_hooks.checkpoint(_run, x, debug=True),
    "checkpoint with a policy": ckpt_hooks.checkpoint(debug=True, policy=policies.nothing_saveable)(_run),
    "checkpoint_region": lambda x: _recorded(x),
    "trace": lambda x: _traced(x, operators=False),
    "trace of operators": lambda x: _traced(x, operators=True),
}


def _recorded(x: torch.Tensor) -> torch.Tensor:
    with ckpt_hooks.set_checkpoint_debug_enabled(True), ckpt_hooks.checkpoint_region():
        return _run(x)


def _traced(x: torch.Tensor, *, operators: bool) -> torch.Tensor:
    with ckpt_hooks.trace(operators=operators):
        return ckpt_hooks.checkpoint(_run, x)


_torchs_log = logging.getLogger("LoggingTensor")


def _torchs(x: torch.Tensor) -> torch.Tensor:
    """Runs under torch's debug mode, alone with its logger.

    No handler but its own can format the records, and pytest adds one. Each run adds a filter, and would be slower than the
    run before.
    """
    _torchs_log.handlers.clear()
    result: torch.Tensor = torch_checkpoint(_run, x, use_reentrant=False, debug=True)
    _torchs_log.filters.clear()
    return result


@pytest.mark.benchmark(group="watching 50 tiny operators, forward")
@pytest.mark.parametrize("way", _WAYS)
def test_watching(benchmark: BenchmarkFixture, note: Callable[[str], None], way: str) -> None:
    """A forward that is watched, against eager and against torch's debug mode."""
    x = torch.randn(4, 4, requires_grad=True)
    if not benchmark.disabled:
        seconds = interleave(
            {
                "eager": lambda: _run(x),
                "region": lambda: ckpt_hooks.checkpoint(_run, x),
                "ours": lambda: _WAYS[way](x),
                "torch": lambda: _torchs(x),
            },
            seconds=4.0,
        )
        to_eager, to_torch = seconds["ours"] / seconds["eager"], seconds["ours"] / seconds["torch"]
        benchmark.extra_info.update(ratio_to_eager=to_eager, ratio_to_torch=to_torch)
        note(
            f"forward of 50 tiny operators, {'' if 'trace' in way else 'debug mode of '}{way}: {to_eager:.1f} of eager "
            f"({seconds['eager'] * 1e6:.0f} us), {to_torch:.3f} of torch's debug mode "
            f"({seconds['torch'] / seconds['eager']:.0f} of it); without, {seconds['region'] / seconds['eager']:.1f} of eager"
        )
    benchmark(_WAYS[way], x)
