"""Regions on a model: ``checkpoint_module``, ``apply_checkpointing`` and ``remove_checkpointing``."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ckpt_hooks import (
    MutationError,
    apply_checkpointing,
    checkpoint_module,
    every,
    is_recomputing,
    policies,
    remove_checkpointing,
)
from tests.behaviours.runs import same
from tests.measure import CountOps, Frames, Log, as_library


class Block(nn.Module):
    """Has parameters, buffers, a counter and dropout, and takes a keyword."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.calls = 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return torch.dropout(self.norm(self.linear(x)).sin() * scale, 0.5, self.training)


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=2.0)
        return self.head(x)


@as_library
class Forwards:
    """Counts the runs of a module's forward, in forward and in recomputes."""

    def __init__(self, kind, monkeypatch):
        self.runs, self.reruns = 0, 0
        forward = kind.forward

        @functools.wraps(forward)
        def counting(module, *args, **kwargs):
            if is_recomputing():
                self.reruns += 1
            else:
                self.runs += 1
            return forward(module, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", counting)


def trained(model, steps=2):
    """Returns everything that two steps come to."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(steps):
        loss = model(torch.linspace(-1, 1, 12).view(3, 4)).pow(2).sum()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    counters = [module.calls for module in model.modules() if isinstance(module, Block)]
    return [*found, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state(), counters]


def all_same(one, other):
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def base():
    """A model, and what its training comes to without regions."""
    model = Net()
    return model, trained(copy.deepcopy(model))


KINDS = {
    "checkpoint": {},
    "policy": {"policy": policies.dots_saveable},
    "recorded": {"recorded": True},
    "recorded with policy": {"recorded": True, "policy": policies.dots_saveable},
}
kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


@kinds
def test_as_without_regions(base, options, monkeypatch):
    model, expected = base
    forwards = Forwards(Block, monkeypatch)
    applied = apply_checkpointing(model, Block, **options)
    assert len(applied) == 3
    assert all_same(trained(model), expected)
    assert forwards.runs == 6
    assert forwards.reruns == (0 if options else 6)


def _by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def _by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@kinds
@pytest.mark.parametrize("copied", [copy.deepcopy, _by_pickle, _by_torch])
def test_copies_are_checkpointed_by_themselves(base, options, copied, monkeypatch):
    """A copy calls its own parts, and lives on without the model copied."""
    model, expected = base
    apply_checkpointing(model, Block, **options)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    reference = weakref.ref(model.layers[0])
    del model, base
    regions = Frames()
    with regions:
        assert all_same(trained(twin), expected)
    assert len(regions.frames) == 6
    remove_checkpointing(twin)
    assert set(vars(twin.layers[0])) == set(vars(Block()))
    del reference


@kinds
def test_a_shallow_copy_runs_its_own_forward(options):
    """It shares parameters and submodules, and has attributes of its own; the first stays as it is."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), 1.0

        def forward(self, x):
            return (self.linear(x) * self.scale).sin()

    def gradients(module):
        twin = copy.copy(module)
        twin.scale = 3.0
        again = copy.copy(twin)
        again.linear = nn.Linear(4, 4)
        nn.init.ones_(again.linear.weight)
        nn.init.ones_(again.linear.bias)
        with Frames() as regions:
            return *(torch.autograd.grad(one(x).sum(), x)[0] for one in (module, twin, again)), len(regions.frames)

    torch.manual_seed(0)
    module, x = Scaled(), torch.ones(2, 4, requires_grad=True)
    *expected, _ = gradients(module)
    checkpoint_module(module, **options)
    *found, count = gradients(module)
    assert all(map(torch.equal, found, expected))
    assert count == 3
    twin = copy.copy(module)
    remove_checkpointing(module)
    assert "forward" in vars(twin)
    remove_checkpointing(twin)
    assert vars(twin).keys() == vars(module).keys() == vars(Scaled()).keys()


@pytest.mark.usefixtures("no_gc")
@kinds
def test_memory_goes_back_without_the_collector(options):
    """Neither a module nor a graph is in a cycle."""
    model = Net()
    applied = apply_checkpointing(model, Block, **options)
    loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    references = [weakref.ref(module) for module in model.modules()]
    forward = model.layers[0].forward
    del model, loss
    assert [reference() for reference in references] == [None] * len(references)
    with pytest.raises(ReferenceError, match="Keep the module, and call it"):
        forward(torch.ones(3, 4))
    applied.undo()


@kinds
def test_undo(base, options):
    model, _ = base
    before, names = dict(vars(model.layers[1])), [*model.state_dict(), *dict(model.named_modules())]
    with apply_checkpointing(model, Block, **options) as applied:
        assert [*model.state_dict(), *dict(model.named_modules())] == names
        loss = model(torch.ones(3, 4)).sum()
        assert "forward" in vars(model.layers[1])
    assert vars(model.layers[1]).keys() == before.keys()
    loss.backward()  # of a graph that has regions
    applied.undo()
    model.zero_grad()
    other = Net()
    other.load_state_dict(model.state_dict())
    regions = Frames()
    with regions:
        trained(model)
    assert regions.frames == []


def test_a_forward_of_the_instance(base):
    """Other libraries put a function in the instance, too, before and after: each calls the one that it found."""
    model, expected = base
    layer = model.layers[0]
    ran = Log()

    def other(found, name):
        def forward(*args, **kwargs):
            ran.append(name)
            return found(*args, **kwargs)

        return forward

    before = layer.forward = other(layer.forward, "before")
    applied = apply_checkpointing(model, Block)
    after = layer.forward = other(layer.forward, "after")
    assert all_same(trained(model), expected)
    assert ran == ["after", "before", "before"] * 2  # the former outside of the region
    assert copy.copy(layer).forward is after
    with pytest.warns(UserWarning, match=r"The forward of 'layers\.0', a Block, was replaced .* stays") as caught:
        remove_checkpointing(model)
    applied.undo()  # which says nothing again
    assert len(caught) == 1
    assert layer.forward is after
    ran.clear()
    regions = Frames()
    with regions:
        model(torch.ones(3, 4)).sum().backward()
    assert (regions.frames, ran) == ([], ["after", "before"])
    checkpoint_module(layer)
    remove_checkpointing(model)
    assert layer.forward is after
    checkpoint_module(layer)
    del layer.forward  # as the warning says: then there is nothing to say
    remove_checkpointing(model)
    assert "forward" not in vars(layer)
    layer.forward = before
    checkpoint_module(layer)
    remove_checkpointing(layer)
    assert layer.forward is before


def test_applied_twice(base):
    """The second is refused, and nothing is changed by it."""
    model, expected = base
    apply_checkpointing(model, "layers.2")
    match = r"'layers\.2' is checkpointed already\. Call `remove_checkpointing"
    with pytest.raises(ValueError, match=match):
        apply_checkpointing(model, Block)
    with pytest.raises(ValueError, match="'Block' is checkpointed already"):
        checkpoint_module(model.layers[2])
    with pytest.raises(ValueError, match="is checkpointed already"):
        checkpoint_module(copy.deepcopy(model).layers[2])
    assert "forward" not in vars(model.layers[0])
    assert all_same(trained(model), expected)


@kinds
def test_replicas_of_data_parallel(base, options):
    """DataParallel copies the attributes of each module; the copy runs the copy's own forward."""
    model, _ = base
    layer = model.layers[0]
    apply_checkpointing(model, Block, **options)
    replica = layer._replicate_for_data_parallel()
    with torch.no_grad():
        weight = torch.zeros(4, 4)
    replica.linear = nn.Linear(4, 4)
    with torch.no_grad():
        replica.linear.weight.copy_(weight)
        replica.linear.bias.zero_()
    replica.eval()
    regions = Frames()
    with regions:
        replica(torch.ones(3, 4)).sum().backward()
    assert len(regions.frames) == 1
    assert torch.count_nonzero(replica.linear.bias.grad) == 4
    assert layer.linear.bias.grad is None
    assert layer.forward.__self__ is layer
    remove_checkpointing(layer)
    assert layer._replicate_for_data_parallel().forward.__func__ is Block.forward


@pytest.mark.parametrize("bind", ["functional_call", "between", "frozen"])
def test_parameters_bound_anew(bind):
    """A rerun finds those of forward, whatever their versions; MAML takes a step so."""

    def program(apply):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))
        if apply:
            checkpoint_module(model[0])
            checkpoint_module(model[2])
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        given = {name: (value * 0.5).detach().requires_grad_() for name, value in model.named_parameters()}
        for value, old in zip(given.values(), model.parameters(), strict=True):
            while value._version < old._version:
                value.data.mul_(1)
                value.detach().mul_(1)
        if bind == "functional_call":
            first = torch.func.functional_call(model, given, (x,)).pow(2).sum()
            gradients = torch.autograd.grad(first, list(given.values()), create_graph=True)
            steps = zip(given.items(), gradients, strict=True)
            after = {name: value - 0.1 * gradient for (name, value), gradient in steps}
            loss = torch.func.functional_call(model, after, (x,)).pow(2).sum()
            return torch.autograd.grad(loss, list(given.values()))
        if bind == "frozen":
            model.requires_grad_(False)
        before = list(model.parameters())
        loss = model(x).pow(2).sum()
        model[0].weight, model[2].weight = (nn.Parameter(given[name]) for name in ("0.weight", "2.weight"))
        bound = list(model.parameters())
        gradients = torch.autograd.grad(loss, [x, *before] if bind == "between" else [x])
        assert all(one is other for one, other in zip(model.parameters(), bound, strict=True))
        return gradients

    assert all_same(program(True), program(False))


