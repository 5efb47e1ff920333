"""Fast paths of recorded regions give what the slow ones give, and both what plain autograd gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_hooks import checkpoint_region, policies
from ckpt_hooks._operators.facts import OpFacts
from ckpt_hooks._recorded import recorder, replay
from tests.measure import CountOps
from tests.regions import assert_same, gradients, plain

aten = torch.ops.aten


def chain(x, w, region):
    with region():
        return (x @ w).sin().exp().cos() * x


def block(x, w, region):
    with region():
        h = F.layer_norm(F.gelu(F.linear(x, w, w[0])), (8,))
        h = F.dropout(h, 0.25).view(2, 4, 8).transpose(0, 1)
        return F.scaled_dot_product_attention(h, h, h, is_causal=True).reshape(8, 8)


def writes(x, w, region):
    with region():
        h = (x @ w).relu_()
        k = h.exp()
        with torch.no_grad():
            k[0] = 1
        h = h * 1
        h.add_(1).mul_(x.detach())
        return h.sin() * x


def odd(x, w, region):
    norm = nn.BatchNorm1d(8, dtype=torch.float64)
    with region():
        h = norm(F.rrelu(x @ w, training=True))
        first, second = h.unsafe_chunk(2)
        e = torch.empty_like(first).copy_(second)
        return torch.cat([first * e, second[[1, 0]].sin(), w[:, :1].expand(8, 8)])


def nested(x, w, region):
    with region():
        h = x.sin()
        with region():
            h = (h @ w).exp()
            with region():
                h = F.dropout(h, 0.5).cos()
            h = h * x
        return h.tanh() @ w


def recurrent(x, w, region):
    torch.manual_seed(1)
    layers = nn.GRU(8, 8, 2, dtype=torch.float64)
    with region():
        return layers((x @ w).sin())[0].exp()


def kept(x, w, region):
    with region(policy=policies.dots_saveable):
        h = (x @ w).sin()
        h = F.dropout(h, 0.5) @ w
        h.mul_(2)
        return (h.view(4, 16) @ w.view(16, 4)).cos()


def counted(x, w, region):
    with region(policy=policies.save_every(aten.mm.default, 2)):
        h = x @ w
        with region(policy=policies.everything_saveable):
            h = F.dropout(h.sin(), 0.5) @ w
        return (h @ w).sin().exp()


PROGRAMS = [chain, block, writes, odd, nested, recurrent, kept, counted]


@pytest.fixture(params=PROGRAMS, ids=lambda program: program.__name__)
def found(request):
    """Runs a program with regions or without."""
    x, w = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return lambda region: gradients(lambda region: request.param(x, w, region), region, (x, w))


def test_large_regions_are_replayed_as_small_ones(found, monkeypatch):
    """One by one, or at once, as eager."""
    expected = found(plain)
    for at_once in (-1, 1 << 40):
        monkeypatch.setattr(replay, "AT_ONCE", at_once)
        assert_same(found(checkpoint_region), expected)


def test_what_is_written_out_does_as_the_methods(found, monkeypatch):
    """:meth:`Recorder.__torch_dispatch__` for most operators, and the general way for all of them."""
    expected = found(checkpoint_region)
    for name in ("is_fast", "may_drop_out"):
        slot = getattr(OpFacts, name)
        monkeypatch.setattr(OpFacts, name, property(lambda facts: False, slot.__set__))
    assert_same(found(checkpoint_region), expected)
    assert_same(expected, found(plain))


def test_what_a_policy_keeps_is_kept_the_same_in_the_general_way(monkeypatch):
    """:meth:`Recorder._save` drops what an operator read; the general way records it first."""
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))

    def program(region):
        with region(policy=policies.everything_saveable):
            h = F.dropout((x @ w).sin(), 0.5)
            best, _ = h.max(1)
            return F.layer_norm(h.t() @ w, (8,)) * best.exp()

    def run():
        region = checkpoint_region(policy=policies.everything_saveable)
        torch.manual_seed(0)
        y = program(lambda policy: region)
        kept = [tensor.description for tensor in region.kept()]
        with CountOps() as ops:
            found = torch.autograd.grad(y.sum(), (x, w))
        return [y, *found], kept, ops.counts

    found, described, ran = run()
    monkeypatch.setattr(recorder.Recorder, "_save", recorder.Recorder._record)
    in_general, described_in_general, ran_in_general = run()
    assert_same(found, in_general)
    assert_same(found, gradients(program, plain, (x, w)))
    assert (described, ran) == (described_in_general, ran_in_general)
