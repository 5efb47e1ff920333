"""Recorded regions, row by row where they differ from function frames: code runs once, and backward needs none of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tests.behaviours.recorded import runs
from tests.behaviours.runs import SILENT, assert_as_eager, gradients
from tests.measure import leaf

aten = torch.ops.aten

# Randomness


@runs(torch_fails=SILENT)
def test_a_generator_that_an_operator_is_given(run):
    """Nobody needs to be told of it: the operator that drew knows its state."""

    def program(run):
        generator = torch.Generator().manual_seed(3)
        x = leaf(8)

        def function(x):
            return (torch.bernoulli(torch.full_like(x, 0.5), generator=generator) * x.sin()).exp()

        return [*gradients(run(function, x), x), generator.get_state()]

    assert_as_eager(program, run)


# What is around


#: Operators, and switches by which some processors run another kernel of theirs, with other roundings.
KERNELS = {
    "gelu": (lambda x, w: F.gelu(x), torch.backends.mkldnn, "enabled", False),
    "product": (torch.mm, torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
}


@runs("region", "nested", "inside")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_changes_between_two_operators(run, kernel):
    """One operator three times, the second time by another kernel: a replay runs each by the kernel that it had."""
    call, where, name, other = KERNELS[kernel]

    def program(run):
        x, w = torch.randn(65, 65, requires_grad=True), torch.randn(65, 65)
        first = getattr(where, name)

        def function(x):
            x = call(x.sin(), w)
            setattr(where, name, other)
            try:
                x = call(x.sin(), w)
            finally:
                setattr(where, name, first)
            return call(x.sin(), w).exp().sin()

        found = gradients(run(function, x), x)
        assert getattr(where, name) == first
        return found

    assert_as_eager(program, run)


class Double(TorchFunctionMode):
    """Doubles the results of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is self.function else out


@runs("region", "nested")
def test_a_function_mode_around_a_saved_tensor_that_is_read(run):
    """What is replayed for it is none of the mode's business."""

    def program(run):
        x = leaf(4)
        node = run(lambda x: x.sin().cos(), x).grad_fn
        with Double(aten.sin.default):
            saved = node._saved_self
        return saved.detach(), x

    assert_as_eager(program, run)
