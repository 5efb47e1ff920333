"""What backward runs again of a recorded region: just what is needed, each operator once, in every kind of backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import grad

from ckpt_hooks import GraphExecGroup, OverlapError, checkpoint_region
from tests.measure import CountOps, Watch, leaf
from tests.regions import assert_same, plain, replayed

# What runs


def test_only_what_saved_tensors_depend_on_runs():
    """Not a branch that came to nothing, nor a metric, nor what nobody saved, as the product at the end (Rule 13)."""
    x, w = leaf(4, 4), leaf(4, 4)

    def program(region):
        with region():
            h = (x @ w).sin()
            h.exp().cos()
            h.detach().abs().mean()
            return h.cos() @ w

    # ``sin`` and ``cos`` saved their inputs, the last product ``cos``'s output.
    assert replayed(program, x, w) == {"mm": 1, "sin": 1, "cos": 1}


@pytest.mark.parametrize("size", [4, 1 << 18], ids=["small", "large"])
def test_what_no_gradient_is_asked_for(size):
    """A backward to one of two inputs brings back what that takes; of a small region all that handles may ask for."""
    other = int(size == 4)
    x, w = leaf(size), leaf(size)
    with checkpoint_region():
        y = x.sin().exp() + w.cos().tanh()
    with CountOps() as ops:
        grad(y.sum(), x, retain_graph=True)
    assert (ops.counts["exp"], ops.counts["tanh"]) == (1, other)
    with CountOps() as ops:
        grad(y.sum(), w)
    assert (ops.counts["exp"], ops.counts["tanh"]) == (other, 1)


@pytest.mark.parametrize("size", [4, 1 << 18], ids=["small", "large"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_region_says_how_it_is_replayed(whole, size):
    """Whatever its size, and each region for itself."""
    x, w = leaf(size), leaf(size)
    with checkpoint_region(replay_whole=whole):
        y = x.sin().exp() + w.cos().tanh()
        with checkpoint_region(replay_whole=not whole):
            z = x.tan().sigmoid() + w.neg().erf()
    with CountOps() as ops:
        gradient = grad((y * z).sum(), x, retain_graph=True)
    assert ops.counts["tanh"] == int(whole)
    assert ops.counts["neg"] == int(not whole)
    again = grad(((x.sin().exp() + w.cos().tanh()) * (x.tan().sigmoid() + w.neg().erf())).sum(), x)
    assert torch.equal(*gradient, *again)


def test_a_region_that_writes_is_replayed_as_a_whole_whatever_it_says():
    x = leaf(4)

    def program(region):
        with region(replay_whole=False) if region is checkpoint_region else region():
            h = x * 2
            y = h.exp()
            h.mul_(3)
            return y * h.sin()

    assert replayed(program, x) == {"mul": 1, "exp": 1, "mul_": 1, "sin": 1}


FAILS = []


@torch.library.custom_op("ckpt_hooks_tests::fails_later", mutates_args=())
def fails_later(x: torch.Tensor) -> torch.Tensor:
    """Raises once it is told to."""
    if FAILS:
        raise ValueError("the operator failed in a replay")
    return x.clone()


fails_later.register_autograd(lambda ctx, grad: grad)


@pytest.mark.parametrize("fails", [False, True])
def test_observers_are_told_of_replays(fails, monkeypatch):
    """Of each region that runs an operator again, within what is asked of the one around."""
    log = []

    class Log(Watch):
        def recomputing(self, region, *, in_order):
            log.append(("begins", region.path[-1]))

        def recomputed(self, region, error):
            log.append(("ends", region.path[-1], type(error)))

    x = leaf(4)
    with Log():
        with checkpoint_region(name="outer"):
            h = x.sin()
            with checkpoint_region(name="inner"):
                y = fails_later(h).exp().sin()
        with checkpoint_region(name="keeps all"):
            z = y * 2
    assert log == []
    if fails:
        monkeypatch.setattr("tests.test_region_replay.FAILS", [True])
        with pytest.raises(ValueError, match="failed in a replay"):
            grad(z.sum(), x)
    else:
        grad(z.sum(), x)
    end = ValueError if fails else type(None)
    assert log == [("begins", "outer"), ("ends", "outer", type(None)), ("begins", "inner"), ("ends", "inner", end)]


def test_outputs_that_consumers_outside_saved_are_kept():
    """Those are saved by plain autograd; the region brings back its own alone."""
    x = leaf(4)

    def program(region):
        with region():
            h = x.sin().tan()
        return h.cos()

    # ``tan`` saved its result, ``cos`` outside the same tensor.
    assert replayed(program, x) == {"sin": 1, "tan": 1}

    def enclosed(region):
        with region():
            return program(region)

    # Now the region around brings it back too, for ``cos``, and the inner one for ``tan``.
    assert replayed(enclosed, x) == {"sin": 2, "tan": 2}


# Kinds of backward


def recorded(x, region):
    with region():
        h = x.sin().exp()
        with region():
            h = F.dropout(h, 0.5).tanh()
        return (h * x).cos()


def both(x, take):
    """What a function of the output comes to with regions, and without."""
    found = []
    for region in (checkpoint_region, plain):
        torch.manual_seed(0)
        found.append(list(take(recorded(x, region))))
    return found


def test_batched_gradients():
    """A backward that maps over gradients replays once, unmapped, with the dropout of forward."""
    x, batch = leaf(4), torch.eye(4, dtype=torch.float64)
    assert_same(*both(x, lambda y: grad(y, x, batch, is_grads_batched=True)))
    torch.manual_seed(0)
    y = recorded(x, checkpoint_region)
    with CountOps() as ops:
        grad(y, x, batch, is_grads_batched=True)
    assert (ops.counts["exp"], ops.counts["tanh"]) == (1, 2)


# Groups of backwards


def test_backwards_of_a_group_that_overlap():
    """They would find values gone: an error, and after the group each may run by itself."""
    x = leaf(4)
    with checkpoint_region():
        h = x.sin().exp()
        a, b = h.tanh(), h.cos()
    with GraphExecGroup():
        grad(a.sum(), x, retain_graph=True)
        with pytest.raises(OverlapError, match="overlap"):
            grad(b.sum(), x, retain_graph=True)
    found = [*grad(a.sum(), x, retain_graph=True), *grad(b.sum(), x)]
    assert_same(found, [*grad(x.sin().exp().tanh().sum(), x), *grad(x.sin().exp().cos().sum(), x)])


def test_precisions_that_cannot_be_read_in_the_fast_way():
    """Torch refuses to read some of its switches once others were set in the newer way."""
    x, matmul, conv = leaf(4, 4), torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    with checkpoint_region():
        y = (x @ x).sin()
        try:
            matmul.fp32_precision, conv.fp32_precision = "tf32", "ieee"
            z = (y @ x).exp()
        finally:
            matmul.fp32_precision, conv.fp32_precision = before
    assert torch.equal(grad(z.sum(), x)[0], grad(((x @ x).sin() @ x).exp().sum(), x)[0])
