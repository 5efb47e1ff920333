"""What the fuzzer can run regions with."""

from __future__ import annotations

import dataclasses
import functools
import random
import zlib
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

import ckpt_hooks
from ckpt_hooks import CheckpointPolicy, policies
from ckpt_hooks._core.modes import QuietDispatchMode

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
        has_modes: Whether regions run under a dispatch mode.
    """

    name: str
    start: Callable[[], Run]
    source: str
    has_modes: bool = False


def _stateless(name: str, run: Run, source: str, *, has_modes: bool = False) -> Implementation:
    return Implementation(name, lambda: run, source, has_modes)


class _PassThrough(QuietDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_mode(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function as no region, but under a dispatch mode."""
    with _PassThrough():
        return function(*args, **kwargs)


under_mode.__module__ = plain.__module__  # beside which nothing stands that makes regions


def curried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function through the curried form of ``checkpoint``."""
    return ckpt_hooks.checkpoint(name="region")(function)(*args, **kwargs)


def varied() -> Run:
    """Returns what gives each region options of its own, the same whenever it runs: also in the recompute of another one."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        draw = random.Random(_number_of(function))
        options = {"early_stop": draw.random() < 0.7, "debug": draw.random() < 0.2}
        options["determinism_check"] = draw.choice(["default", "none"])
        return ckpt_hooks.checkpoint(function, *args, **options, **kwargs)

    return run


class Arbitrary:
    """A policy that decides on each run of an operator by chance, always the same for one seed."""

    def __init__(self, seed: int, share: int) -> None:
        self.seed, self.share, self.count = seed, share, 0

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        number = zlib.crc32(f"{self.seed} {op} {self.count}".encode())
        if number % 100 >= self.share:
            return (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE, False)[number % 3]
        return tuple(CheckpointPolicy)[(number >> 8) % 2 + 4 * ((number >> 10) % 4 == 0)]


#: Policies of each kind that there is, as (for torch's implementation, for ours).
_READY_MADE = [
    [torch.ops.aten.mm.default, torch.ops.aten.sin.default, torch.ops.aten.mul.Tensor, torch.ops.aten.bernoulli.p],
    [torch.ops.aten.exp.default, torch.ops.aten.cos.default, torch.ops.aten.native_dropout.default],
]
_OF_OURS = [
    policies.everything_saveable,
    policies.dots_saveable,
    policies.norms_recomputed,
    policies.save_modules(torch.nn.Linear, torch.nn.Dropout),
    policies.save_modules("0", "m*"),
    policies.save_every(torch.ops.aten.mul.Tensor, 2),
    policies.save_from_both_policies(
        policies.save_compute_and_communication, policies.save_every(torch.ops.aten.sin.default, 2)
    ),
]


def _number_of(function: Any) -> int:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return zlib.crc32(type(function).__name__.encode() if code is None else f"{code.co_name} {code.co_firstlineno}".encode())


def selective(module: Any = ckpt_hooks) -> Run:
    """Returns what gives each region a policy of its own, the same whenever it runs: also in the recompute of another one.

    Args:
        module: ``ckpt_hooks`` or ``torch.utils.checkpoint``.
    """
    options = {} if module is ckpt_hooks else {"use_reentrant": False}

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = _number_of(function)
        draw = random.Random(number)
        choice = draw.random()
        policy: Any = Arbitrary(number, draw.choice([15, 50, 85, 100]))
        if choice < 0.15:
            policy = draw.choice(_READY_MADE)
        elif choice < 0.3 and module is ckpt_hooks:
            policy = draw.choice(_OF_OURS)
        elif choice < 0.4:
            return module.checkpoint(function, *args, **options, **kwargs)
        context_fn = functools.partial(module.create_selective_checkpoint_contexts, policy)
        return module.checkpoint(function, *args, context_fn=context_fn, **options, **kwargs)

    return run


