"""Rule 9: who keeps what alive, and until when. The garbage collector is off in all of these."""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import functools
import gc
import itertools
import types
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint as theirs

from ckpt_hooks import CheckpointError, apply_checkpointing, checkpoint, checkpoint_region, set_self_check, trace
from ckpt_hooks._core.frame import stack
from tests.measure import Frames, Log, allocated, leaf, peak_of

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.fixture
def frames():
    watching = Frames()
    with watching:
        yield watching


def block(x):
    return x.sin().exp().cos()


def test_a_frame_dies_with_backward(frames):
    x = leaf(3)
    y = checkpoint(block, x).sum()
    assert frames.alive() == [True]
    y.backward()
    assert frames.alive() == [False]


def test_a_discarded_output_takes_its_frame_along(frames):
    x = leaf(3)
    checkpoint(block, x)
    assert frames.alive() == [False]


def test_what_only_forward_needs_goes_with_forward():
    found = []
    with set_self_check(False):
        y = checkpoint(lambda x: (found.append(stack.innermost), block(x))[1], leaf(3))
    assert y.requires_grad
    for name in ("numbers", "facts", "without_grad", "positions"):  # autograd keeps the pack hook, which adds to these lists
        assert gc.get_referrers(getattr(found[0], name)) == found, name


@pytest.mark.parametrize(("value", "has_journal"), [(decimal.Context(), False), ([1], True)])
def test_a_value_in_a_context_that_no_note_rebuilds_needs_no_journal(value, has_journal):
    variable, frames = contextvars.ContextVar("variable"), Frames()

    def forward():
        variable.set(value)
        with frames:
            return checkpoint(block, leaf(3))

    y = contextvars.Context().run(forward)  # without variables that other tests have set
    frame = frames.frames[0]()
    assert [name for name, *_ in frame.variables if name is variable] == [variable]
    assert (frame.state is not None) == has_journal
    y.sum().backward()


@pytest.mark.parametrize("where", ["first", "last"])
def test_an_exception_in_forward_frees_the_frame(frames, where):
    x = leaf(3)

    def function(x):
        if where == "first":
            raise KeyError
        y = block(x)
        raise KeyError(y.shape)

    with contextlib.suppress(KeyError):
        checkpoint(function, x)
    assert frames.alive() == [False]


def test_the_stop_leaves_no_cycle_behind(frames):
    """What a function had in its locals when it was stopped is free as soon as the rerun is over."""
    made = Log()

    def function(x):
        local = x.sin()
        made.append(weakref.ref(local))
        return local.exp().neg()

    x = leaf(3)
    checkpoint(function, x).sum().backward()
    assert [r() for r in made] == [None, None]


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_chain_of_regions_is_discarded_without_recursion(count):
    """Dropping the output of many regions in a row without a backward is no deep recursion either."""
    x = torch.ones(1, requires_grad=True)
    frames = Frames()
    with frames:
        y = x
        for _ in range(count):
            y = checkpoint(torch.sin, y)
    del y
    assert frames.alive() == [False] * count


def test_frames_that_draw_nothing_share_one_rng_state():
    x = leaf(3)
    with trace() as found:
        outputs = [checkpoint(block, x) for _ in range(10)]
    assert found.steps[0].held_bytes["random state"] == torch.get_rng_state().nbytes
    del outputs


def test_a_frame_dies_before_a_graph_that_saved_nothing_but_leaves(frames):
    w, x, h = leaf(3), leaf(3), leaf(3) * 2
    gone = weakref.ref(h)
    y, z = checkpoint(lambda h: (h.sin().exp(), w * x), h)
    del h, y
    assert frames.alive() == [False]
    assert gone() is None
    z.sum().backward()
    assert torch.equal(w.grad, x)


