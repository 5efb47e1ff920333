"""What goes to the host and comes back, how often, how many at a time, and that copies which land late are right."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ckpt_hooks import checkpoint, checkpoint_name, checkpoint_region, policies
from ckpt_hooks.offload import offload_saved_tensors
from tests.fake_device import Transfers
from tests.measure import CountOps, Saves, leaf

aten = torch.ops.aten


def offloading(**options):
    """Returns a block that moves tensors of every size."""
    return offload_saved_tensors(**{"min_offload_size": 0, **options})


def linear(shape, *, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(16, 24, bias=bias)
    x = torch.randn(*shape, 16, requires_grad=True)
    return lambda: layer(x * 1), (x, *layer.parameters())


def attention():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 16, requires_grad=True)

    def function():
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(x * 1, x * 2, x * 3)

    return function, (x,)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 8, 16, requires_grad=True)
    return lambda: layer(x * 1), (x, *layer.parameters())


PROGRAMS = {
    "linear": lambda: linear((4,)),
    "linear without bias": lambda: linear((4,), bias=False),
    "linear of three dimensions": lambda: linear((2, 4)),
    "attention": attention,
    "encoder layer": encoder,
}


def weights_sent(transfers, parameters):
    """Returns how many copies to the host read the memory of a parameter."""
    storages = [parameter.untyped_storage() for parameter in parameters]
    return sum(any(source() is storage for storage in storages) for source in transfers.sources)


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_each_tensor_goes_once_and_comes_once(transfers, name, retained):
    """A weight does neither; and nothing that came stays on the device after backward."""
    function, leaves = PROGRAMS[name]()
    expected = grad(function().square().sum(), leaves)
    with offloading():
        y = function()
    sent = transfers.count("send")
    assert sent > 0
    assert weights_sent(transfers, leaves) == 0
    loss = y.square().sum()
    for number in range(1 + retained):
        found = grad(loss, leaves, retain_graph=retained)
        assert all(map(torch.equal, found, expected))
        assert transfers.count("fetch") == sent * (number + 1)
        assert transfers.count("send") == sent
        assert transfers.on_device() == 0


def test_what_was_fetched_ahead_and_not_taken_goes(transfers):
    """A backward through a part of the graph leaves nothing on the device, nor does one that fails."""
    x = leaf(40)
    with offloading():
        h = (x * 1).sin()
        y = h.cos().exp().sin()
    grad(y.sum(), h, retain_graph=True)
    assert transfers.count("fetch") > 0
    assert transfers.on_device() == 0

    def fail(gradient):
        raise RuntimeError("no more")

    handle = h.register_hook(fail)
    with pytest.raises(RuntimeError, match="no more"):
        y.sum().backward(retain_graph=True)
    assert transfers.on_device() == 0
    handle.remove()
    expected = leaf(40).detach().copy_(x.detach()).requires_grad_()
    assert torch.equal(grad(y.sum(), x)[0], grad(expected.sin().cos().exp().sin().sum(), expected)[0])


def test_what_two_backwards_fetched_ahead_goes_when_each_ends(transfers):
    """One runs inside of the other, and both leave out the same part of the graph."""
    x = leaf(40)
    with offloading():
        h = (x * 1).sin()
        z = h.cos().exp()
        total = z.sin().sum()
    inner = []

    def run_another(gradient):
        handle.remove()
        inner.extend(grad(total, h, retain_graph=True))

    handle = z.register_hook(run_another)
    (outer,) = grad(total, h, retain_graph=True)
    assert torch.equal(outer, inner[0])
    assert transfers.on_device() == 0


def conjugate(x):
    return x.conj()


def negative(x):
    return torch._neg_view(x)


@pytest.mark.parametrize("face", [conjugate, negative])
def test_a_tensor_that_is_not_what_is_in_its_memory(transfers, face):
    """The conjugate of a tensor is a bit, which goes apart from the memory: that lands after torch has looked at the bits."""
    x = torch.randn(32, dtype=torch.complex128, requires_grad=True)

    def function():
        h = face(x * 1)
        return (h * h.detach().cos()).abs().sum()

    expected = grad(function(), x)[0]
    with offloading():
        y = function()
    assert torch.equal(grad(y, x)[0], expected)
    tensor, found = face(x.detach() * 1), []
    with offloading():
        y = Saves.apply(leaf(1), tensor, found.append)
    y.backward()
    assert torch.equal(found[0], tensor)
    assert (found[0].is_conj(), found[0].is_neg()) == (face is conjugate, face is negative)


def parametrized(w):
    return (w * 1).t()


def written_to(w):
    h = w * 1
    h.mul_(2)
    return h[:]


WEIGHTS = {
    "a parameter": (lambda w: w, False),
    "its transpose": (lambda w: w.t(), False),
    "a view of a view": (lambda w: w.view(256).view(16, 16), False),
    "one of several views": (lambda w: w.chunk(1)[0], False),
    "a view made without gradients": (lambda w: w.detach().t(), True),
    "what a parameter became": (parametrized, True),
    "a view of what was written to": (written_to, True),
    "a frozen parameter": (lambda w: nn.Parameter(w.detach().clone(), requires_grad=False).t(), False),
    "a buffer": (lambda w: w.detach().clone(), True),
}


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_weights_stay(transfers, name):
    """Parameters, trained or not, and their views: the model holds them anyway."""
    make, goes = WEIGHTS[name]
    w, x = nn.Parameter(torch.randn(16, 16)), torch.randn(16, 16, requires_grad=True)
    factor = make(w)
    place = factor.grad_fn if factor.requires_grad else None
    with offloading():
        y = x @ factor  # saves x, a leaf, for the weight's gradient
    assert transfers.count("send") == goes
    assert (factor.grad_fn if factor.requires_grad else None) is place
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(16, 16) @ factor.detach().t())


@pytest.mark.parametrize("form", ["saved", "recorded"])
def test_casts_of_weights_stay(transfers, form):
    """Autocast makes one of each weight, and holds it itself until its block ends."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)

    def function():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(layer(x.sin()))

    expected = grad(function().sum(), (x, *layer.parameters()))
    if form == "saved":
        with offloading():
            y = function()
    else:
        with checkpoint_region(policy=policies.offload_ops(aten._to_copy.default)):
            y = function()
    sent = [note[1] for note in transfers.moved()]
    assert sent
    assert 64 * 64 not in sent
    assert all(map(torch.equal, grad(y.sum(), (x, *layer.parameters())), expected))