def test_a_frozen_parameter_that_is_gone():
    """Plain autograd would have kept it."""
    layer = checkpoint_module(nn.Linear(80, 80).requires_grad_(False))
    x = torch.ones(2, 80, requires_grad=True)
    y = layer(x.sin()).sum()
    layer.weight = nn.Parameter(torch.ones(80, 80), requires_grad=False)
    with pytest.raises(MutationError, match=r"'weight' of Linear.*is another tensor than .*: forward's tensor is gone\."):
        y.backward()


# What is selected


def tree():
    """A model with layers in two lists, of which one is inside a block."""
    block = nn.Module()
    block.attention, block.mlp = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Module()
    model.first = nn.ModuleList([nn.Linear(4, 4), copy.deepcopy(block), nn.Linear(4, 4), nn.ReLU()])
    model.second = nn.ModuleList([nn.ModuleList([nn.ReLU(), nn.ReLU()]), nn.Linear(4, 4), nn.Linear(4, 4)])
    return model


class Index:
    """An integer of another type, as NumPy has."""

    def __index__(self):
        return 1


SELECTIONS = [
    (nn.Linear, ["first.0", "first.1.attention", "first.1.mlp.0", "first.2", "second.1", "second.2"]),
    ((nn.Sequential, nn.Linear), ["first.0", "first.1.attention", "first.1.mlp", "first.2", "second.1", "second.2"]),
    ([nn.ReLU], ["first.1.mlp.1", "first.3", "second.0.0", "second.0.1"]),
    ("first.2", ["first.2"]),
    ("second.*.*", ["second.0.0", "second.0.1"]),
    ("**.mlp.**", ["first.1.mlp.0", "first.1.mlp.1"]),
    ("**.mlp", ["first.1.mlp"]),
    ("first.1.m*", ["first.1.mlp"]),
    (["first.1.mlp", "first.1.mlp.0"], ["first.1.mlp", "first.1.mlp.0"]),
    (lambda name, module: name.endswith(("mlp", "mlp.0")), ["first.1.mlp"]),
    (every(2, of=nn.Linear), ["first.0", "first.1.attention", "first.1.mlp.0", "second.1"]),
    (every(2, of="second.0.*"), ["second.0.0"]),
    (every(3, of=lambda name, _: name.startswith("second.0.")), ["second.0.0"]),
]


