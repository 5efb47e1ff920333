"""Rule 9: who keeps what alive, and until when. The garbage collector is off in all of these."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_hooks import CheckpointError, GraphExecGroup, apply_checkpointing, checkpoint, trace
from tests.measure import Frames, Log, leaf

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


def test_a_frame_lives_as_long_as_its_graph(frames):
    x = leaf(3)
    y = checkpoint(block, x).sum()
    y.backward(retain_graph=True)
    assert frames.alive() == [True]
    assert frames.values_alive() == 0
    del y
    assert frames.alive() == [False]


def test_a_discarded_output_takes_its_frame_along(frames):
    x = leaf(3)
    checkpoint(block, x)
    assert frames.alive() == [False]


def test_a_region_that_saves_nothing_has_no_frame_afterwards(frames):
    x = leaf(3)
    y = checkpoint(lambda x: x + 1, x)
    assert frames.alive() == [False]
    y.sum().backward()


def test_the_input_of_a_region_dies_with_it():
    x = leaf(3)
    h = x * 2
    memory = StorageWeakRef(h.untyped_storage())
    y = checkpoint(block, h).sum()
    del h
    assert not memory.expired()
    y.backward()
    assert memory.expired()


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


def test_an_exception_in_recompute_keeps_nothing(frames):
    x = leaf(3)
    fail, made = Log([False]), Log()

    def function(x):
        y = x.sin()
        made.append(weakref.ref(y))
        if fail[0]:
            raise KeyError
        return y.exp()

    y = checkpoint(function, x).sum()
    fail[0] = True
    with contextlib.suppress(KeyError):
        y.backward(retain_graph=True)
    assert [r() for r in made] == [None, None]
    assert frames.alive() == [True]
    del y
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


def two(made):
    """Returns a function of two outputs, which notes the memory of a tensor that backward reads of the second one alone."""

    def function(x):
        a, b = x.sin().exp(), x.cos()
        made.append(StorageWeakRef(b.untyped_storage()))
        return a, b.sin()

    return function


def test_unclaimed_values_are_dropped_when_backward_ends():
    """A partial backward under retain_graph, repeated, piles nothing up."""
    x, made = leaf(3), Log()
    a, b = checkpoint(two(made), x)
    for _ in range(3):
        grad(a.sum(), x, retain_graph=True)
    assert [memory.expired() for memory in made] == [True] * 4
    del b


def test_unclaimed_values_are_dropped_when_backward_fails():
    """The same where the backward does not reach its end."""
    x, made, held = leaf(3), Log(), []
    a, b = checkpoint(two(made), x)

    def fail(g):
        held.append(made[-1].expired())
        raise KeyError

    x.register_hook(fail)
    with contextlib.suppress(KeyError):
        a.sum().backward(retain_graph=True)
    assert held == [False]
    assert [memory.expired() for memory in made] == [True] * 2
    del b


def test_unclaimed_values_of_a_group_die_with_the_group():
    """A group keeps what its later backwards may need, and no longer than itself."""
    x, made = leaf(3), Log()
    a, b = checkpoint(two(made), x)
    group = GraphExecGroup()
    with group:
        grad(a.sum(), x, retain_graph=True)
    assert [memory.expired() for memory in made] == [True, False]
    del group
    assert [memory.expired() for memory in made] == [True] * 2
    del b


def test_nested_frames_die(frames):
    x = leaf(3)
    y = checkpoint(lambda x: checkpoint(lambda x: checkpoint(block, x.sin()).sin(), x).exp(), x).sum()
    y.backward(retain_graph=True)
    # Three of forward; the outer rerun makes two more, the middle one another.
    assert frames.alive() == [True] * 3 + [False] * 3
    del y
    assert not any(frames.alive())


def test_higher_derivatives_free_everything(frames):
    x = leaf(3)
    y = checkpoint(lambda x: checkpoint(block, x).sin(), x).sum()
    (g,) = grad(y, x, create_graph=True)
    (h,) = grad(g.sum(), x, create_graph=True)
    del y, g, h
    assert not any(frames.alive())


def test_a_cycle_through_python_does_not_keep_the_frame(frames):
    """A function that refers to itself, as bound methods of modules do, is no part of the graph."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.me = [self]

        def forward(self, x):
            return block(x)

    x = leaf(3)
    y = checkpoint(Module(), x).sum()
    y.backward()
    assert frames.alive() == [False]


@pytest.mark.slow
def test_memory_of_2000_regions_comes_back():
    """2,000 regions in a row, one backward: no recursion limit is met, and every Python object and tensor is gone."""

    def run(steps):
        x = torch.ones(4, 4, requires_grad=True)
        y = x
        for _ in range(steps):
            y = checkpoint(torch.sin, y)
        y.sum().backward()
        return x.grad

    run(2000)  # fills the interpreter's free lists
    before = sys.getallocatedblocks()
    gradient = run(2000)
    assert abs(sys.getallocatedblocks() - before) < 50
    x = torch.ones(4, 4, requires_grad=True)
    y = x
    for _ in range(2000):
        y = y.sin()
    y.sum().backward()
    assert torch.equal(gradient, x.grad)


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
    assert not any(frames.alive())


