"""What regions hold on the device, in bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import grad

from tests.cuda.device import DEVICE, UNDER_POLICIES, WAYS, each, eager, needs_cuda, tensor

pytestmark = [*needs_cuda, pytest.mark.usefixtures("unchecked")]

SIDE, COUNT = 1024, 4
MIB4 = SIDE * SIDE * 4


def held_after_forward(run, functions, x):
    """Returns the bytes that a forward leaves for backward, its result among them; a first step is not measured."""
    for _ in range(2):
        torch.cuda.synchronize()
        before, y = torch.cuda.memory_allocated(), x
        for function in functions:
            y = run(function, y)
        held = torch.cuda.memory_allocated() - before
        grad(y.sum(), x)
        del y
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    return held


def smooth(x):
    """Saves its input and two results, of which the last is what it returns."""
    return x.sin().exp().tanh()


@each(WAYS)
def test_a_region_holds_its_input(run):
    """And the region after it holds its result."""
    x = tensor(SIDE, SIDE)
    assert held_after_forward(run, [smooth] * COUNT, x) == COUNT * MIB4
    assert held_after_forward(eager, [smooth] * COUNT, x) == 2 * COUNT * MIB4


@pytest.mark.parametrize("kind", ["function", "region"])
def test_a_policy_holds_what_it_keeps(kind):
    """One product of two: the second one's result is the region's, which the next region holds."""
    module, x = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE)).to(DEVICE), tensor(SIDE, SIDE)
    held = held_after_forward(UNDER_POLICIES[f"{kind}, products saved"], [module] * COUNT, x)
    assert held == 2 * COUNT * MIB4