@pytest.mark.parametrize("form", [checkpoint(name="a"), checkpoint(policy="nothing_saveable"), checkpoint_region()])
def test_partial_backwards_leave_nothing(form):
    """What is brought back and not taken is dropped when that backward ends."""
    x, w = leaf(1000), leaf(1000)
    y, _z = form(lambda x: (x.sin().exp(), (x * w).sin().exp()))(x * 1)
    assert [allocated(lambda: grad(y.sum(), x, retain_graph=True) and None)[1] for _ in range(3)] == [0] * 3


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("options", [{}, {"determinism_check": "values"}, {"debug": True}, {"early_stop": False}])
def test_what_a_rerun_leaves_behind_keeps_neither_frame_nor_values(options, observed):
    watching = Frames()
    left = Log()

    def function(x, scale):
        y = x.sin() * scale.sum()
        left.append(y)  # with the graph that the rerun made
        return y.exp().cos(), x.tan()

    x, scale = leaf(3), torch.ones(5)
    gone = weakref.ref(scale)
    with watching if observed else contextlib.nullcontext():
        y, unclaimed = checkpoint(function, x, scale, **options)
        del scale
        y.sum().backward()
    del y, unclaimed
    assert len(left) == 2
    assert watching.alive() == [False] * observed
    left.pop(0)  # of forward
    assert gone() is None
    with pytest.raises(CheckpointError, match=r"region '.*function': backward goes through a tensor that a recompute"):
        grad(left[0].sum(), x)


@pytest.mark.parametrize("failure", ["raises", "differs"])
def test_a_recompute_that_fails_keeps_nothing_by_what_it_leaves_behind(frames, failure):
    left, fail = Log(), Log([False])

    def function(x, scale):
        y = x.sin() * scale.sum()
        left.append(y)  # with the graph that the rerun made
        if fail[0]:
            if failure == "raises":
                raise KeyError
            y = y[:2]
        return y.exp().cos()

    x, scale = leaf(3), torch.ones(5)
    gone = weakref.ref(scale)
    y = checkpoint(function, x, scale).sum()
    fail[0] = True
    with contextlib.suppress(KeyError, CheckpointError):
        y.backward()
    del y, scale
    assert len(left) == 2
    left.pop(0)  # of forward
    assert frames.alive() == [False]
    assert gone() is None