def test_a_frame_whose_forward_failed_in_a_context_of_its_own_is_closed(frames):
    """A context_fn whose first context fails to enter leaves no hooks behind."""

    class Broken(contextlib.AbstractContextManager):
        def __enter__(self):
            raise KeyError

        def __exit__(self, *exc_info):
            raise AssertionError

    x = leaf(3)
    with pytest.raises(KeyError):
        checkpoint(block, x, context_fn=lambda: (Broken(), contextlib.nullcontext()))
    assert frames.alive() == [False]
    y = x.sin()
    assert torch.equal(y.grad_fn._saved_self, x)


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


@pytest.mark.usefixtures("no_gc")
def test_what_a_rerun_leaves_behind_keeps_its_own_memory_alone():
    left = Log()

    def function(x):
        h = x.sin().exp()
        left.append(h.sum())
        return (h * 2).cos().tan()

    def alive():
        return sum(type(one) is torch.Tensor and one.numel() == 1013 for one in gc.get_objects())

    x = leaf(1013)
    before = alive()
    for _ in range(3):
        checkpoint(function, x).sum().backward()
    x.grad = None
    assert len(left) == 6
    left[:] = left[1::2]  # without those of forward
    assert alive() == before


COLLECTED = contextvars.ContextVar("COLLECTED")