def test_one_tensor_that_three_operators_save_goes_once(transfers):
    """As the queries, keys and values of one input do; a view of each operator's own is the same tensor."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(3)]
    x = torch.randn(2, 8, 16, requires_grad=True)
    leaves = (x, *(parameter for layer in layers for parameter in layer.parameters()))

    def function():
        h = x * 1
        return sum(layer(h) for layer in layers)

    expected = grad(function().sum(), leaves)
    with offloading():
        y = function()
    assert transfers.moved() == [("send", 256)]
    found = grad(y.sum(), leaves)
    assert transfers.moved() == [("send", 256), ("fetch", 256)]
    assert all(map(torch.equal, found, expected))
    assert transfers.on_device() == 0


class WritesToWhatItSaved(torch.autograd.Function):
    """A sine whose backward clears what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        found = gradient * x.cos()
        x.zero_()
        return found


def test_a_backward_that_writes_to_what_others_take_too(transfers):
    """The others get what is on the host."""
    x = leaf(32)
    with offloading():
        h = x * 1
        y = h.exp().sum() + (h * h).sum() + WritesToWhatItSaved.apply(h).sum()
    found = grad(y, x)[0]
    plain = leaf(32).detach().copy_(x.detach()).requires_grad_()
    h = plain * 1
    assert torch.equal(found, grad(h.exp().sum() + (h * h).sum() + h.sin().sum(), plain)[0])
    assert transfers.on_device() == 0