class AddsUp(torch.nn.Module):
    """Adds what the loss does not use to an attribute."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x):
        y = x.sin()
        self.total += y.exp().sum()
        return y.cos()


@pytest.mark.parametrize(("where", "backward"), [("in the region", True), ("in the region", False), ("after it", False)])
def test_a_tensor_that_becomes_part_of_the_graph_is_not_held(frames, where, backward):
    module = AddsUp() if where == "in the region" else torch.nn.Module()
    if where == "after it":
        module.forward = lambda x: x.sin().exp() * module.total
    for _ in range(3):
        module.total = torch.ones(())
        y = checkpoint(module, leaf(3))
        if where == "after it":
            module.total += y.sum()
        if backward:
            y.sum().backward()
    del y, module.total
    assert frames.alive() == [False] * 3


@pytest.mark.parametrize("loss", ["of the last", "of each", "of inner results"])
def test_the_peak_of_a_step_is_as_under_torch(loss):
    """To the byte, with results in the loss that a block returns besides: Rule 4."""
    # Of which each tensor is larger than the state of a generator, which a rerun holds.
    layers, x, peaks = [nn.Linear(16, 16) for _ in range(4)], torch.randn(512, 16, requires_grad=True), []

    def block(layer, x):
        inner = layer(x).tanh().tanh()
        return x + inner.tanh().tanh(), inner

    def step(run, options):
        y, total = x, 0
        for layer in layers:
            y, inner = run(block, layer, y, preserve_rng_state=False, **options)
            total = total + {"of the last": 0, "of each": y.sum(), "of inner results": inner.sum()}[loss]
        grad(total + y.sum(), x)

    for run, options in ((checkpoint, {}), (theirs, {"use_reentrant": False})):
        step(run, options)
        peaks.append(peak_of(functools.partial(step, run, options)))
    assert peaks[0] == peaks[1]


def test_errors_keep_nothing():
    """Those of parameters that have changed, before a rerun and before a replay."""
    layer, w, keeping = torch.nn.Linear(3, 3, dtype=torch.float64), leaf(3), checkpoint(policy=[torch.ops.aten.sin.default])
    for region, change in (
        (lambda x: checkpoint(lambda x: (layer(x.sin())).exp(), x), lambda: layer.bias.detach().add_(1)),
        (lambda x: checkpoint(lambda x: (x.sin() + w).exp(), x), lambda: w.detach().add_(1)),
        (keeping(lambda x: (x.sin() + w).exp()), lambda: w.detach().add_(1)),
    ):
        h = leaf(3) * 1
        alive = weakref.ref(h)
        y = region(h)
        change()
        with pytest.raises(CheckpointError):
            y.sum().backward()
        del h, y
        assert alive() is None


def test_states_that_are_closed_over_keep_no_graphs(frames):
    """One forward after the other without a backward: each has noted the output of the one before, and not its graph."""
    x = leaf(3)
    state, pair = torch.zeros(3), (torch.zeros(3), torch.zeros(3))
    for _ in range(20):
        state = checkpoint(lambda y: block(y) + state.detach(), x)
        pair = checkpoint(lambda y: (block(y) + pair[0].detach(), block(y) * pair[1].detach()), x)
    assert sum(frames.alive()) == 2


class Averages(nn.Module):
    """Gives a tensor another storage in each forward, wherever that tensor is held."""

    def __init__(self, hold, get):
        super().__init__()
        self.query, self.get = nn.Parameter(torch.rand(6)), get
        hold(self, torch.rand(6))

    def forward(self, x):
        key = self.get(self)
        y = (x + key).sin()
        key.data = key.data * 0.75 + self.query.data * 0.25
        return (y + key).sin() * self.query


def closed_over(module, key):
    module.get = lambda _: key


HOLDERS = {
    "buffer": (lambda module, key: module.register_buffer("key", key), lambda module: module.key),
    "list": (lambda module, key: setattr(module, "keys", [key]), lambda module: module.keys[0]),
    "object": (lambda module, key: setattr(module, "keys", types.SimpleNamespace(key=key)), lambda module: module.keys.key),
    "closure": (closed_over, None),
}


def with_hooks_for_a_while(x):
    """Registers a hook, and takes it off again."""
    layer = nn.Tanh()
    handle = layer.register_forward_hook(lambda module, args, result: result * 2)
    try:
        return layer(x.sin()).exp()
    finally:
        handle.remove()


def applied(function, x):
    """Calls a module, which is a region from its first call on."""
    if not isinstance(function, nn.Module):
        return checkpoint(function, x)
    if "is_region" not in vars(function):
        apply_checkpointing(function, lambda _, module: module is function)
        function.is_region = True
    return function(x)


CALLS = {
    "region": checkpoint,
    "to the end": functools.partial(checkpoint, early_stop=False),
    "nested": lambda function, x: checkpoint(lambda x: checkpoint(function, x), x),
    "applied": applied,
}

STEPS = {
    **{name: lambda hold=hold, get=get: Averages(hold, get) for name, (hold, get) in HOLDERS.items()},
    "hooks for a while": lambda: with_hooks_for_a_while,
}


@pytest.mark.parametrize(("make", "call"), list(zip(STEPS, itertools.cycle(CALLS))))
def test_nothing_grows_over_300_steps(make, call):
    """Neither tensors that Python knows, nor other objects."""
    function, call = STEPS[make](), CALLS[call]

    def steps(count):
        for _ in range(count):
            x = torch.rand(6, requires_grad=True)
            call(function, x).sum().backward()

    def tensors():
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    steps(20)
    before, objects = tensors(), len(gc.get_objects())
    steps(300)
    assert tensors() == before
    assert len(gc.get_objects()) - objects < 50
