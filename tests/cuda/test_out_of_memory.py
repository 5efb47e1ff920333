"""A recompute that runs out of memory: the error is torch's, and everything is as if backward had not been called."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import grad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ckpt_hooks import is_recomputing
from tests.cuda.device import WAYS, each, exhaust_memory, needs_cuda, tensor

pytestmark = [*needs_cuda, pytest.mark.usefixtures("unchecked")]


@each({name: run for name, run in WAYS.items() if "region" not in name})
def test_out_of_memory_in_a_rerun(run):
    """Random streams, settings and memory are where they were, and the next backward is right."""
    armed = []

    def function(x):
        y = F.dropout(x.sin(), 0.5)
        if armed:
            exhaust_memory()
        return F.dropout(y.exp(), 0.5)

    x = tensor(1024)
    (expected,) = grad(_seeded(lambda: function(x)).sum(), x)
    y = _seeded(lambda: run(function, x))
    states = torch.cuda.get_rng_state(), torch.get_rng_state()
    held = torch.cuda.memory_allocated()
    armed.append(True)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            grad(y.sum(), x, retain_graph=True)
        assert not is_recomputing()
        assert all(map(torch.equal, states, (torch.cuda.get_rng_state(), torch.get_rng_state())))
        assert _get_current_dispatch_mode_stack() == []
        torch.cuda.synchronize()
        gc.collect()  # the error's traceback
        assert torch.cuda.memory_allocated() == held
    armed.clear()
    assert torch.equal(grad(y.sum(), x)[0], expected)


def _seeded(function):
    torch.manual_seed(7)
    return function()


@each(WAYS)
def test_out_of_memory_in_forward(run):
    """The error is torch's, and the next region is right."""
    armed = [True]

    def function(x):
        y = F.dropout(x.sin(), 0.5)
        if armed:
            exhaust_memory()
        return y.exp()

    x = tensor(1024)
    with pytest.raises(torch.OutOfMemoryError):
        run(function, x)
    assert _get_current_dispatch_mode_stack() == []
    armed.clear()
    (expected,) = grad(_seeded(lambda: function(x)).sum(), x)
    assert torch.equal(grad(_seeded(lambda: run(function, x)).sum(), x)[0], expected)
