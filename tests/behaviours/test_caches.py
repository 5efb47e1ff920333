"""Objects that a function keeps things in, such as caches of keys: a recompute finds them as forward did."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import ckpt_hooks
from ckpt_hooks import checkpoint
from tests.measure import Log, leaf

pytestmark = pytest.mark.filterwarnings("ignore:.*names operators that did not run")


# What is right stays right


class Stats:
    """Counts, logs, and sums up."""

    def __init__(self):
        self.calls, self.losses, self.by_name, self.total, self.last = 0, [], {}, None, None

    def see(self, h):
        self.calls += 1
        self.losses.append(h.square().mean())
        self.by_name[f"call {self.calls}"] = h.detach().sum()
        self.total = h.detach().sum() + (0 if self.total is None else self.total)
        self.last = h


@dataclasses.dataclass
class Record:
    """Has no tensor in it to begin with."""

    h: torch.Tensor | None = None
    calls: int = 1


def test_a_dataclass_that_is_left_alone_is_handed_on():
    seen = Log()

    def function(x, record):
        seen.append(record)
        return x.sin().exp()

    record, x = (Record(), 3), leaf(3)
    checkpoint(function, x, record).sum().backward()
    assert seen[0] is seen[1]


def test_a_note_holds_no_tensor():
    """And an object dies with its last holder, regions that have noted it or not."""
    import gc
    import weakref

    gc.disable()

    def function(x, stats):
        stats.calls += 1
        stats.last = None
        return x.sin().exp()

    try:
        stats, x = Stats(), leaf(3)
        stats.last = torch.ones(3)
        tensor, object_ = weakref.ref(stats.last), weakref.ref(stats)
        y = checkpoint(function, x, stats)
        assert tensor() is None
        y.sum().backward()
        del y, stats
        assert object_() is None
    finally:
        gc.enable()


def test_is_recomputing_is_no_error():
    """What one run alone does between regions inside saves nothing there."""
    x, losses = leaf(3), []

    def function(x):
        h = checkpoint(torch.sin, x * 2)
        if not ckpt_hooks.is_recomputing():
            losses.append(h.detach().mean())
        return checkpoint(torch.cos, h) * 2

    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(((x * 2).sin().cos() * 2).sum(), x)[0])
