"""Saved tensors unpacked in any order, which torch leaves open: what comes back, and how much runs for it."""

from __future__ import annotations

import random

import pytest
import torch
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_region, policies
from ckpt_hooks._torch.autograd import save_tensor
from ckpt_hooks.offload import offload_saved_tensors
from tests.measure import Calls, CountOps, leaf

ORDERS = ["forward", "backward", *range(8)]

pytestmark = pytest.mark.slow


def ordered(things, order):
    """Returns a list in an order: that of packing, its reverse, or one at random by a seed."""
    things = list(things)
    if order == "backward":
        things.reverse()
    elif order != "forward":
        random.Random(order).shuffle(things)
    return things


def program(x, w):
    h = torch.nn.functional.dropout(x @ w, 0.5)
    for _ in range(3):
        h = torch.tanh(h @ w) * h.exp() + (h.sin() * h.cos()).softmax(-1)
    return h.sigmoid() @ w


def accesses(y):
    """Returns node and name of each attribute by which a saved tensor of a graph is read, in the order of packing."""
    nodes, todo = {}, [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes and node.name() != "torch::autograd::AccumulateGrad":
            nodes[node] = node._sequence_nr()
            todo += [below for below, _ in node.next_functions]
    return [
        (node, name)
        for node in sorted(nodes, key=nodes.__getitem__)
        for name in dir(node)
        if name.startswith("_saved_") and isinstance(getattr(node, f"_raw{name}", None), torch._C._autograd.SavedTensor)
    ]


def read(found, order):
    """Reads saved tensors in an order; returns them in the order of packing; None where a node needs none."""
    values = {(node, name): getattr(node, name) for node, name in ordered(found, order)}
    return [values[access] for access in found]


def assert_same(values, expected):
    """Asserts that what was read is what plain autograd has, bit for bit."""
    assert len(values) == len(expected)
    for value, other in zip(values, expected, strict=True):
        assert value is other is None or torch.equal(value, other)


def in_one_backward(call):
    """Calls something in the course of a backward that has nothing to do with it."""
    results = []
    unrelated = leaf(1)
    y = unrelated * 1
    y.register_hook(lambda gradient: results.append(call()))
    y.sum().backward()
    return results[0]


def region(function, *args):
    with checkpoint_region():
        return function(*args)


def region_with_policy(function, *args):
    with checkpoint_region(policy=policies.dots_saveable):
        return function(*args)


def within(outer, inner):
    """A region in another one, which makes what it reads."""
    return lambda function, x, w: outer(lambda x, w: inner(function, x.sin(), w), x, w)


FORMS = {
    "checkpoint": within(lambda f, *args: f(*args), checkpoint),
    "to its end": within(lambda f, *args: f(*args), lambda function, *args: checkpoint(function, *args, early_stop=False)),
    "policy": within(
        lambda f, *args: f(*args), lambda function, *args: checkpoint(policy=policies.dots_saveable)(function)(*args)
    ),
    "nested": within(checkpoint, checkpoint),
    "region": within(lambda f, *args: f(*args), region),
    "region with a policy": within(lambda f, *args: f(*args), region_with_policy),
    "nested regions": within(region, region),
    "region in checkpoint": within(checkpoint, region),
    "checkpoint in region": within(region, checkpoint),
}

#: How often the function runs for one backward: a region that only records does not call it again.
RERUNS = {"region": 0, "region with a policy": 0, "nested regions": 0}
#: How often each of its operators does: a region in a checkpoint is recorded once more, and replayed from that.
RUNS = {"region in checkpoint": 2}


def inputs():
    return leaf(16, 16), (torch.randn(16, 16, dtype=torch.float64) / 16).requires_grad_()


def copies(values):
    return [None if value is None else value.clone() for value in values]


def plainly(x, w):
    """Returns what plain autograd saves, and the gradients."""
    torch.manual_seed(0)
    y = program(x.sin(), w)
    return copies(read(accesses(y), "forward")), grad(y.sum(), (x, w))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
def test_unpacking_within_one_backward(form, order):
    """Every value is plain autograd's bit for bit, and one recompute serves them all; so do those of the next backward."""
    x, w = inputs()
    expected, gradients = plainly(x, w)
    function, reruns = Calls(program), RERUNS.get(form, 1)
    torch.manual_seed(0)
    y = FORMS[form](function, x, w)
    found = accesses(y)
    with CountOps() as ops:
        values = in_one_backward(lambda: read(found, order))
    assert_same(values, expected)
    assert function.count == 1 + reruns
    assert ops.counts["tanh"] == ops.counts["exp"] == 3 * RUNS.get(form, 1)
    assert all(map(torch.equal, grad(y.sum(), (x, w)), gradients))
    assert function.count == 1 + 2 * reruns


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
def test_unpacking_outside_of_backward(form, order):
    """Each value is brought back by itself."""
    x, w = inputs()
    expected, gradients = plainly(x, w)
    function = Calls(program)
    torch.manual_seed(0)
    y = FORMS[form](function, x, w)
    values = read(accesses(y), order)
    assert_same(values, expected)
    if form in ("checkpoint", "policy"):
        # One rerun for each that is not a leaf.
        assert function.count == 1 + sum(value is not None and not (value.is_leaf and value.requires_grad) for value in values)
    assert all(map(torch.equal, grad(y.sum(), (x, w)), gradients))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("retained", [False, True])
def test_offloaded_tensors(transfers, order, retained):
    """Each goes to the host once and comes back once for each time that it is wanted, if it goes when it was unpacked."""
    x = leaf(16, 16)
    tensors = [x * (number + 2) for number in range(6)]
    with offload_saved_tensors(min_offload_size=1024):
        saved = dict(enumerate(map(save_tensor, tensors)))
    expected = [tensor.detach().clone() for tensor in tensors]
    for number in ordered(range(6), order):
        value = saved[number].unpack() if retained else saved.pop(number).unpack()
        assert torch.equal(value, expected[number])
    moved = [note[0] for note in transfers.moved()]
    assert moved.count("send") == 6
    if not retained or order == "backward":
        assert moved.count("fetch") == 6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", ["checkpoint", "region"])
def test_regions_whose_kept_outputs_are_on_the_host(transfers, form, order):
    x, w = inputs()
    expected, gradients = plainly(x, w)
    policy = policies.offload_ops(torch.ops.aten.mm.default)
    torch.manual_seed(0)
    if form == "checkpoint":
        y = checkpoint(policy=policy)(program)(x.sin(), w)
    else:
        with checkpoint_region(policy=policy):
            y = program(x.sin(), w)
    found = accesses(y)
    values = in_one_backward(lambda: read(found, order))
    assert_same(values, expected)
    assert all(map(torch.equal, grad(y.sum(), (x, w)), gradients))


@pytest.mark.parametrize("order", ORDERS)
def test_offloading_around_regions(transfers, order):
    """What a region takes from outside is on the host until it is wanted."""
    x, w = inputs()
    torch.manual_seed(0)
    expected = program(x.sin(), w)
    values = copies(read(accesses(expected), "forward"))
    gradients = grad(expected.sum(), (x, w))
    for form in ("checkpoint", "region"):
        torch.manual_seed(0)
        with offload_saved_tensors(min_offload_size=1024):
            y = FORMS[form](program, x, w)
        found = accesses(y)
        again = in_one_backward(lambda found=found: read(found, order))
        assert_same(again, values)
        assert all(map(torch.equal, grad(y.sum(), (x, w)), gradients))
