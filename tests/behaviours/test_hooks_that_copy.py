"""Saved-tensor hooks that copy, around regions: what they bring back has the strides and the version of forward in a rerun.

Such hooks bring back a dense tensor that was never written to, or was written to once, whatever was packed. Plain autograd does
not mind. A function that is called again does: a transposed input takes other kernels than a dense one, with other roundings.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from tests.behaviours.runs import Run, assert_as_eager, gradients

aten = torch.ops.aten


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy, as hooks that move tensors elsewhere do."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def filled_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns memory that a copy was written to, as ``save_on_cpu(pin_memory=True)`` does: its version is 1."""
    return torch.empty_like(tensor).copy_(tensor)


#: Functions of a tensor that come to something else, or to an error, for a tensor of other strides.
LOOKS_AT_STRIDES = {
    "the order of a sum": lambda h: h.exp().sum(0).sin().exp(),
    "the order of random numbers": lambda h: F.dropout(h, 0.5).sin().exp(),
    "a view": lambda h: h.t().view(-1).sin().exp(),
}

CHECKS = pytest.mark.parametrize("check", ["default", "none", "values"])
FORMS = pytest.mark.parametrize("form", ["region", "nested"])


def transposed() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a leaf, and a transposed tensor with that history."""
    x = torch.randn(17, 300, requires_grad=True)
    return x, (x * 1).t()


@pytest.mark.parametrize("function", LOOKS_AT_STRIDES.values(), ids=LOOKS_AT_STRIDES)
@CHECKS
@FORMS
def test_a_transposed_argument_is_transposed_in_the_rerun(function, check, form):
    def program(run):
        x, h = transposed()
        with saved_tensors_hooks(dense_copy, lambda tensor: tensor):
            y = run(lambda h: function(h), h)
        return gradients(y, x)

    assert_as_eager(program, Run("ours", form, determinism_check=check))


@pytest.mark.parametrize("function", LOOKS_AT_STRIDES.values(), ids=LOOKS_AT_STRIDES)
@CHECKS
def test_a_transposed_result_that_a_policy_keeps_is_transposed_in_the_rerun(function, check):
    def program(run):
        x, h = transposed()
        with saved_tensors_hooks(dense_copy, lambda tensor: tensor):
            y = run.selecting([aten.sin.default])(lambda h: function(h.sin()), h)
        return gradients(y, x)

    assert_as_eager(program, Run("ours", determinism_check=check))


@pytest.mark.parametrize(("pack", "writes"), [(torch.clone, 1), (torch.clone, 2), (filled_copy, 0), (filled_copy, 2)])
@CHECKS
@FORMS
def test_an_argument_has_the_version_of_forward_in_the_rerun(pack, writes, check, form):
    """Versions tell whether a tensor that the function saves was modified since; writes of the hooks are no such thing."""
    seen = set()

    def program(run):
        x = torch.randn(4, requires_grad=True)
        h = x * 1
        for _ in range(writes):
            h.add_(0.5)

        def function(h):
            seen.add(h._version)
            return (h.sin() * h).exp()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = run(function, h)
        return gradients(y, x)

    assert_as_eager(program, Run("ours", form, determinism_check=check))
    assert seen == {writes}
