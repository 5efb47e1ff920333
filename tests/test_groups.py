"""``GraphExecGroup``: split backwards that share one recompute, ours and torch's."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch.autograd import grad

from ckpt_hooks import GraphExecGroup, checkpoint
from tests.measure import Calls, Log, leaf

GROUPS = {"ours": GraphExecGroup, "torch": torch.utils.checkpoint.GraphExecGroup}


@pytest.fixture(params=list(GROUPS))
def group_class(request):
    return GROUPS[request.param]


def two_outputs(x):
    return x.sin().exp(), x.cos().tanh()


def test_disjoint_backwards_share_one_recompute(impl, group_class):
    """Either engine honours either class."""
    calls = Calls(two_outputs)
    x = leaf(3)
    a, b = impl(calls, x)
    with group_class():
        (ga,) = grad(a.sum(), x, retain_graph=True)
        (gb,) = grad(b.sum(), x)
    assert calls.count == 2
    assert torch.equal(ga, grad(x.sin().exp().sum(), x)[0])
    assert torch.equal(gb, grad(x.cos().tanh().sum(), x)[0])


def test_a_failed_recompute_in_a_group_leaves_it_usable():
    """Torch marks the region as recomputed and then returns what is not there."""
    fail = Log([True])

    def function(x):
        y = two_outputs(x)
        if fail[0]:
            raise KeyError
        return y

    x = leaf(3)
    fail[0] = False
    a, b = checkpoint(function, x, early_stop=False)
    with GraphExecGroup():
        fail[0] = True
        with pytest.raises(KeyError):
            grad(a.sum(), x, retain_graph=True)
        fail[0] = False
        (ga,) = grad(a.sum(), x, retain_graph=True)
        (gb,) = grad(b.sum(), x)
    assert torch.equal(ga, grad(x.sin().exp().sum(), x)[0])
    assert torch.equal(gb, grad(x.cos().tanh().sum(), x)[0])


def test_backward_in_two_stages(impl, group_class):
    """From the loss to a tensor in the middle of a region first, from there to the input later."""

    def stages(x):
        middle = x.sin().tanh()
        return middle, middle.exp().cos()

    calls = Calls(stages)
    x = leaf(3)
    middle, y = impl(calls, x)
    with group_class():
        (g,) = grad(y.sum(), middle, retain_graph=True)
        (gx,) = grad(middle, x, g)
    assert calls.count == 2
    assert torch.equal(gx, grad(stages(x)[1].sum(), x)[0])


def test_tensors_that_are_packed_after_the_recompute_of_a_backward_inside_forward():
    def function(x):
        (inner,) = grad((x * 1).sin().sum(), x)
        return (x * 3).cos() * inner

    x = leaf(3)
    with GraphExecGroup():
        (found,) = grad(checkpoint(function, x).sum(), x)
    assert torch.equal(found, grad(function(x).sum(), x)[0])
