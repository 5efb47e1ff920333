"""``offload_inputs=True``: inputs of regions wait for backward on the host."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_module, checkpoint_region
from ckpt_hooks.policies import dots_saveable
from ckpt_hooks.report import Reason
from tests.measure import Log, Watch


class Layer(nn.Module):
    """A layer with a mask, which all layers share, and weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        h = nn.functional.dropout(self.linear(self.norm(x)).tanh(), 0.1)
        return x + (h if mask is None else h * mask)


FORMS = {
    "function": lambda layer, **options: checkpoint(**options)(layer),
    "policy": lambda layer, **options: checkpoint(policy=dots_saveable, **options)(layer),
    "values": lambda layer, **options: checkpoint(determinism_check="values", **options)(layer),
    "region": lambda layer, **options: checkpoint_region(**options)(layer),
    "region-parts": lambda layer, **options: checkpoint_region(replay_whole=False, **options)(layer),
    "region-policy": lambda layer, **options: checkpoint_region(policy=dots_saveable, **options)(layer),
    "module": lambda layer, **options: checkpoint_module(layer, **options),
    "recorded-module": lambda layer, **options: checkpoint_module(layer, recorded=True, **options),
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request):
    return request.param


def model(depth=3, width=16):
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(width) for _ in range(depth))
    return layers, torch.randn(40, width, requires_grad=True), torch.ones(40, width)


def run(form, layers, x, mask, **options):
    """Returns the loss of layers in a row, each a region; ``x`` goes through an operator first, since leaves stay."""
    torch.manual_seed(1)
    h = x * 1
    for layer in layers:
        h = (layer if form is None else form(layer, **options))(h, mask)
    return h.pow(2).sum()


def test_rule_12_equal_and_on_the_host(form, transfers):
    """Each input goes to the host once, and comes back once in a backward; the mask and weights stay."""
    layers, x, mask = model()
    expected = grad(run(None, layers, x, mask), (x, *layers.parameters()))
    loss = run(form, layers, x, mask, offload_inputs=True)
    assert transfers.moved() == [("send", 640)] * 3
    found = grad(loss, (x, *layers.parameters()), retain_graph=True)
    assert all(map(torch.equal, found, expected))
    assert transfers.moved() == [("send", 640)] * 3 + [("fetch", 640)] * 3
    found = grad(loss, (x, *layers.parameters()))
    assert all(map(torch.equal, found, expected))
    assert transfers.count("fetch") == 6


def test_the_device_lets_go(form, transfers, no_gc):
    """After forward no input is on the device but those on their way, and after backward no copy is anywhere."""
    layers, x, mask = model(depth=8)
    seen = Log()
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, args: seen.append(weakref.ref(args[0].untyped_storage())))
    loss = run(form, layers, x, mask, offload_inputs=True)
    assert sum(memory() is not None for memory in seen) <= 5
    assert transfers.in_flight() <= 5
    loss.backward()
    del loss
    assert [memory() for memory in seen] == [None] * len(seen)
    assert transfers.on_device() == 0


def test_an_input_of_many_regions(form, transfers):
    """It is sent once, fetched once in a backward, and drops from the device when that ends."""
    layers, x, _ = model()

    def decode(form, **options):
        torch.manual_seed(1)
        states, h = x * 2, x * 1
        for layer in layers:
            h = (layer if form is None else form(layer, **options))(h, states)
        return h.pow(2).sum()

    expected = grad(decode(None), (x, *layers.parameters()))
    loss = decode(form, offload_inputs=True)
    assert transfers.count("send") == 4
    for _ in range(2):
        before = transfers.count("fetch")
        found = grad(loss, (x, *layers.parameters()), retain_graph=True)
        assert all(map(torch.equal, found, expected))
        assert transfers.count("fetch") - before == 4
    del loss, found
    gc.collect()
    assert transfers.on_device() == 0


def test_rule_11_two_threads_with_one_input(transfers):
    """A thread that comes while the copy is being started makes one of its own."""
    h = torch.randn(300, requires_grad=True) * 1
    region = checkpoint(offload_inputs=True)(lambda h: h.sin() * h)
    inside, go_on, host_like = threading.Event(), threading.Event(), transfers.host_like

    def slow(tensor):
        transfers.host_like = host_like
        inside.set()
        assert go_on.wait(10)
        return host_like(tensor)

    transfers.host_like = slow
    found = []
    thread = threading.Thread(target=lambda: found.append(region(h)))
    thread.start()
    assert inside.wait(10)
    found.append(region(h))
    go_on.set()
    thread.join()
    expected = grad((h.sin() * h).sum(), h)[0]
    assert all(torch.equal(grad(y.sum(), h)[0], expected) for y in found)


def test_what_stays(transfers):
    """Leaves, tensors without gradients, small tensors, and whatever saved-tensor hooks or a region around have."""
    x, small = torch.randn(300, requires_grad=True), torch.randn(4, requires_grad=True)

    def product(*tensors):
        return sum((tensor * tensor).sum() for tensor in tensors)

    region = checkpoint(offload_inputs=True)(product)
    region(x, x.detach(), small * 1, x.view(3, 100)).backward()
    assert transfers.moved() == []
    with torch.autograd.graph.save_on_cpu():
        region(x * 1).backward()
    assert transfers.moved() == []
    checkpoint(lambda x: region(x * 1), x).backward()
    assert transfers.moved() == []
    with checkpoint_region():
        loss = region(x * 1)
    loss.backward()
    assert transfers.moved() == []
    region(x * 1).backward()
    assert transfers.moved() == [("send", 300), ("fetch", 300)]


def test_with_split_backward(form, transfers):
    """Inputs are fetched once for both backwards."""
    layers, x, mask = model()
    expected = grad(run(None, layers, x, mask), (x, *layers.parameters()))
    loss = run(form, layers, x, mask, offload_inputs=True, split_backward=True)
    found = [*grad(loss, x, retain_graph=True), *grad(loss, list(layers.parameters()))]
    assert all(map(torch.equal, found, expected))
    assert transfers.count("fetch") == 3


def test_what_is_told(transfers):
    """Reports see the inputs on the host, and the copies."""
    x = torch.randn(300, requires_grad=True)

    class Copies(Watch):
        def __init__(self):
            self.found = []

        def moved(self, region, nbytes, *, to_host):
            self.found.append((region.path[-1], nbytes, to_host))

        def held(self, region, holdings):
            self.found += [(holding.reason, holding.nbytes) for holding in holdings]

    for make in (checkpoint, checkpoint_region):
        copies = Copies()
        region = make(name="one", offload_inputs=True)
        with copies:
            y = region(lambda x: x.sin().cos())(x * 1)
        y.sum().backward()
        told = [("one", 1200, True), (Reason.OFFLOADED, 1200), ("one", 1200, False)]
        assert [one for one in copies.found if one in told] == told
    with checkpoint_region(offload_inputs=True) as region:
        y = (x * 1).sin().cos()
    assert region.kept() == []
    h = x * 1
    with checkpoint_region(offload_inputs=True) as region:
        y = h.sin().cos()
    assert [(kept.reason, kept.shape) for kept in region.kept()] == [(Reason.OFFLOADED, (300,))]
    assert y.shape == h.shape