def two_lists():
    """A model with four layers in a list, and three in another."""
    model = nn.Module()
    model.first = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), nn.ReLU()])
    model.second = nn.ModuleList([nn.Sequential(nn.ModuleList([nn.ReLU()])), nn.Linear(4, 4), nn.Linear(4, 4)])
    return model


NUMBERS = [
    ([0], ["first.0", "second.0"]),
    ([3, -1], ["first.3", "second.2"]),  # ``second`` has three
    (range(1, 3), ["first.1", "first.2", "second.1", "second.2"]),
    (slice(-2, None), ["first.2", "first.3", "second.1", "second.2"]),
    (slice(3, 9), ["first.3"]),
    ([slice(0, None, 3), "first.1.1", -1], ["first.0", "first.1.1", "first.3", "second.0", "second.2"]),
    ({Index(): None, nn.ReLU: None}, ["first.1", "first.1.1", "first.3", "second.0.0.0", "second.1"]),
    ([nn.ReLU, "first.0"], ["first.0", "first.1.1", "first.3", "second.0.0.0"]),
    (every(2, of=[0, 1, 3]), ["first.0", "first.3", "second.0"]),
]


@pytest.mark.parametrize(("select", "names"), NUMBERS)
def test_numbers_of_layers(select, names):
    """Each list is counted by itself."""
    assert [region.name for region in apply_checkpointing(two_lists(), select)] == names


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
@pytest.mark.parametrize(
    ("select", "names"),
    [([0, -1], ["0", "3"]), (slice(1, 3), ["1", "2"]), (every(3), ["0", "3"]), ({range(2): None}, ["0", "1"])],
)
def test_numbers_of_entries(kind, select, names):
    """Of a model that is a list itself, not of lists in its entries."""
    layers = [nn.Linear(4, 4), nn.Sequential(nn.ModuleList([nn.ReLU()])), nn.Linear(4, 4), nn.ReLU()]
    model = kind(layers) if kind is nn.ModuleList else kind(*layers)
    assert [region.name for region in apply_checkpointing(model, select)] == names