def region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function as a recorded region."""
    with ckpt_hooks.checkpoint_region():
        return function(*args, **kwargs)


def kept() -> Run:
    """Returns what makes each region one of either kind, whose values stay for a second backward, or whose inputs move."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        draw = random.Random(_number_of(function) + 2)
        options: dict[str, Any] = {"split_backward": draw.random() < 0.7, "offload_inputs": draw.random() < 0.5}
        if draw.random() < 0.3:
            options["policy"] = draw.choice(_READY_MADE + _OF_OURS)
        if draw.random() < 0.5:
            return ckpt_hooks.checkpoint(**options)(function)(*args, **kwargs)
        with ckpt_hooks.checkpoint_region(replay_whole=draw.choice([None, True, False]), **options):
            return function(*args, **kwargs)

    return run


def mixed() -> Run:
    """Returns what makes each region a recorded one or a function frame, with a policy of its own or without one."""
    as_function = selective()

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = _number_of(function) + 1
        draw = random.Random(number)
        choice = draw.random()
        if choice < 0.25:
            return as_function(function, *args, **kwargs)
        policy: Any = None
        if choice < 0.65:
            policy = Arbitrary(number, draw.choice([15, 50, 85, 100]))
        elif choice < 0.85:
            policy = draw.choice(_READY_MADE + _OF_OURS)
        with ckpt_hooks.checkpoint_region(policy=policy):
            return function(*args, **kwargs)

    return run


class _Calling(torch.nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.functions = [function]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.functions[0](*args, **kwargs)


class _Spanned(torch.nn.Module):
    """Calls a function between two layers, past hooks for all modules: those of a program would see other modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.body, self.last = _Calling(list), _Calling(function), _Calling(list)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.first.forward()
        result = self.body.forward(*args, **kwargs)
        self.last.forward()
        return result


def spans() -> Run:
    """Returns what makes each region a span, with a policy of its own maybe, around or inside of others."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = _number_of(function) + 3
        draw = random.Random(number)
        policy = Arbitrary(number, draw.choice([15, 50, 85])) if draw.random() < 0.3 else None
        select: dict[Any, Any] = {ckpt_hooks.span("first", "last"): {"replay_whole": draw.choice([None, True, False])}}
        if draw.random() < 0.5:
            select[ckpt_hooks.span(*draw.choice([("first", "body"), ("body", "last"), ("body", "body")]))] = policy
        choice = draw.random()
        if choice < 0.15:
            select["body"] = {"recorded": True}
        # The state that a rerun finds is looked for from the function itself.
        model = _Spanned(ckpt_hooks.checkpoint()(function) if choice > 0.85 else function)
        ckpt_hooks.apply_checkpointing(model, select)
        return model.forward(*args, **kwargs)

    return run


#: What programs find beside the functions of this module.
checkpoint_sequential, checkpoint_chunks = ckpt_hooks.checkpoint_sequential, ckpt_hooks.checkpoint_chunks
checkpoint_loop = ckpt_hooks.checkpoint_loop

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
        Implementation(
            "ours-selective", selective, "from tests.fuzz.implementations import selective\n\nrun = selective()", True
        ),
        Implementation(
            "torch-selective",
            functools.partial(selective, torch.utils.checkpoint),
            "import torch.utils.checkpoint\nfrom tests.fuzz.implementations import selective\n\n"
            "run = selective(torch.utils.checkpoint)",
        ),
        _stateless("ours-region", region, "from tests.fuzz.implementations import region as run", has_modes=True),
        Implementation("ours-mixed", mixed, "from tests.fuzz.implementations import mixed\n\nrun = mixed()", True),
        Implementation("ours-kept", kept, "from tests.fuzz.implementations import kept\n\nrun = kept()", True),
        Implementation("ours-spans", spans, "from tests.fuzz.implementations import spans\n\nrun = spans()", True),
        Implementation("ours-varied", varied, "from tests.fuzz.implementations import varied\n\nrun = varied()"),
    )
}
