"""Rules 9 and 17 for recorded regions: who keeps what alive, and until when. The garbage collector is off in all of these."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from train_charlm import peak_bytes

from ckpt_hooks import checkpoint, checkpoint_region, policies
from tests.measure import Frames, allocated, leaf

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Each collection looks at what these tests made alone: all that was imported takes half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def frames():
    watching = Frames()
    with watching:
        yield watching


def storages(*tensors):
    """Returns weak references to the memory of tensors."""
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def expired(references):
    return [reference.expired() for reference in references]


def block(x):
    h = x.sin().exp()
    h = F.dropout(h, 0.5).mul_(2)
    first, second = h.chunk(2)
    return (torch.cat([first, second]) * h).cos()


# Frames


@pytest.mark.parametrize("how", ["backward", "discarded", "exception", "policy", "nested", "hooks"])
def test_there_are_no_cycles(how, frames):
    """Nothing of a tape is left that only the garbage collector would find."""
    x, w = leaf(4, 4), leaf(4, 4)

    def run():
        policy = policies.dots_saveable if how == "policy" else None
        with save_on_cpu() if how == "hooks" else contextlib.nullcontext(), checkpoint_region(policy=policy):
            y = block((x @ w).relu_())
            if how == "nested":
                with checkpoint_region():
                    y = checkpoint(block, block(y) @ w)
            if how == "exception":
                raise KeyError
        if how != "discarded":
            grad(y.sum(), x)

    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with contextlib.suppress(KeyError):
            run()
        gc.collect()
        left = [type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("ckpt_hooks.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []


# Values


def test_activations_are_gone_when_the_region_exits():
    """Outputs of operators go with the variables that hold them, in the region already."""
    x = leaf(4)
    with checkpoint_region():
        h = x.sin()
        k = h.exp()
        gone = storages(h, k)
        y = k.cos()
        del h, k
        assert expired(gone) == [True, True]
    y.sum().backward()


def test_what_no_handle_depends_on_is_gone():
    """Inputs of what came to nothing or is not replayed, at the exit at the latest; others with backward (Rule 17)."""
    x = leaf(4)
    needed, dead, metric, linear = (torch.randn(4, dtype=torch.float64) for _ in range(4))
    gone = storages(needed, dead, metric, linear)
    with checkpoint_region():
        h = x.sin() * needed
        (h * dead).exp()
        (h.detach() - metric).abs().mean()
        y = (h.exp().tanh() + linear) * 2
        del h, needed, dead, metric, linear
    assert expired(gone) == [False, True, True, True]
    y.sum().backward()
    assert gone[0].expired()


def test_inputs_go_as_backward_passes_them():
    """What only the end of a region needs is gone before its beginning is through."""
    x, seen = leaf(4), []
    first, last = (torch.randn(4, dtype=torch.float64) for _ in range(2))
    gone = storages(first, last)
    h = x * 1
    h.register_hook(lambda g: seen.append(expired(gone)))
    with checkpoint_region():
        with checkpoint_region():
            k = (h.sin() * first).exp().tanh()
        with checkpoint_region():
            y = (k.sin() * last).exp().tanh()
    k.register_hook(lambda g: seen.append(expired(gone)))
    del first, last, h, k
    y.sum().backward()
    assert seen == [[False, True], [True, True]]


def test_what_a_policy_keeps_goes_as_backward_passes_it():
    """One by one, and not with the frame."""
    x, w, gone, seen = leaf(4, 4), leaf(4, 4), [], []

    def note(g):
        seen.append(expired(gone))

    with checkpoint_region(policy=policies.dots_saveable):
        h = x
        for _ in range(3):
            h = h @ w
            gone += storages(h)
            h = h.sin()
            h.register_hook(note)
    y = h.sum()
    del h
    assert expired(gone) == [False] * 3
    y.backward()
    assert seen == [[False, False, False], [False, False, True], [False, True, True]]
    assert expired(gone) == [True] * 3


def test_copies_of_what_an_inner_region_reads_go_as_it_has_read_them(frames):
    """A replay in order makes one before it repeats a write."""
    x, held = leaf(4), []
    with checkpoint_region():
        g = x.sin().exp()
        h = g * 2
        with checkpoint_region():
            k = (h * 3).sin()
        h.mul_(3)
        y = k * h.exp()
    g.register_hook(lambda _: held.extend(frames.frames[0]().held()))
    del g, h, k
    y.sum().backward()
    assert [(holding.reason.value, holding.nbytes) for holding in held] == [("recomputed", 32)]


# Memory


def net(kind):
    torch.manual_seed(0)
    layer = {
        "linear": list,
        "gelu": lambda: [nn.GELU()],
        "norm": lambda: [nn.LayerNorm(64)],
        "dropout": lambda: [nn.Dropout(0.1)],
        "all": lambda: [nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1)],
    }[kind]
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), *layer()) for _ in range(4)))


def peak(kind, policy, *, checkpointed=True):
    model, x = net(kind), torch.randn(64, 64, requires_grad=True)

    def step():
        with checkpoint_region(policy=policy) if checkpointed else contextlib.nullcontext():
            y = model(x)
        y.sum().backward()

    step()  # gradients are there from now on
    return peak_bytes(step)


@pytest.mark.parametrize("kind", ["linear", "gelu", "norm", "dropout", "all"])
def test_to_keep_everything_costs_what_plain_autograd_does(kind):
    """To the byte, at the worst moment of a step."""
    assert peak(kind, policies.everything_saveable) == peak(kind, None, checkpointed=False)


@pytest.mark.parametrize("kind", ["linear", "gelu", "norm"])
def test_to_keep_nothing_costs_no_more_than_that(kind):
    """One region around all of it brings back all of it, at most."""
    assert peak(kind, policies.nothing_saveable) <= peak(kind, None, checkpointed=False)


@pytest.mark.parametrize("written", [torch.arange(4, 8), slice(4, 8)])
def test_a_bank_of_which_forward_reads_rows_before_it_overwrites_others(written):
    """A recorded region holds the rows, a call a copy of what forward changed (Rule 9); torch's is wrong, and holds neither."""

    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("bank", torch.randn(4096, 16))

        def forward(self, x, read, written):
            rows = self.bank[read]
            y = self.linear(x).tanh()
            y = (y @ rows.t()).softmax(-1) @ rows + y
            with torch.no_grad():
                self.bank[written] = y[:4].detach()
            return y

    def run_plainly(function, *args):
        return function(*args)

    def region(function, *args):
        with checkpoint_region(preserve_rng_state=False):
            return function(*args)

    call = functools.partial(checkpoint, preserve_rng_state=False)
    read, found, held = torch.arange(8), [], []
    for run in (run_plainly, region, call):
        torch.manual_seed(0)
        layers, x = [Bank() for _ in range(3)], torch.randn(8, 16, requires_grad=True)
        y, nbytes = allocated(lambda: functools.reduce(lambda y, layer: run(layer, y, read, written), layers, x))
        found.append([y, *grad(y.sum(), [layer.linear.weight for layer in layers]), *(layer.bank for layer in layers)])
        held.append(nbytes)
    assert all(map(torch.equal, *found[:2]))
    assert all(map(torch.equal, *found[1:]))
    assert held[1:] == [3 * (x.nbytes + y.nbytes), 3 * (x.nbytes + layers[0].bank.nbytes)]
