"""Moving tensors to the host and back, with a fake device."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd import grad

import ckpt_hooks
from ckpt_hooks import MutationError, checkpoint_name, checkpoint_region
from ckpt_hooks.offload import offload_saved_tensors
from tests.measure import CountOps, Saves, leaf

aten = torch.ops.aten


def offloading(**options):
    """Returns a block that moves tensors from 1 KiB."""
    return offload_saved_tensors(**{"min_offload_size": 1024, **options})


def save_and_offload(*operators):
    """Returns a policy that moves the outputs of some operators."""
    return ckpt_hooks.policies.offload_ops(*operators)


def test_streams_wait_for_each_other(transfers):
    """The copy out for the computing before it, the copy back for the copy out, the computing after for the copy back."""
    x = torch.randn(300, requires_grad=True)
    with offloading():
        y = (x * 1).sin()
    assert torch.equal(grad(y.sum(), x)[0], x.cos())
    assert transfers.notes == [
        ("out", "waits for", "main"),
        ("send", 300),
        ("main", "waits for", "out 1"),
        ("back", "waits for", "main"),
        ("back", "waits for", "out 1"),
        ("fetch", 300),
        ("main", "waits for", "back 1"),
    ]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(10),
        torch.ones(1, 1000).expand(3, 1000),
        torch.ones(1000, 4)[:, ::2],
        torch.ones(1000).to_sparse(),
        torch.ones(0),
        torch.ones(3000, device="meta"),
    ],
    ids=["small", "expanded", "with gaps", "sparse", "empty", "meta"],
)
def test_what_stays(transfers, tensor):
    """What is not worth moving, or not to be moved as it is."""
    with offloading():
        y = Saves.apply(leaf(1), tensor)
    assert transfers.moved() == []
    y.backward()


def test_the_threshold(transfers):
    """In bytes."""
    sent = []
    for size, threshold in ((256, 1024), (255, 1024), (255, 0)):
        with offload_saved_tensors(min_offload_size=threshold):
            y = Saves.apply(leaf(1), torch.ones(size))
        sent.append(transfers.count("send"))
        y.backward()
    assert sent == [1, 1, 2]


def test_a_policy_offloads(transfers):
    """What it names is moved once, comes back once, and is not computed again."""
    x, w = leaf(20, 20), leaf(20, 20)

    def function(x, w):
        return (x @ w).sin().cos()

    y = ckpt_hooks.checkpoint(policy=save_and_offload(aten.mm.default))(function)(x, w)
    assert transfers.moved() == [("send", 400)]
    with CountOps() as ops:
        found = grad(y.sum(), (x, w))
    assert transfers.moved() == [("send", 400), ("fetch", 400)]
    assert ops.counts["mm"] == 2  # those of backward
    assert all(torch.equal(a, b) for a, b in zip(found, grad(function(x, w).sum(), (x, w)), strict=True))


def test_regions_are_fetched_one_ahead(transfers):
    """When backward comes to a region, the one before it is on its way."""
    xs = [leaf(side, side) for side in (20, 21, 22)]

    def function(x):
        return (x @ x).sin().cos().sum()

    region = ckpt_hooks.checkpoint(policy=save_and_offload(aten.mm.default))(function)
    y = 0
    for x in xs:
        y = region(x) * (1 + y)
    assert transfers.moved() == [("send", 400), ("send", 441), ("send", 484)]
    fetched = []
    for x in xs:
        x.register_hook(lambda g: fetched.append(transfers.moved()[3:]))
    found = grad(y, xs)
    assert fetched == [
        [("fetch", 484), ("fetch", 441)],
        [("fetch", 484), ("fetch", 441), ("fetch", 400)],
        [("fetch", 484), ("fetch", 441), ("fetch", 400)],
    ]
    y = 0
    for x in xs:
        y = function(x) * (1 + y)
    assert all(torch.equal(a, b) for a, b in zip(found, grad(y, xs), strict=True))


def test_names_say_what_is_moved(transfers):
    x = leaf(20, 20)
    policy = ckpt_hooks.policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"], names_which_can_be_offloaded=["moved"]
    )

    def program(region):
        with region:
            h = checkpoint_name(x @ x, "moved").sin()
            return grad(checkpoint_name(h @ x, "kept").cos().sum(), x)[0]

    found = program(checkpoint_region(policy=policy))
    assert transfers.moved() == [("send", 400), ("fetch", 400)]
    assert torch.equal(found, program(contextlib.nullcontext()))


def test_a_write_in_the_region_waits_for_the_copy(transfers):
    x = leaf(20, 20)

    def program(region):
        with region:
            h = x + 1
            y = (h * 2).exp()
            h.mul_(3)
            y = y + h * x
        return grad(y.sum(), x)[0]

    found = program(checkpoint_region(policy=save_and_offload(aten.add.Tensor)))
    assert transfers.count("fetch") >= 1
    assert torch.equal(found, program(contextlib.nullcontext()))


def test_a_write_to_what_is_on_its_way(transfers):
    """An error: the copy may have seen it or not."""
    x = leaf(20, 20)

    def function(x):
        h = x @ x
        return h, (h + 1).sin()

    h, y = ckpt_hooks.checkpoint(policy=save_and_offload(aten.mm.default))(function)(x)
    h.detach().zero_()
    with pytest.raises(MutationError, match="kept by the policy"):
        y.sum().backward()


@pytest.mark.usefixtures("transfers")
def test_backward_before_the_block_ends():
    """Of what was saved last and is not on its way yet."""
    x = leaf(20)
    with offload_saved_tensors(min_offload_size=0):
        y = x.sin() * torch.ones(20)
        found = grad(y.sum(), x)[0]
    assert torch.equal(found, x.cos())


def on_the_host(x, w):
    h = x * 1
    return h, h.sin()


def without_grad(x, w):
    mask = torch.ones_like(x)
    return mask, x * mask


def result(x, w):
    y = x.exp()
    return y, y


def view(x, w):
    h = x * 1
    return h, h.t().sin()


STAYS = {
    "on the host": on_the_host,
    "parameter": lambda x, w: (w, x * w),
    "without grad": without_grad,
    "result": result,
    "view": view,
}


@pytest.mark.parametrize("device", ["host", "device"])
@pytest.mark.parametrize("kind", list(STAYS))
def test_a_tensor_that_stays_and_was_written_to(request, kind, device):
    """An error, as in plain autograd, wherever it is: on the host, or too small to be moved."""
    if device == "device":
        request.getfixturevalue("transfers")

    def run(hooks):
        x, w = leaf(3, 3), leaf(3, 3)
        with hooks:
            written, y = STAYS[kind](x, w)
        with torch.no_grad():
            written.add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        run(contextlib.nullcontext())
    what = "leaf" if kind == "parameter" else "tensor"
    match = rf"a float64\[3, 3\] {what} .*modified by an inplace operation: it is at version 1; expected version 0 instead"
    with pytest.raises(MutationError, match=match) as caught:
        run(offloading())
    assert (caught.value.expected, caught.value.found) == (0, 1)