def test_numbers_of_shared_layers():
    """A number is a place in the list, whatever name the layer has in the model."""
    model = nn.Module()
    model.last = nn.Linear(4, 4)
    shared = nn.ReLU()
    model.layers = nn.ModuleList([shared, nn.Tanh(), shared, model.last])
    assert [region.name for region in apply_checkpointing(model, [2, 3])] == ["last", "layers.0"]


def test_a_mapping_of_classes_and_numbers():
    """The first matching key decides; several classes select the outermost modules together."""
    policy = policies.dots_saveable
    products = [torch.ops.aten.addmm.default]
    applied = apply_checkpointing(
        two_lists(), {0: None, nn.Sequential: policy, "first.1.*": products, "first.2": "dots_saveable", nn.Linear: products}
    )
    assert {region.name: region.policy for region in applied} == {
        "first.0": None,
        "first.1": policy,
        "first.1.0": products,
        "first.1.1": products,
        "first.2": "dots_saveable",
        "second.0": None,
        "second.1": products,
        "second.2": products,
    }


@pytest.mark.parametrize(("select", "names"), SELECTIONS)
def test_selections(select, names):
    applied = apply_checkpointing(tree(), select)
    assert [region.name for region in applied] == names


def test_a_mapping_of_patterns():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    keep = policies.save_ops(torch.ops.aten.addmm.default)
    select = {"1": None, "": [torch.ops.aten.addmm.default], "**": [torch.ops.aten.addmm.default], "2.*": keep}
    applied = apply_checkpointing(model, select, recorded=True)
    assert repr(applied) == "<AppliedCheckpointing: 5 regions>"
    assert [(region.name, region.policy) for region in applied] == [
        ("", [torch.ops.aten.addmm.default]),
        ("0", [torch.ops.aten.addmm.default]),
        ("1", None),
        ("2", [torch.ops.aten.addmm.default]),
        ("2.0", [torch.ops.aten.addmm.default]),
    ]
    with CountOps() as ops:
        model(torch.ones(2, 4)).sum().backward()
    assert ops.counts["addmm"] == 3 + 1  # that of the region whose policy is None


def test_a_mapping_of_patterns_to_options():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(4)))
    x = torch.randn(2, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    options = {"recorded": True, "policy": policies.dots_saveable, "replay_whole": False}
    with apply_checkpointing(model, {"0": options, "1": {"policy": policies.dots_saveable}, "2": None}) as applied:
        assert [tuple(region)[2:] for region in applied] == [
            ("checkpoint_region", policies.dots_saveable),
            ("checkpoint", policies.dots_saveable),
            ("checkpoint", None),
        ]
        (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, plain)
    with apply_checkpointing(model, {"*": {"recorded": False}, "3": None}, recorded=True) as applied:
        assert {region.form for region in applied} == {"checkpoint"}


class Counted(nn.Module):
    """A layer that counts its calls, also those of reruns."""

    def __init__(self, calls):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), calls

    def forward(self, x):
        self.calls.append(1)
        return self.linear(x).sin()


