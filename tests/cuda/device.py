"""What tests on a CUDA device share: marks, ways to run a region, and a program's results with and without them."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_region, policies
from tests.measure import same_bits

DEVICE = "cuda"

#: Runs a function as a region, or plainly: ``run(function, *args)``.
Run = Callable[..., Any]
#: Returns the tensors that a program comes to, its regions run in some way.
Program = Callable[[Run], Sequence[torch.Tensor]]

#: Warnings of torch that are no fault of a test.
_KNOWN_WARNINGS = [
    "Attempting to run cuBLAS",  # a thread of autograd's engine multiplies matrices before it has run any kernel
    "Synchronization debug mode is a prototype",
    "The AccumulateGrad node's stream does not match",
    "RNN module weights are not part of single contiguous chunk",
    "(Flash|Memory Efficient|cuDNN) Attention defaults to a non-deterministic",
]

#: The marks of each test here.
needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in _KNOWN_WARNINGS),
]
needs_two_devices = [*needs_cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def eager(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function as no region."""
    return function(*args)


def region(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Runs a function as a recorded region."""
    with checkpoint_region(**options):
        return function(*args)


def nested(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function as a region in a region, both functions."""
    return checkpoint(functools.partial(checkpoint, function), *args)


def under_policy(policy: Any, *, recorded: bool) -> Run:
    """Returns what runs functions as regions of one kind under a policy."""
    if recorded:
        return functools.partial(region, policy=policy)
    return lambda function, *args: checkpoint(policy=policy)(function)(*args)


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

WAYS: dict[str, Run] = {
    "function": checkpoint,
    "function to its end": functools.partial(checkpoint, early_stop=False),
    "function in function": nested,
    "region": region,
    "region in function": functools.partial(checkpoint, region),
    "function in region": functools.partial(region, checkpoint),
}
POLICIES: dict[str, Any] = {
    "products saved": policies.save_ops(*_PRODUCTS),
    "products offloaded": policies.offload_ops(*_PRODUCTS),
    "each second product saved": policies.save_every(torch.ops.aten.addmm.default, 2),
    "everything saved": policies.everything_saveable,
}
UNDER_POLICIES: dict[str, Run] = {
    f"{kind}, {name}": under_policy(policy, recorded=kind == "region")
    for kind in ("function", "region")
    for name, policy in POLICIES.items()
}


def each(ways: dict[str, Run]) -> pytest.MarkDecorator:
    """Gives a test each of some ways to run regions as ``run``."""
    return pytest.mark.parametrize("run", list(ways.values()), ids=list(ways))


def tensor(*shape: int, **options: Any) -> torch.Tensor:
    """Returns a new leaf on the device that requires grad."""
    return torch.randn(*shape, device=DEVICE, **options).requires_grad_()


def step(run: Run, function: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Runs a function as a region; returns its result, and the gradients of ``x`` and of parameters if it is a module."""
    parameters = function.parameters() if isinstance(function, torch.nn.Module) else ()
    y = run(function, x)
    return [y, *grad(y.float().square().sum(), [x, *parameters])]


def outcome(program: Program, run: Run) -> list[torch.Tensor]:
    """Runs a program from one seed; returns what it comes to, and where it leaves the generators."""
    torch.manual_seed(0)
    found = program(run)
    torch.cuda.synchronize()
    return [*(value.detach().clone() for value in found), torch.cuda.get_rng_state(), torch.get_rng_state()]


def differing(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[int]:
    """Returns which tensors differ, by their places: in bits, not in values."""
    return [place for place, (a, b) in enumerate(zip(found, expected, strict=True)) if not same_bits(a, b)]


def expected_of(program: Program) -> list[torch.Tensor]:
    """Returns what a program comes to without regions; skips the test where two such runs differ."""
    expected = outcome(program, eager)
    if differing(outcome(program, eager), expected):
        pytest.skip("without regions the program differs from run to run on this device")
    return expected


def assert_as_eager(program: Program, run: Run) -> None:
    """Asserts that a program comes to the same with regions as without, bit for bit, generators included (Rule 12)."""
    expected = expected_of(program)
    assert differing(outcome(program, run), expected) == []


def poison(*shape: int, count: int = 3) -> None:
    """Writes not-a-number to memory that is free: whoever still reads there is found out."""
    junk = [torch.full(shape, float("nan"), device=DEVICE) for _ in range(count)]
    del junk


def delay() -> None:
    """Keeps the present stream busy for some milliseconds."""
    torch.cuda._sleep(10_000_000)


def exhaust_memory() -> None:
    """Asks for more memory than the device has."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.empty(2 * total, dtype=torch.uint8, device=DEVICE)


def in_a_process(module: str, function: str, *, seconds: float = 120) -> None:
    """Calls a function of a test module in a process of its own, whose device may be left in any state.

    Raises:
        AssertionError: If the function raises, with its traceback.
        subprocess.TimeoutExpired: If it takes too long.
    """
    root = Path(__file__).resolve().parents[2]
    code = f"import sys; sys.path[:0] = ['examples']; from {module} import {function}; {function}()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
