"""Attributes of modules: a rerun finds what forward found, and leaves what was there before it."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import ckpt_hooks
from tests.behaviours.runs import FORMS, SILENT, Run, assert_as_eager, gradients, runs
from tests.measure import Log, leaf


class Mode(enum.Enum):
    """Two ways to do something."""

    SINE = enum.auto()
    COSINE = enum.auto()


class Stateful(nn.Module):
    """Does something with its input and its attributes, and changes these."""

    sizes = (4, 4, 4, 4, 4)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.begin()

    def begin(self):
        """Sets attributes."""

    def state(self):
        """Returns what is to be compared of them."""
        return [value for name, value in vars(self).items() if not name.startswith("_")]


class Counter(Stateful):
    """Counts its calls, and multiplies by that."""

    def begin(self):
        self.step = 0

    def forward(self, x):
        self.step += 1
        return (self.layer(x) * self.step).sin() * self.step


class CounterBelow(Stateful):
    """Has a counter in a submodule, and one in a module that is in a list."""

    def begin(self):
        self.inner, self.others = Counter(), [Counter()]

    def forward(self, x):
        return self.others[0](self.inner(x).cos())

    def state(self):
        return [self.inner.step, self.others[0].step]


class Warmup(Stateful):
    """Does something else in its first calls."""

    def begin(self):
        self.calls, self.mode, self.name = 0, Mode.SINE, "first"

    def forward(self, x):
        h = self.layer(x)
        y = (h * 0.5).sin() if self.mode is Mode.SINE else (h * 0.5).cos().exp()
        self.calls += 1
        if self.calls == 2:
            self.mode, self.name = Mode.COSINE, "later"
        return y if self.name == "first" else y * 2

    def state(self):
        return [self.calls, self.mode.name, self.name]


class Hidden(Stateful):
    """Carries a hidden state from call to call."""

    def begin(self):
        self.h = torch.zeros(3, dtype=torch.float64)

    def forward(self, x):
        self.h = (self.layer(x) + self.h.detach()).tanh()
        return self.h.sin()


class HiddenWithHistory(Hidden):
    """Carries a hidden state from call to call, gradients included."""

    def forward(self, x):
        self.h = (self.layer(x) * self.h).tanh() + self.h
        return self.h.sin()


class HiddenPair(Stateful):
    """Carries a pair of tensors."""

    def begin(self):
        self.pair = None

    def forward(self, x):
        h = self.layer(x)
        if self.pair is not None:
            h = h * self.pair[0] + self.pair[1]
        self.pair = (h.detach().sin(), h.detach().cos())
        return h.tanh()


class Averages(Stateful):
    """Keeps averages in a dict of its own."""

    def begin(self):
        self.averages = {"n": 0}

    def forward(self, x):
        h = self.layer(x)
        before = self.averages.get("mean", 0.0)
        self.averages["mean"] = 0.9 * before + 0.1 * h.detach().mean(0)
        self.averages["n"] += 1
        return (h * self.averages["mean"]).sin() * self.averages["n"]


class AveragesInPlace(Stateful):
    """Writes to tensors in containers in containers."""

    def begin(self):
        self.averages = {"all": [torch.zeros(3, dtype=torch.float64), (torch.ones(3, dtype=torch.float64),)]}

    def forward(self, x):
        h = self.layer(x)
        mean, (scale,) = self.averages["all"]
        mean.lerp_(h.detach().mean(0), 0.1)
        scale.mul_(1.1)
        return (h * scale.clone()).sin() - mean.clone()


class Grows(Stateful):
    """Appends to containers of each kind."""

    def begin(self):
        self.seen, self.recent, self.sizes, self.table = [], collections.deque(maxlen=2), set(), collections.defaultdict(list)

    def forward(self, x):
        h = self.layer(x)
        for one in self.seen:
            h = h * one
        self.seen.append(h.detach().mean(0))
        self.recent.append(len(self.seen))
        self.sizes.add(len(self.seen))
        self.table[len(self.sizes) % 2].append(len(self.recent))
        return (h.sin() * sum(self.recent)).cos() * len(self.table[0]) + max(self.sizes)

    def state(self):
        return [self.seen, list(self.recent), sorted(self.sizes), {key: list(value) for key, value in self.table.items()}]


class Shrinks(Stateful):
    """Takes out of containers, and binds other ones."""

    def begin(self):
        self.left, self.names = list(range(1, 20)), {"a": [1.0], "b": [2.0]}

    def forward(self, x):
        factor = self.left.pop()
        if "b" in self.names and factor % 2:
            del self.names["b"]
        self.names = {**self.names, str(factor): [float(factor)]}
        return (self.layer(x) * factor).sin() * sum(value[0] for value in self.names.values())


class ComesAndGoes(Stateful):
    """Adds an attribute, and deletes it."""

    def forward(self, x):
        h = self.layer(x)
        if hasattr(self, "scale"):
            h = h.sin() * self.scale
            del self.scale
        else:
            self.scale = h.detach().mean()
            self.flag = True
        return h.cos()


class Table(Stateful):
    """Builds a table for each size that it meets."""

    sizes = (4, 5, 4, 3, 5)

    def begin(self):
        self.tables = {}

    def forward(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x), dtype=torch.float64)[:, None].sin()
        return (self.layer(x) + self.tables[len(x)]).sin()


class AddsUp(Stateful):
    """Adds to an attribute in place, which has a history from then on."""

    def begin(self):
        self.total = torch.zeros((), dtype=torch.float64)

    def forward(self, x):
        h = self.layer(x).sin()
        self.total += h.square().mean()
        return h.exp()


class BuildsParts(Stateful):
    """Makes a part of itself in its first call, behind a flag, and draws random numbers for it and after it."""

    def begin(self):
        self.built = False

    def forward(self, x):
        if not self.built:
            self.part = nn.Linear(3, 3, dtype=torch.float64)
            self.built = True
        return torch.nn.functional.dropout(self.part(self.layer(x)).sin(), 0.5).exp()

    def state(self):
        return [self.built, *(parameter.detach() for parameter in self.part.parameters())]


class BindsAnew(Stateful):
    """Has two names for one list, and a table with a default; binds all to new ones."""

    def begin(self):
        self.one = self.other = [1.0]
        self.table = collections.defaultdict(list)

    def forward(self, x):
        self.one.append(2.0)
        self.table["one"].append(1.0)
        y = (self.layer(x) * sum(self.other)).sin() * len(self.table["one"])
        self.one = self.other = [self.one[-1] + len(self.one)]
        self.table = collections.defaultdict(list)
        return y


class OtherKey(Stateful):
    """Has the same value in a dict, under another key each time."""

    def begin(self):
        self.table = {"sine": 1.0}

    def forward(self, x):
        is_sine = "sine" in self.table
        self.table.clear()
        self.table["cosine" if is_sine else "sine"] = 1.0
        return self.layer(x).sin() if is_sine else self.layer(x).cos().exp()


class Remembers(Stateful):
    """Has objects in a list, of which there is no note."""

    def begin(self):
        self.seen = [Counter]

    def forward(self, x):
        self.seen.append(Counter)
        return (self.layer(x) * len(self.seen) * len(self.seen[0].sizes)).sin()

    def state(self):
        return [len(self.seen)]


class Swaps(Stateful):
    """Has one of two attributes, in turn."""

    def begin(self):
        self.first = 2.0

    def forward(self, x):
        if hasattr(self, "first"):
            del self.first
            self.second = 3.0
            return self.layer(x).sin()
        del self.second
        self.first = 2.0
        return self.layer(x).cos().exp()


KINDS = [
    AddsUp,
    Averages,
    AveragesInPlace,
    BindsAnew,
    BuildsParts,
    ComesAndGoes,
    Counter,
    CounterBelow,
    Grows,
    Hidden,
    HiddenPair,
    HiddenWithHistory,
    OtherKey,
    Remembers,
    Shrinks,
    Swaps,
    Table,
    Warmup,
]


def steps(kind, run, calls=2):
    """Trains for some steps, of several calls each, which share a backward."""
    module, found = kind(), []
    for size in kind.sizes:
        x = y = torch.randn(size, 3, dtype=torch.float64, requires_grad=True)
        for _ in range(calls):
            y = run(module, y)
        found += [gradients(y, x, *module.layer.parameters()), *module.state()]
        for name, value in list(vars(module).items()):  # a history ends with its step
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(module, name, value.detach())
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_attributes_are_what_forward_found(kind, form):
    assert_as_eager(functools.partial(steps, kind), Run("ours", form))


@pytest.mark.parametrize("kind", [Averages, Counter, Hidden])
def test_torch_does_not_rewind_attributes(kind):
    with pytest.raises((AssertionError, RuntimeError)):
        assert_as_eager(functools.partial(steps, kind), Run("torch"))


@pytest.mark.parametrize(
    "options", [{"policy": [torch.ops.aten.addmm.default]}, {"debug": True}, {"determinism_check": "values"}]
)
@pytest.mark.parametrize("kind", [Counter, Grows, HiddenPair])
def test_attributes_with_options(kind, options):
    run = Run("ours")

    def region(function, *args):
        return ckpt_hooks.checkpoint(**options)(function)(*args)

    run._region = region
    assert_as_eager(functools.partial(steps, kind), run)


@pytest.mark.parametrize("kind", [Counter, Grows, Averages, HiddenWithHistory])
def test_attributes_in_a_second_backward(kind):
    """Each rerun finds the same, however many there are, and leaves no trace."""

    def program(run):
        module, x = kind(), leaf(2, 3)
        y = run(module, x)
        state = [*module.state()]
        found = [torch.autograd.grad(y.sum(), [x, *module.layer.parameters()], retain_graph=True) for _ in range(3)]
        return found, state, module.state()

    assert_as_eager(program, Run("ours"))


class Drops(nn.Module):
    """Depends on whether it is training in three ways."""

    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x):
        return self.norm(self.drop(x)).sin() * (2.0 if self.training else 1.0)


@pytest.mark.parametrize("first", [True, False])
@runs(*FORMS, torch_fails=(SILENT, RuntimeError))
def test_train_and_eval_before_backward(run, first):
    """Of the whole module, and of one below; in the end each is as the caller has left it."""

    def program(run):
        module, found = Drops(), []
        for below in (False, True):
            module.train(first)
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            y = run(module, x)
            (module.drop if below else module).train(not first)
            found += [gradients(y, x), [one.training for one in module.modules()], module.norm.running_mean.clone()]
        return found

    assert_as_eager(program, run)


CHANGES = {
    "number": lambda module: setattr(module, "number", 7.0),
    "other kind": lambda module: setattr(module, "number", [7.0]),
    "flag": lambda module: setattr(module, "flag", not module.flag),
    "tensor": lambda module: setattr(module, "scale", torch.zeros(3, dtype=torch.float64)),
    "leaf that requires grad": lambda module: setattr(module, "weight", 0.5),
    "list entry": lambda module: module.entries.__setitem__(0, 9.0),
    "list appended": lambda module: module.entries.append(9.0),
    "list replaced": lambda module: setattr(module, "entries", [9.0]),
    "dict cleared": lambda module: module.table.clear(),
    "buffer replaced": lambda module: setattr(module, "mask", torch.zeros(3, dtype=torch.float64)),
    "hyperparameter": lambda module: setattr(module.drop, "p", 0.9),
    "deleted": lambda module: delattr(module, "number"),
}


class Configured(nn.Module):
    """Reads attributes of each kind."""

    def __init__(self):
        super().__init__()
        self.number, self.flag, self.scale = 2.0, True, torch.full((3,), 0.5, dtype=torch.float64)
        self.entries, self.table, self.drop = [1.0, 2.0], {"a": {"b": 3.0}}, nn.Dropout(0.5)
        self.weight = torch.full((3,), 1.5, dtype=torch.float64, requires_grad=True)
        self.register_buffer("mask", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        h = (x * self.number * self.scale * self.mask).sin() * sum(self.entries)
        (h * self.weight).sin()  # whose graph is gone before backward, and the leaf with it
        return self.drop(h.cos() if self.flag else h.exp()) * self.table["a"]["b"]


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("form", ["region", "nested"])
def test_what_the_caller_changes_before_backward(form, change):
    """A rerun finds what forward found, and leaves what the caller has set."""

    def program(run):
        module, x = nn.Sequential(Configured()), leaf(4, 3)
        y = run(module, x)
        CHANGES[change](module[0])
        found = gradients(y, x)
        state = [value for name, value in vars(module[0]).items() if not name.startswith("_")]
        return found, state, module[0].drop.p, module[0].mask, gradients(run(module, x), x) if change != "deleted" else 0

    def skipping_errors(run):
        with contextlib.suppress(TypeError, KeyError):  # of the second forward, which the caller has broken
            return program(run)
        return None

    assert_as_eager(skipping_errors, Run("ours", form))


@runs(*FORMS)
def test_a_gradient_inside_forward_by_what_an_attribute_was(run):
    """A tensor with a history that an attribute holds is the same one in a rerun, if it is there and nobody wrote to it."""

    class Sensitivity(Hidden):
        def forward(self, x):
            y = (x * self.h).exp()
            return torch.autograd.grad(y.sum(), before, create_graph=True)[0].sin() * x

    def program(run):
        nonlocal before
        module, x = Sensitivity(), leaf(2, 3)
        module.h = before = x.cos()
        return gradients(run(module, x), x)

    before = None
    assert_as_eager(program, run)


def test_containers_keep_their_identity():
    """Also for those who hold them besides, in the rerun as well as after it."""
    module, x = Grows(), leaf(2, 3)
    seen, table, lengths = module.seen, module.table, Log()
    module.layer.register_forward_hook(lambda *_: lengths.append((len(seen), module.seen is seen)))
    y = ckpt_hooks.checkpoint(module, x)
    y.sum().backward()
    assert lengths == [(0, True), (0, True)]
    assert module.seen is seen
    assert module.table is table
    assert len(seen) == 1


def test_an_attribute_that_the_caller_has_removed_is_not_there_after_a_rerun_that_sets_it():
    class Sets(nn.Module):
        def forward(self, x):
            self.extra, self.kind = 2.0, Mode
            return (x * self.extra).sin()

    module = Sets()
    y = ckpt_hooks.checkpoint(module, leaf(3))
    del module.extra, module.kind
    y.sum().backward()
    assert not hasattr(module, "extra")
    assert not hasattr(module, "kind")


def test_attributes_after_a_failed_rerun():
    """They are what they were before it."""

    class Fails(Counter):
        def forward(self, x):
            y = super().forward(x)
            if failing[0]:
                raise ValueError("not now")
            return y.exp()

    failing, module, x = Log([False]), Fails(), leaf(2, 3)
    y = ckpt_hooks.checkpoint(module, x)
    failing[0] = True
    with pytest.raises(ValueError, match="not now"):
        y.sum().backward()
    assert module.step == 1
    failing[0] = False
    y.sum().backward()
    assert module.step == 1


def test_objects_of_users_count_once():
    """And are the same objects in a rerun."""

    class Log:
        def __init__(self):
            self.calls = 0

    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = Log()

        def forward(self, x):
            self.log.calls += 1
            return x.sin().exp()

    module = Logs()
    log = module.log
    ckpt_hooks.checkpoint(module, leaf(3)).sum().backward()
    assert log.calls == 1
    assert module.log is log


def test_a_backward_inside_forward_finds_attributes_as_they_were():
    """And the rest of forward finds them as it left them."""

    class Twice(Stateful):
        def begin(self):
            self.step = 0

        def forward(self, x):
            self.step += 1
            y = (self.layer(x) * self.step).sin()
            (g,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
            self.step += 10
            return y * g * self.step

    def program(run):
        module, x = Twice(), leaf(2, 3)
        y = run(module, x)
        return gradients(y, x, *module.layer.parameters()), module.step

    assert_as_eager(program, Run("ours"))
    assert_as_eager(program, Run("ours", "nested"))


@runs("region", "nested", torch_fails=SILENT)
def test_attributes_that_a_hook_sets_before_forward(run):
    """A region around ``forward`` alone, of a module whose hook computes its weight, and which is called twice."""

    def program(run):
        layer = nn.utils.spectral_norm(nn.Linear(3, 3, dtype=torch.float64))
        forward = layer.forward
        layer.forward = lambda x: run(forward, x)
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        return gradients(layer(layer(x).sin()).tanh(), x, layer.weight_orig, layer.bias)

    assert_as_eager(program, run)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("in_list", [False, True])
def test_old_tensors_with_a_history_are_one_at_most(in_list):
    """Forwards without a backward, each of which binds its output: of those before, one has its memory, and none its graph."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = None

        def forward(self, x):
            y = x.sin().exp()
            self.last = [y] if in_list else y
            return y * 1

    module, graphs = Last(), []
    for _ in range(20):
        x = torch.ones(100_000, requires_grad=True)
        graphs.append(weakref.ref(x))
        ckpt_hooks.checkpoint(module, x)
        del x
    assert sum(reference() is not None for reference in graphs) == 1
    storages = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (100_000,)}
    module.last = None
    ckpt_hooks.checkpoint(module, torch.ones(3, requires_grad=True))
    left = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (100_000,)}
    assert len(storages) <= 3  # the argument, the latest output, and the one before
    assert left == set()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("kind", [list, dict])
def test_a_container_that_gets_the_output_is_no_cycle(kind):
    """Nor one that the module has no more."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.outputs = kind()

        def forward(self, x):
            y = x.sin().exp()
            if kind is list:
                self.outputs.append(y)
            else:
                self.outputs[len(self.outputs)] = y
            return y

    module, alive = Keeps(), []
    for _ in range(3):
        x = torch.ones(3, requires_grad=True)
        alive.append(weakref.ref(x))
        ckpt_hooks.checkpoint(module, x * 1)
        del x
        module.outputs = kind()
    assert [reference() for reference in alive] == [None] * 3


def test_a_large_tensor_with_a_history_that_forward_writes_to_is_an_error():
    """It cannot be put back, and nothing is copied for the case that it may be."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(100_000)

        def forward(self, x):
            self.total += x.sin()
            return (x * 2).exp()

    module, x = Sums(), torch.ones(100_000, requires_grad=True)
    first, second = ckpt_hooks.checkpoint(module, x), ckpt_hooks.checkpoint(module, x)
    with pytest.raises(ckpt_hooks.MutationError, match="Sums"):
        second.sum().backward()
    first.sum().backward()