@pytest.mark.parametrize(
    ("keep", "reruns", "headline"),
    [
        ({}, 16, "16 regions"),
        ({"keep_last": 1}, 15, "15 regions, layers.15 kept"),
        ({"keep_first": 2}, 14, "14 regions, layers.0-1 kept"),
        ({"keep_first": 1, "keep_last": 14}, 1, "1 region, layers.0,2-15 kept"),
    ],
)
@pytest.mark.parametrize("select", ["layers.*", Counted, every(1), {"layers.*": None}], ids=str)
def test_the_first_and_the_last_are_left_without_regions(select, keep, reruns, headline):
    calls = Log()
    model = nn.Module()
    model.layers = nn.ModuleList(Counted(calls) for _ in range(16))
    x = torch.randn(2, 4)
    run = functools.partial(functools.reduce, lambda x, layer: layer(x), model.layers)
    run(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    calls.clear()
    handle = apply_checkpointing(model, select, **keep)
    run(x).sum().backward()
    assert len(calls) == 16 + reruns
    assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))
    assert str(handle).splitlines()[0] == headline
    assert len(handle) == reruns
    assert sorted([*handle.kept, *(region.name for region in handle)]) == sorted(f"layers.{index}" for index in range(16))
    handle.undo()
    calls.clear()
    run(x).sum().backward()
    assert len(calls) == 16


def test_the_table():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh()))

    def decide(ctx, op, *args, **kwargs):
        return policies.CheckpointPolicy.PREFER_RECOMPUTE

    applied = apply_checkpointing(model, {"0": policies.dots_saveable, "1": decide, "1.*": None})
    assert str(applied).splitlines() == [
        "3 regions",
        "",
        " module  class       region      policy",
        " 0       Linear      checkpoint  dots_saveable",
        f" 1       Sequential  checkpoint  {decide.__qualname__}",
        " 1.0     Tanh        checkpoint",
    ]
    layers = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(12))})
    assert str(apply_checkpointing(layers, nn.Linear)).splitlines()[2:] == [
        "      module       class   region",
        " x12  layers.0-11  Linear  checkpoint",
    ]
    assert repr(apply_checkpointing(nn.Sequential(nn.Tanh()), nn.Tanh)) == "<AppliedCheckpointing: 1 region>"


# The model's own checkpointing


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "grad_checkpointing"])
@pytest.mark.parametrize("selected", [["layers.*"], ["layers.*.linear"], [""]], ids=["the layers", "inside", "around"])
@pytest.mark.parametrize("when", ["before", "later", "never"])
@pytest.mark.filterwarnings("error")
def test_the_models_own_checkpointing_is_warned_of_once(flag, selected, when):
    """Of two regions, one in the other, both recompute."""

    class OwnLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            setattr(self, flag, False)

        def forward(self, x):
            if getattr(self, flag) and self.training:
                return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)
            return self.linear(x)

    class OwnModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(OwnLayer(), OwnLayer())
            self.unrelated = nn.Linear(4, 4)

        def forward(self, x):
            return self.unrelated(self.layers(x))

    model, x = OwnModel(), torch.ones(2, 4)
    message = rf"is a region by apply_checkpointing, and .* {flag} of 'layers.0' is True. Both recompute"

    def switch_on():
        for layer in model.layers:
            setattr(layer, flag, True)

    if when == "before":
        switch_on()
        with pytest.warns(UserWarning, match=message):
            apply_checkpointing(model, selected)
    else:
        apply_checkpointing(model, selected)
        model(x).sum().backward()
        if when == "later":
            switch_on()
            model.eval()(x)
            with torch.no_grad():
                model.train()(x)
            with pytest.warns(UserWarning, match=message):
                model(x)
    model(x).sum().backward()


# Wrong calls


def test_a_coroutine_is_refused_when_it_runs():
    """A forward that hands on a coroutine is found out by its result."""

    async def later():
        return 3

    class Hides(nn.Module):
        def forward(self):
            return later()

    for recorded in (False, True):
        with pytest.raises(TypeError, match="returns a generator or coroutine"):
            checkpoint_module(Hides(), recorded=recorded)()
