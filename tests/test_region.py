"""``checkpoint_region`` and ``checkpoint_name`` as their callers meet them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ckpt_hooks import (
    checkpoint_region,
    policies,
)
from ckpt_hooks.report import saved_tensors_report
from tests.measure import CountOps, leaf
from tests.regions import assert_as_eager, assert_same, replayed


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """After each test no region is open, whatever way it was left."""
    yield
    assert torch._C._len_torch_dispatch_stack() == 0


def block(x):
    return x.sin().exp().cos()


# Ways to write a region


def test_a_decorator_makes_each_call_a_region():
    """On functions and on methods, whose names and signatures stay."""
    x = leaf(3)

    class Layer:
        scale = 2.0

        @checkpoint_region(policy=policies.nothing_saveable)
        def forward(self, x, *, power=1):
            """Computes."""
            return (x.sin() * self.scale).exp() ** power

    assert Layer.forward.__name__ == "forward"
    assert Layer.forward.__doc__ == "Computes."
    y = Layer().forward(Layer().forward(x), power=2).sum()
    with CountOps() as ops:
        found = grad(y, x)
    inside = (x.sin() * 2.0).exp()
    expected = grad(((inside.sin() * 2.0).exp() ** 2).sum(), x)
    assert_same(list(found), list(expected))
    assert ops.counts["exp"] == 2


# Where regions run plainly


def test_without_grad_nothing_is_recorded():
    """No dispatch mode, no frame; gradients switched on within are not the region's."""
    x = leaf(3)
    with torch.no_grad(), checkpoint_region() as region:
        assert torch._C._len_torch_dispatch_stack() == 0
        y = block(x)
        with torch.enable_grad():
            z = x.sin()
    assert not y.requires_grad
    assert z.grad_fn._saved_self is x
    assert region.kept() == []


@pytest.mark.parametrize("transform", ["grad", "vmap", "vjp"])
def test_torch_func_transforms_warn_once(transform):
    """Saved-tensor hooks are not for them: the region runs plainly, with one warning in a process."""
    x = torch.randn(3)

    def function(x):
        with checkpoint_region():
            return block(x).sum()

    def run():
        if transform == "grad":
            return torch.func.grad(function)(x)
        if transform == "vmap":
            return torch.func.vmap(function)(x[None])[0]
        return torch.func.vjp(function, x)[1](torch.tensor(1.0))[0]

    with pytest.warns(UserWarning, match=r"torch\.func transform") as warned:
        found = run()
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(), found)
    leaf = x.clone().requires_grad_()
    expected = block(leaf).sum() if transform == "vmap" else grad(block(leaf).sum(), leaf)[0]
    assert torch.equal(found, expected)


@pytest.mark.compile
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")
@pytest.mark.filterwarnings("ignore")  # of what torch's compiler imports
def test_kernels_of_a_compiler_within_a_region():
    """Nobody can run a part of them: what they saved is kept (Rule 16), and what is around them replayed."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: (x.sin() * w).cos() * 2)
    x, w = leaf(3, 3), leaf(3, 3)

    def program(region):
        with region():
            return compiled(x.exp(), w).tanh().cos()

    assert_as_eager(program, x, w)
    assert replayed(program, x, w) == {"exp": 1, "tanh": 1}


# What is loaded


@pytest.mark.slow
def test_importing_and_a_first_step_do_not_load_the_compiler():
    """With regions of both kinds, policies, names, and nesting; ``torch._dynamo`` takes more than a second."""
    program = """
import sys, torch
from ckpt_hooks import checkpoint, checkpoint_name, checkpoint_region, checkpoint_sequential, policies
assert "torch._dynamo" not in sys.modules
x = torch.randn(4, 4, requires_grad=True)
with checkpoint_region(policy=policies.dots_saveable):
    h = torch.nn.functional.dropout(x @ x, 0.5).relu_()
    with checkpoint_region(policy=policies.save_only_these_names("h")):
        y = checkpoint_name(h.sin(), "h").exp()
with torch.autocast("cpu"):
    checkpoint(torch.sin, y.exp(), debug=True).sum().backward()
checkpoint_sequential([torch.sin] * 4, 2, x).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.parametrize("whole", [True, False])
def test_a_dropout_mask_of_a_transposed_input_is_dropped(whole):
    """Its memory is that of ``empty_like``, in the order of the input's dimensions, and bernoulli writes to all of it."""
    x = leaf(8, 16, 32)
    weight = torch.randn(32, 32, dtype=torch.float64)

    def run(x):
        return nn.functional.dropout((x.transpose(0, 1) @ weight).transpose(0, 1), 0.3).sin()

    torch.manual_seed(0)
    (plain,) = torch.autograd.grad(run(x).sum(), x)
    torch.manual_seed(0)
    with checkpoint_region(replay_whole=whole):
        y = run(x)
    report = saved_tensors_report(y, known=(x, weight))
    assert "cannot be replayed" not in report.by_reason
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, plain)
