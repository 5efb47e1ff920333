"""Attributes of modules: a rerun finds what forward found, and leaves what was there before it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import ckpt_hooks
from tests.behaviours.runs import Run, assert_as_eager, gradients
from tests.measure import leaf

CHANGES = {
    "number": lambda module: setattr(module, "number", 7.0),
    "other kind": lambda module: setattr(module, "number", [7.0]),
    "flag": lambda module: setattr(module, "flag", not module.flag),
    "tensor": lambda module: setattr(module, "scale", torch.zeros(3, dtype=torch.float64)),
    "leaf that requires grad": lambda module: setattr(module, "weight", 0.5),
    "list entry": lambda module: module.entries.__setitem__(0, 9.0),
    "list appended": lambda module: module.entries.append(9.0),
    "list replaced": lambda module: setattr(module, "entries", [9.0]),
    "dict cleared": lambda module: module.table.clear(),
    "buffer replaced": lambda module: setattr(module, "mask", torch.zeros(3, dtype=torch.float64)),
    "hyperparameter": lambda module: setattr(module.drop, "p", 0.9),
    "deleted": lambda module: delattr(module, "number"),
}


class Configured(nn.Module):
    """Reads attributes of each kind."""

    def __init__(self):
        super().__init__()
        self.number, self.flag, self.scale = 2.0, True, torch.full((3,), 0.5, dtype=torch.float64)
        self.entries, self.table, self.drop = [1.0, 2.0], {"a": {"b": 3.0}}, nn.Dropout(0.5)
        self.weight = torch.full((3,), 1.5, dtype=torch.float64, requires_grad=True)
        self.register_buffer("mask", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        h = (x * self.number * self.scale * self.mask).sin() * sum(self.entries)
        (h * self.weight).sin()  # whose graph is gone before backward, and the leaf with it
        return self.drop(h.cos() if self.flag else h.exp()) * self.table["a"]["b"]


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("form", ["region", "nested"])
def test_what_the_caller_changes_before_backward(form, change):
    def program(run):
        module, x = nn.Sequential(Configured()), leaf(4, 3)
        y = run(module, x)
        CHANGES[change](module[0])
        found = gradients(y, x)
        state = [value for name, value in vars(module[0]).items() if not name.startswith("_")]
        return found, state, module[0].drop.p, module[0].mask, gradients(run(module, x), x) if change != "deleted" else 0

    def skipping_errors(run):
        with contextlib.suppress(TypeError, KeyError):  # of the second forward, which the caller has broken
            return program(run)
        return None

    assert_as_eager(skipping_errors, Run("ours", form))


def test_a_large_tensor_with_a_history_that_forward_writes_to_is_an_error():
    """It cannot be put back, and nothing is copied for the case that it may be."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(100_000)

        def forward(self, x):
            self.total += x.sin()
            return (x * 2).exp()

    module, x = Sums(), torch.ones(100_000, requires_grad=True)
    first, second = ckpt_hooks.checkpoint(module, x), ckpt_hooks.checkpoint(module, x)
    with pytest.raises(ckpt_hooks.MutationError, match="Sums"):
        second.sum().backward()
    first.sum().backward()