@pytest.mark.parametrize("form", ["region", "nested"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_collectors_in_context_variables_get_what_forward_made(form, early_stop):
    """As Transformers collects hidden states and attentions. Backward may run outside of forward's context."""

    def layer(x):
        found = COLLECTED.get()
        y = x.sin()
        found["states"].append(y)
        found["last"] = y
        found.setdefault("kept", set()).add(len(found["states"]))
        return y.exp().cos()

    def run(x):
        if form == "nested":
            return checkpoint(lambda x: checkpoint(layer, x, early_stop=early_stop), x, early_stop=early_stop)
        return checkpoint(layer, x, early_stop=early_stop)

    def forward(x):
        found = {"states": []}
        COLLECTED.set(found)
        return run(run(x)), found

    x = leaf(3)
    y, found = contextvars.copy_context().run(forward, x)
    states, last, kept = list(found["states"]), found["last"], set(found["kept"])
    for _ in range(2):
        (y.sum() + sum(state.sum() for state in states)).backward(retain_graph=True)
        assert list(map(id, found["states"])) == list(map(id, states))
        assert found["last"] is last
        assert found["kept"] == kept == {1, 2}
    h = x.detach().requires_grad_()
    a = h.sin()
    b = a.exp().cos().sin()
    (2 * (b.exp().cos().sum() + a.sum() + b.sum())).backward()
    assert torch.equal(x.grad, h.grad)


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
    assert not any(frames.alive())


def test_an_attribute_that_is_gone_is_there_again_for_a_rerun():
    class Running(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = torch.ones(3)

        def forward(self, x):
            self.mean = self.mean * 0.5 + x.detach().mean() * 0.5
            return (x * self.mean).sin()

    plain, module = Running(), Running()
    x = leaf(3)
    for _ in range(4):
        expected = grad(plain(x).sum(), x)[0]
        y = checkpoint(module, x).sum()
        gone = weakref.ref(module.mean)
        checkpoint(module, x)  # by which the tensor before is gone
        plain(x)
        assert gone() is None
        assert torch.equal(grad(y, x)[0], expected)
        assert torch.equal(module.mean, plain.mean)


@pytest.mark.parametrize("held", [[None], types.SimpleNamespace(last=None)])
def test_outputs_within_reach_of_the_next_region_are_no_chain(held):
    """No backward in between: the graph of one region does not hold the one before."""

    def function(x):
        return (x * (held is not None)).sin().exp()

    alive = []
    for _ in range(4):
        y = checkpoint(function, leaf(3))
        if isinstance(held, list):
            held[0] = y
        else:
            held.last = y
        alive.append(weakref.ref(y))
    assert [one() is not None for one in alive] == [False, False, False, True]


def test_copies_of_tensors_that_no_module_owns_go_with_their_frames():
    def alive():
        return sum(type(one) is torch.Tensor and one.numel() == 1019 for one in gc.get_objects())

    before, data = alive(), [torch.ones(1019) for _ in range(3)]
    for batch in data:
        checkpoint(lambda x, batch=batch: (x * batch.sum()).sin(), leaf(3)).sum().backward()
    assert alive() == before + 3


def test_an_exception_on_the_way_out_of_a_context_is_in_no_cycle(frames):
    class Fails(contextlib.AbstractContextManager):
        def __exit__(self, *exc_info):
            raise KeyError

    with contextlib.suppress(KeyError):
        checkpoint(block, leaf(3), debug=True, context_fn=lambda: (Fails(), Fails()))
    assert frames.alive() == [False]


def test_what_a_region_around_brings_back_for_a_policy_goes_when_the_recompute_ends():
    made, inner = Log(), checkpoint(policy=[torch.ops.aten.exp.default])

    def several(x):
        a, b = x.sin().exp(), x.cos().exp()
        made.extend(StorageWeakRef(one.untyped_storage()) for one in (a, b))
        return a.cos(), b.sin()

    y, z = checkpoint(lambda x: inner(several)(x * 2), leaf(3))
    del z
    y.sum().backward(retain_graph=True)
    assert len(made) > 2
    assert all(memory.expired() for memory in made)


def test_what_a_policy_keeps_goes_with_the_backward():
    x, w, gone = leaf(4, 4), leaf(4, 4), []

    def function(x):
        h = x @ w
        gone.append(StorageWeakRef(h.untyped_storage()))
        return h.sin().exp()

    y = checkpoint(policy=[torch.ops.aten.mm.default])(function)(x).sum()
    assert not gone[0].expired()
    y.backward()
    assert gone[0].expired()
    del y


def test_values_from_a_fingerprint_go_with_the_frame():
    w, v, fingerprints = leaf(3), leaf(3), []

    def fingerprint(tensor):
        fingerprints.append(weakref.ref(copy := tensor.clone()))
        return copy

    y, z = checkpoint(lambda x: (x.sin().exp(), w * v), leaf(3), determinism_check=fingerprint)
    del y
    assert [one() for one in fingerprints] == [None] * len(fingerprints)
    assert z.requires_grad


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


def test_a_variable_that_is_bound_to_the_output_keeps_nothing_after_backward(frames):
    x, gone = leaf(3), []
    h = x
    for number in range(3):
        skip = h * 2
        gone.append(weakref.ref(skip))
        h = checkpoint(lambda: block(h) * number + skip.sin())  # noqa: F821 -- it is there when it is called
    del skip
    h.sum().backward()
    assert frames.alive() == [False] * 3
    assert [reference() for reference in gone] == [None] * 3


def test_a_rerun_leaves_nothing_of_a_variable_behind(frames):
    x, scale = leaf(3), torch.ones(3)
    y = checkpoint(lambda y: block(y * scale), x).sum()
    gone = weakref.ref(scale)
    scale = 2.0
    y.backward()
    assert gone() is None
    assert scale == 2.0


WRITES = {
    "add": lambda h, y: h.add_(y),
    "copy": lambda h, y: h.copy_(y),
    "to a view": lambda h, y: h[1:].add_(y[1:]),
}


@pytest.mark.parametrize("backward", [None, "fails"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("made", [lambda x: x * 2, lambda x: (x * 2).view(3, 1).squeeze()], ids=["result", "view"])
@pytest.mark.parametrize("levels", [1, 2])
def test_what_a_region_returns_written_to_its_argument_is_no_cycle(made, write, backward, levels):
    """The argument's history leads to the region then, which must not hold the argument's history."""

    def function(h, left=levels - 1):
        return checkpoint(function, h, left - 1) if left else block(h)

    h = made(leaf(3))
    memory = StorageWeakRef(h.untyped_storage())
    write(h, checkpoint(function, h))
    if backward == "fails":
        with pytest.raises(CheckpointError, match="modified by an inplace operation"):
            h.sum().backward()
    del h
    assert memory.expired()


@pytest.mark.slow
def test_what_is_known_of_code_and_of_classes_that_are_made_anew_keeps_few_of_them():
    """A program may define functions and classes in a loop."""
    x, source, gone = leaf(3), "lambda x: (x, held)[0]", []
    for number in range(10_002):
        kind = type("Made", (), {})
        function = eval(compile(source, "made", "eval"), {"held": kind()})
        checkpoint(function, x)
        if number == 0:
            gone += [weakref.ref(kind), weakref.ref(function.__code__)]
    del kind, function
    gc.collect()
    assert [one() for one in gone] == [None, None]


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
    "frozen parameter": (
        lambda module, key: module.register_parameter("key", nn.Parameter(key, requires_grad=False)),
        lambda module: module.key,
    ),
    "attribute": (lambda module, key: setattr(module, "key", key), lambda module: module.key),
    "list": (lambda module, key: setattr(module, "keys", [key]), lambda module: module.keys[0]),
    "tuple": (lambda module, key: setattr(module, "keys", (key,)), lambda module: module.keys[0]),
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


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_nothing_grows_over_300_steps(make, call):
    """Neither tensors that Python knows, nor other objects."""
    function = make()

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
