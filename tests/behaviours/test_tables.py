"""Tables that are built once, and weights that are cached, in a function under a policy, which runs once."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ckpt_hooks import CheckpointPolicy, policies
from tests.behaviours.runs import Run, assert_as_eager, gradients
from tests.measure import leaf

aten = torch.ops.aten
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*but views run again in each recompute"),
    pytest.mark.filterwarnings("ignore:.*names operators that did not run"),
]

POLICIES = {
    "a list": [aten.mm.default, aten.addmm.default],
    "a list with the table's": [aten.mm.default, aten.mul.Tensor, aten.sin.default, aten.cos.default],
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "every second product": policies.save_every(aten.mul.Tensor, 2),
    "a function": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    "offload": policies.offload_ops(aten.mm.default, aten.mul.Tensor),
}


def table(size, width):
    angles = torch.outer(torch.arange(size).double(), 1.0 / 10.0 ** (torch.arange(width).double() / width))
    return angles.cos(), angles.sin()


class Cached(nn.Module):
    """A layer of attention whose tables come from a function with a cache."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3))
        self.table = functools.lru_cache(table)

    def tables(self, x):
        return self.table(*x.shape)

    def forward(self, x):
        cos, sin = self.tables(x)
        q, k = (h * cos + h.flip(-1) * sin for h in (self.q(x), self.k(x)))
        return torch.softmax(q @ k.t(), -1) @ self.v(x) + x


class Lazy(Cached):
    """Keeps them in an attribute."""

    kept = None

    def tables(self, x):
        if self.kept is None:
            self.kept = table(*x.shape)
        return self.kept


def several_steps(run, module):
    """Trains for some steps; returns all that is to be compared."""
    found = []
    for _ in range(3):
        x = leaf(3, 4)
        module.zero_grad()
        found += gradients(run(module, run(module, x)), x)
        found += [parameter.grad.clone() for parameter in module.parameters()]
    return found


@pytest.mark.parametrize("form", ["region", "nested"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Cached, Lazy])
def test_tables_that_forward_builds(kind, policy, form):
    """The first step and later ones, whatever is kept."""
    assert_as_eager(lambda run: several_steps(run, kind()), Run("ours", form).selecting(POLICIES[policy]))
