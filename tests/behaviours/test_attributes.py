"""Attributes of modules: a rerun finds what forward found, and leaves what was there before it."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import ckpt_hooks
from tests.behaviours.runs import FORMS, Run, assert_as_eager, gradients
from tests.measure import leaf


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


KINDS = [BindsAnew, BuildsParts, Grows, HiddenWithHistory]


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
