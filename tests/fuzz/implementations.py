"""What the fuzzer can run regions with."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

import ckpt_hooks

from .observe import plain

__all__ = ["IMPLEMENTATIONS", "Implementation", "Run"]

#: Runs a function as a region: ``run(function, *args, **kwargs)``.
Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to run functions as regions.

    Attributes:
        name: What the command line calls it.
        start: Returns a new :data:`Run` for each run of a program, so that one may count its regions, or draw a policy for
            each of them from a seed of its own.
        source: Lines of a script that define ``run``.
    """

    name: str
    start: Callable[[], Run]
    source: str


def _stateless(name: str, run: Run, source: str) -> Implementation:
    return Implementation(name, lambda: run, source)


def curried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function through the curried form of ``checkpoint``."""
    return ckpt_hooks.checkpoint(name="region")(function)(*args, **kwargs)


def varied() -> Run:
    """Returns what gives each region other options: the same ones in each run of a program."""
    draw = random.Random(0)

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options = {"early_stop": draw.random() < 0.7, "debug": draw.random() < 0.2}
        options["determinism_check"] = draw.choice(["default", "none"])
        return ckpt_hooks.checkpoint(function, *args, **options, **kwargs)

    return run


#: What programs find beside ``curried`` and ``varied``.
checkpoint_sequential = ckpt_hooks.checkpoint_sequential

_OURS = "from ckpt_hooks import checkpoint"
_TORCH = "from torch.utils.checkpoint import checkpoint"

IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        _stateless("ours", ckpt_hooks.checkpoint, f"{_OURS} as run"),
        _stateless(
            "torch",
            functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
            f"{_TORCH}\n\nrun = functools.partial(checkpoint, use_reentrant=False)",
        ),
        _stateless("ours-curried", curried, "from tests.fuzz.implementations import curried as run"),
        _stateless(
            "ours-to-the-end",
            functools.partial(ckpt_hooks.checkpoint, early_stop=False),
            f"{_OURS}\n\nrun = functools.partial(checkpoint, early_stop=False)",
        ),
        _stateless(
            "ours-debug",
            functools.partial(ckpt_hooks.checkpoint, debug=True),
            f"{_OURS}\n\nrun = functools.partial(checkpoint, debug=True)",
        ),
        _stateless("plain", plain, "run = plain"),
        Implementation("ours-varied", varied, "from tests.fuzz.implementations import varied\n\nrun = varied()"),
    )
}
