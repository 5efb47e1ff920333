"""Collectors named by context variables, as Transformers collects hidden states and attentions: read, filled, and not held."""

from __future__ import annotations

import contextvars
import gc
import sys

import pytest
import torch

from ckpt_hooks import checkpoint
from tests.measure import Frames, leaf

pytestmark = pytest.mark.usefixtures("no_gc")

FOUND = contextvars.ContextVar("FOUND", default=None)


def plain(function, *args):
    return function(*args)


def in_context(program, *args):
    return contextvars.copy_context().run(program, *args)


def nested(function, *args):
    return checkpoint(lambda *args: checkpoint(function, *args), *args)


READS = {
    "the length": lambda found: len(found),
    "the first": lambda found: found[0],
    "the last": lambda found: found[-1],
    "the last, detached": lambda found: found[-1].detach(),
    "all": lambda found: torch.stack(found).sum(0),
    "a shape": lambda found: found[-1].shape[0],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("form", [checkpoint, nested])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_rerun_reads_what_forward_read(read, form, is_held):
    def run(form):
        def layer(x, weight):
            found = FOUND.get()
            y = (x * weight).sin()
            y = y * read(found)
            found.append(y)
            return y.exp()

        def forward(x):
            found = [torch.full((3,), 2.0, dtype=torch.float64)]
            FOUND.set(found)
            for weight in weights:
                x = form(layer, x, weight)
            return x.sum(), found if is_held else len(found)

        loss, found = in_context(forward, x)
        before = list(found) if is_held else None
        loss.backward()
        if is_held:
            assert list(map(id, found)) == list(map(id, before))
        return [weight.grad for weight in weights]

    x, values = leaf(3), [torch.randn(3, dtype=torch.float64) for _ in range(4)]
    weights = [value.clone().requires_grad_() for value in values]
    expected = run(plain)
    weights = [value.clone().requires_grad_() for value in values]
    if is_held or read in (READS["the length"], READS["a shape"]):
        assert all(map(torch.equal, run(form), expected))
    else:  # a region does not hold what it collects
        with pytest.raises(RuntimeError) as caught:
            run(form)
        if sys.version_info >= (3, 11):
            assert "a tensor in a context variable" in caught.value.__notes__[0]


@pytest.mark.parametrize("way", ["closure", "argument", "attribute"])
def test_a_collector_that_is_reached_by_two_ways_is_one_in_a_rerun(way):
    class Layer(torch.nn.Module):
        found = None

        def forward(self, x, found):
            found = {"closure": lambda: outer, "argument": lambda: found, "attribute": lambda: self.found}[way]()
            FOUND.get()["states"].append(x.sin())
            assert FOUND.get() is found
            return (x * found["states"][-1]).exp() * len(found["states"])

    outer, layer = {"states": []}, Layer()

    def run(form):
        outer["states"].clear()
        x = value.clone().requires_grad_()
        FOUND.set(outer)
        if way == "attribute":
            layer.found = outer
        y = x
        for _ in range(3):
            y = form(layer if way != "closure" else layer.forward, y, outer)
        y.sum().backward()
        assert len(outer["states"]) == 3
        return x.grad

    value = torch.randn(3, dtype=torch.float64)
    assert torch.equal(in_context(run, checkpoint), in_context(run, plain))


def test_a_long_collector_gets_what_forward_made():
    """Of a long one, the entries before forward are not noted."""

    def layer(x):
        found = FOUND.get()
        found["losses"].append(x.sin())
        return (x * len(found["losses"])).exp()

    def forward(form, x, found):
        FOUND.set(found)
        return form(layer, form(layer, x))

    x, found = leaf(3), {"losses": [0.0] * 2000}
    y = in_context(forward, checkpoint, x, found)
    made = found["losses"][2000:]
    y.sum().backward()
    assert list(map(id, found["losses"][2000:])) == list(map(id, made))
    z = x.detach().requires_grad_()
    in_context(forward, plain, z, {"losses": [0.0] * 2000}).sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_a_discarded_forward_keeps_nothing_through_a_collector():
    x = leaf(1013)

    def layer(x):
        y = x.sin()
        FOUND.get()["states"].append(y)
        return y.exp().cos()

    def forward():
        FOUND.set({"states": []})
        checkpoint(layer, checkpoint(layer, x))

    watching = Frames()
    with watching:
        in_context(forward)
    assert watching.alive() == [False, False]
    assert sum(type(one) is torch.Tensor and one.numel() == 1013 for one in gc.get_objects()) == 1