@pytest.mark.parametrize("bound", [1, 2, 5, None])
def test_so_many_are_in_flight(transfers, bound):
    """And the memory of the others is free, though no copy has landed but those that were waited for."""
    options = {} if bound is None else {"max_fwd_stash_size": bound}
    bound = bound or 5
    x, seen = leaf(50), []
    with offloading(**options):
        y = x * 1
        for _ in range(10):
            y = y.sin()
            seen.append(transfers.in_flight())
    assert transfers.count("send") == 10
    assert seen == [min(number, bound) for number in range(1, 11)]
    landed = [note for note in transfers.notes if note[0] == "main" and note[1] == "waits for"]
    assert landed == [("main", "waits for", f"out {number}") for number in range(1, 11 - bound)]
    assert not [note for note in transfers.notes if note[1] == "uses"]
    plain = x.detach().clone().requires_grad_()
    z = plain * 1
    for _ in range(10):
        z = z.sin()
    assert torch.equal(grad(y.sum(), x)[0], grad(z.sum(), plain)[0])
    assert transfers.in_flight() == 0
    assert not [note for note in transfers.notes if note[1] == "uses"]


def test_a_node_on_another_stream_marks_what_it_uses(transfers):
    """It waits for the copy, which was fetched ahead and had waited for what computed."""
    x, side = torch.randn(300, requires_grad=True), transfers.new_stream("side")
    with offloading():
        h = (x * 1).sin()
        y = h.cos()
    h.register_hook(lambda gradient: setattr(transfers, "running", side))
    found = grad(y.sum(), x)[0]
    transfers.running = transfers.main
    assert torch.equal(found, grad(x.sin().cos().sum(), x)[0])
    notes = transfers.notes
    assert notes[-2:] == [("side", "waits for", "back 2"), ("side", "uses", (300,))]
    assert notes.index(("back", "waits for", "main")) < notes.index(("fetch", 300))


@pytest.mark.parametrize("form", ["saved", "checkpoint", "region", "region in a block"])
def test_modes_of_the_user_do_not_see_the_way(transfers, form):
    """Neither do those of the package: the copies are no operators of a program."""
    x = leaf(20, 20)
    policy = policies.offload_ops(aten.mm.default)

    def function():
        return (x @ x).sin().cos()

    block = contextlib.ExitStack()
    ops = block.enter_context(CountOps())
    with block:
        if form == "saved":
            with offloading():
                y = function()
        elif form == "checkpoint":
            y = checkpoint(policy=policy)(function)()
        else:
            if form == "region in a block":
                block.enter_context(offloading())
            block.enter_context(checkpoint_region(policy=policy))
            y = function()
    assert transfers.count("send") > 0
    assert ops.counts == {"mm": 1, "sin": 1, "cos": 1}
    assert torch.equal(grad(y.sum(), x)[0], grad(function().sum(), x)[0])


@pytest.mark.parametrize("kind", ["within", "outer", "view", "named"])
def test_marks_in_recorded_regions(transfers, kind):
    """Of views, of tensors of the region around, and of what is kept by name: right values, and no copies."""
    side = transfers.new_stream("side")
    x = leaf(20, 20)

    def function(inner):
        h = (x @ x).sin()
        with inner:
            if kind == "view":
                view = h.t()
                view.record_stream(side)
                return (view.cos() @ h).sin()
            if kind == "named":
                h = checkpoint_name(h, "h")
            h.record_stream(side)
            z = h.cos() @ h
            h.mul_(2)
            h.record_stream(side)
            return (z + h).sin()

    inner = checkpoint_region if kind == "outer" else contextlib.nullcontext
    try:
        expected = grad(function(contextlib.nullcontext()).sum(), x)[0]
    except RuntimeError:  # it wrote to what was saved
        expected = None
    policy = policies.save_only_these_names("h") if kind == "named" else None
    with checkpoint_region(policy=policy):
        y = function(inner())
    if expected is None:
        with pytest.raises(RuntimeError, match="inplace"):
            grad(y.sum(), x)
        return
    assert torch.equal(grad(y.sum(), x)[0], expected)


def test_memory_of_the_host_is_pinned_and_laid_out_alike():
    """For copies which do not wait. Here is no device to pin it for."""
    asked = []

    class Unpinned(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.empty_strided:
                asked.append(kwargs.pop("pin_memory"))
            return func(*args, **(kwargs or {}))

    with Unpinned():
        host = Transfers.host_like(None, torch.ones(2, 3, dtype=torch.float16).t())
    assert asked == [True]
    assert (host.shape, host.stride(), host.dtype) == ((3, 2), (1, 3), torch.float16)
