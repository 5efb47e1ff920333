"""Inputs keep their strides through hooks that copy."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks

from ckpt_hooks import checkpoint
from ckpt_hooks._refit import refit
from tests.measure import leaf

VIEWS = {
    "contiguous": lambda x: x * 1,
    "transposed": lambda x: (x * 1).mT,
    "sliced": lambda x: (x * 1)[:, ::2],
    "expanded": lambda x: (x * 1)[:1].expand(4, 4),
    "expanded and transposed": lambda x: (x * 1)[:, :1].expand(4, 4).mT,
    "overlapping": lambda x: (x * 1).flatten().unfold(0, 4, 2),
}


def dense_copy(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_a_copy_gets_the_strides_asked_for(view, grad_mode):
    """Values and gradient edge are those of the dense tensor."""
    tensor = VIEWS[view](leaf(4, 4))
    dense = tensor.contiguous() + 0
    with torch.set_grad_enabled(grad_mode):  # off in most backwards
        got = refit(dense, tensor.stride(), dense._version)
    assert torch.equal(got, tensor)
    assert got.requires_grad
    assert not got.is_leaf
    assert got.stride() == tensor.stride()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("where", ["hooks", "hooks in a region"])
def test_a_rerun_sees_the_strides_of_forward(view, where):
    """Under hooks that bring back dense copies, as ``save_on_cpu`` does of an accelerator's tensors."""
    seen = []

    def function(h):
        seen.append(h.stride())
        return h.sin().exp()

    def around(x):
        with saved_tensors_hooks(dense_copy, lambda tensor: tensor):
            return checkpoint(function, VIEWS[view](x))

    x = leaf(4, 4)
    y = around(x) if where == "hooks" else checkpoint(around, x)
    (g,) = grad(y.sum(), x)
    assert torch.equal(g, grad(VIEWS[view](x).sin().exp().sum(), x)[0])
    assert len(set(seen)) == 1
