"""Inputs keep their strides through hooks that copy."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad
from torch.autograd.graph import save_on_cpu

from ckpt_hooks import checkpoint
from ckpt_hooks._strides import with_strides
from tests.measure import leaf

VIEWS = {
    "contiguous": lambda x: x * 1,
    "transposed": lambda x: (x * 1).mT,
    "sliced": lambda x: (x * 1)[:, ::2],
    "expanded": lambda x: (x * 1)[:1].expand(4, 4),
    "expanded and transposed": lambda x: (x * 1)[:, :1].expand(4, 4).mT,
    "overlapping": lambda x: (x * 1).flatten().unfold(0, 4, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_copy_gets_the_strides_asked_for(view):
    """Values and gradient edge are those of the dense tensor."""
    tensor = VIEWS[view](leaf(4, 4))
    dense = tensor.contiguous() + 0
    got = with_strides(dense, tensor.stride())
    assert torch.equal(got, tensor)
    assert got.requires_grad
    assert not got.is_leaf
    assert got.stride() == tensor.stride()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("where", ["hooks", "hooks in a region"])
def test_a_rerun_sees_the_strides_of_forward(view, where):
    """Under ``save_on_cpu``, which brings back dense tensors."""
    seen = []

    def function(h):
        seen.append(h.stride())
        return h.sin().exp()

    def around(x):
        with save_on_cpu():
            return checkpoint(function, VIEWS[view](x))

    x = leaf(4, 4)
    y = around(x) if where == "hooks" else checkpoint(around, x)
    (g,) = grad(y.sum(), x)
    assert torch.equal(g, grad(VIEWS[view](x).sin().exp().sum(), x)[0])
    assert len(set(seen)) == 1
