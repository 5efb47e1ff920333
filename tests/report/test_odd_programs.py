"""Reports on programs with ragged tensors, hooks, backwards inside regions, and inputs on the host."""

from __future__ import annotations

import weakref

import pytest
import torch

from ckpt_hooks import (
    checkpoint,
    checkpoint_region,
    saved_residuals,
    saved_tensors_report,
    trace,
)


@pytest.mark.parametrize("region", [checkpoint, checkpoint_region])
def test_ragged_tensors(region):
    """Their size is not told; nothing fails."""
    x = torch.randn(64, requires_grad=True)

    def program(x):
        ragged = torch.nested.nested_tensor_from_jagged((x * 1).view(16, 4), torch.tensor([0, 4, 9, 16]))
        return region()(lambda a: a.exp().sin().values())(ragged)

    y = program(x)
    with trace():
        program(x).sum().backward()
    assert saved_tensors_report(y).tensors
    assert torch.equal(x.grad, torch.autograd.grad(y.sum(), x)[0])


def test_hooks_around_a_region_run_without_gradients():
    """As those around plain operators do: what they make has no graph."""
    x = torch.randn(64, requires_grad=True)
    enabled = []

    def pack(tensor):
        enabled.append(torch.is_grad_enabled())
        return tensor.half(), tensor.abs().max()

    h = x * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].float()), checkpoint_region():
        y = (h * 2).exp().sin()
    assert enabled == [False]
    report = saved_tensors_report(y)
    assert report.by_reason["hooks"] == 64 * 2 + 4


def test_a_model_goes_with_its_last_reference(no_gc):
    """A report holds no module."""
    model = torch.nn.Linear(8, 8)
    reference = weakref.ref(model)
    report = saved_residuals(model, torch.randn(2, 8))
    del model
    assert reference() is None
    assert report.total_bytes > 0


def test_several_tensors_of_hooks_are_billed_once():
    """A sparse tensor, say, has several storages."""
    sparse = torch.eye(16).to_sparse()
    x = torch.randn(16, 4, requires_grad=True)

    def program(x):
        with torch.autograd.graph.save_on_cpu(), checkpoint_region():
            return torch.sparse.mm(sparse, x).sin()

    report = saved_residuals(program, x)
    assert report.by_reason == {"outside": sparse.indices().nbytes + sparse.values().nbytes}
