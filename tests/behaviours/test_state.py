"""State and side effects: buffers are written once, and code that must not run twice can tell."""

from __future__ import annotations

import functools
import threading
import types
import weakref

import pytest
import torch
from torch import nn

import ckpt_hooks
from tests.behaviours.runs import FORMS, SILENT, UNNOTICED, Run, assert_as_eager, gradients, runs, same
from tests.measure import leaf

# Buffers


class Rebound(nn.Module):
    """Tracks a mean in a buffer that each forward replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (x - self.mean).sin()


class Amax(nn.Module):
    """Scales by a history of largest values, as FP8 layers do, written in place or replaced."""

    def __init__(self, *, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("history", torch.ones(4, dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        scale = 1 / self.history.max()
        newest = x.detach().abs().max()
        if self.in_place:
            self.history.copy_(self.history.roll(1))
            self.history[0] = newest
            self.scale.copy_(scale)
        else:
            self.history = torch.cat([newest[None], self.history[:-1]])
            self.scale = scale
        return (x * scale).sin()


def batch_norm(**options):
    return nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64, **options), nn.Tanh())


def spectral_norm():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3, dtype=torch.float64)), nn.Tanh())


def spectral_norm_parametrization():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3, dtype=torch.float64)), nn.Tanh())


def fake_quantize(name):
    quantization = pytest.importorskip("torch.ao.quantization")
    kind = getattr(quantization, name)
    observed = kind(observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return nn.Sequential(nn.Linear(3, 3), observed, nn.Tanh())


BUFFERED = {
    "BatchNorm": batch_norm,
    "BatchNorm, cumulative": functools.partial(batch_norm, momentum=None),
    "rebound": Rebound,
    "spectral_norm": spectral_norm,
    "spectral_norm parametrization": spectral_norm_parametrization,
    "FakeQuantize": functools.partial(fake_quantize, "FakeQuantize"),
    "FusedMovingAvgObsFakeQuantize": functools.partial(fake_quantize, "FusedMovingAvgObsFakeQuantize"),
    "FP8 amax in place": functools.partial(Amax, in_place=True),
    "FP8 amax rebound": functools.partial(Amax, in_place=False),
}


def make(kind):
    """Returns a module whose buffers have been written before."""
    module = BUFFERED[kind]()
    module(3 * data(module))
    return module


def data(module):
    dtype = next((p.dtype for p in module.parameters()), torch.float64)
    return torch.randn(4, 3, dtype=dtype, requires_grad=True)


def results(y, x, module):
    """Returns gradients and buffers after a backward, and whether the buffers are the objects that forward left there."""
    before = dict(module.named_buffers())
    found = gradients(y, x, *module.parameters())
    after = dict(module.named_buffers())
    return found, after, [after[name] is before[name] for name in before]


@pytest.mark.parametrize("kind", list(BUFFERED))
@runs(*FORMS, torch_fails=SILENT)
def test_buffers_are_updated_once(run, kind):
    def program(run):
        module = make(kind)
        x = data(module)
        return results(run(module, x), x, module)

    assert_as_eager(program, run)


@pytest.mark.parametrize("kind", list(BUFFERED))
@runs("region", "nested", torch_fails=SILENT)
def test_buffers_of_a_module_that_two_regions_share(run, kind):
    """Each rerun sees the buffers as they were before its forward; in the end they are what the last forward left."""

    def program(run):
        module = make(kind)
        x = data(module)
        return results(run(module, run(module, x)), x, module)

    assert_as_eager(program, run)


class Codes(nn.Module):
    """Keeps averages in a parameter without gradients, as the codes of a quantiser or a momentum teacher."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        h = self.layer(x)
        y = (h + self.codes).sin()
        new = 0.9 * self.codes.detach() + 0.1 * h.detach().mean(0)
        if self.way == "copy":
            self.codes.copy_(new)
        elif self.way == "data":
            self.codes.data.copy_(new)
        else:
            self.codes = nn.Parameter(new, requires_grad=False)
        return (y + self.codes).exp()


@runs(*FORMS, torch_fails=(SILENT, RuntimeError))
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("way", ["copy", "data", "rebound"])
def test_parameters_without_gradients_that_forward_updates(run, way, calls):
    """In each of several steps, and read before that as well as after it."""

    def program(run):
        module, found = Codes(way), []
        for _ in range(6):
            x = y = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            for _ in range(calls):
                y = run(module, y)
            found += [gradients(y, x, *module.layer.parameters()), module.codes.clone()]
        return found

    assert_as_eager(program, run)


@runs("region", torch_fails=SILENT)
@pytest.mark.parametrize("kind", [functools.partial(Codes, "copy"), Rebound])
def test_state_in_regions_in_regions(run, kind):
    """So many that each sees the module before the first of them has ended, and backward inside forward runs some again."""

    def program(run):
        module, found = kind(), []

        def level(depth, x):
            y = (x * 2).sin()
            z = module(y) if depth == 0 else run(level, depth - 1, y)
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return z + g

        for _ in range(3):
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            found += [gradients(run(level, 5, x), x), *(t.detach().clone() for t in module.state_dict().values())]
        return found

    assert_as_eager(program, run)


@runs("region", "nested", torch_fails=SILENT)
@pytest.mark.parametrize("where", ["module", "submodule"])
def test_an_average_that_begins_as_a_number(run, where):
    """``self.mean = 0.0``, and a tensor from the first forward on."""

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = 0.0

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()
            return (x * self.mean).sin()

    def program(run):
        average = Averaged()
        module = average if where == "module" else nn.Sequential(nn.Tanh(), average)
        found = []
        for _ in range(6):
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            found += [gradients(run(module, x), x), average.mean.clone()]
        return found

    assert_as_eager(program, run)


class Guarded(nn.Module):
    """Keeps tensors that numbers and flags beside them tell how to use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.ready, self.size, self.table, self.recent = False, None, None, []

    def forward(self, x):
        with torch.no_grad():
            scale = self.scale_of(x)
        return (x * scale).sin()


class FromFirstBatch(Guarded):
    """Takes the mean of its first batch, and then again and again a part of it."""

    def scale_of(self, x):
        if not self.ready:
            self.mean.copy_(x.mean(0))
        else:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.ready = True
        return 1 + self.mean.clone()


class FromFirstBatchRebound(Guarded):
    """Takes the mean of its first batch by binding another buffer."""

    def scale_of(self, x):
        if not self.ready:
            self.mean, self.ready = x.mean(0), True
        return 1 + self.mean


class Rotary(Guarded):
    """Makes other frequencies for a sequence longer than all before, as the dynamic form of rotary embeddings does."""

    def scale_of(self, x):
        if len(x) > (self.size or 4):
            self.size = len(x)
            self.register_buffer("mean", torch.linspace(0, 1, 3, dtype=torch.float64) ** self.size, persistent=False)
        return 1 + self.mean


class Tabled(Guarded):
    """Makes a longer table where its own is too short."""

    def scale_of(self, x):
        if self.size is None or len(x) > self.size:
            self.size, self.table = len(x), torch.arange(len(x), dtype=torch.float64)[:, None].cos()
        return self.table[: len(x)]


class Recent(Guarded):
    """Keeps the last few means in a list, a new one each time."""

    def scale_of(self, x):
        self.recent = [*self.recent[-2:], x.mean(0)]
        return 1 + sum(self.recent)


@pytest.mark.parametrize("kind", [FromFirstBatch, Recent])
@runs("region", "nested", torch_fails=SILENT)
def test_tensors_and_what_guards_them(run, kind):
    """Numbers and flags of a module go back with its tensors: a rerun must not find half of one state and half of another."""
    assert_as_eager(functools.partial(steps_of_many_sizes, kind), run)


@pytest.mark.parametrize("kind", [FromFirstBatchRebound, Rotary, Tabled])
@runs("region", "nested")
def test_tensors_that_are_made_once_and_what_guards_them(run, kind):
    assert_as_eager(functools.partial(steps_of_many_sizes, kind), run)


def steps_of_many_sizes(kind, run):
    module, found = nn.Sequential(nn.Tanh(), kind()), []
    for size in (4, 6, 3, 9, 5, 7):
        x = torch.randn(size, 3, dtype=torch.float64, requires_grad=True)
        found += [gradients(run(module, x), x), module[1].mean.clone(), module[1].ready, module[1].size]
    return found


class FrozenFirst(Guarded):
    """Takes the mean of its first batch into a parameter without gradients, and counts."""

    def __init__(self):
        super().__init__()
        self.kept, self.calls = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False), 0

    def scale_of(self, x):
        if not self.ready:
            self.kept.copy_(x.mean(0))
        self.ready, self.calls = True, self.calls + 1
        self.kept.lerp_(x.mean(0), 1 / self.calls)
        return 1 + self.kept.clone()


class GuardsBelow(Guarded):
    """Has its flag in one module and the statistics in another one below."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)

    def scale_of(self, x):
        if not self.ready:
            self.norm.running_mean.copy_(x.mean(0))
            self.ready = True
        return 1 + self.norm.running_mean


class GuardedByShape(Guarded):
    """Is guarded by a tuple of numbers."""

    def scale_of(self, x):
        if self.size != tuple(x.shape):
            self.mean.copy_(x.mean(0))
        self.size = tuple(x.shape)
        return 1 + self.mean.clone()


class Recurrent(Guarded):
    """Has a pair of tensors from one forward to the next, and none now and then."""

    def scale_of(self, x):
        before = 0.0 if self.table is None else self.table[0] + self.table[1]
        self.table = None if len(x) == 9 else (x.mean(0), x.amax(0))
        return 1 + before


class Hidden(Guarded):
    """Has modules in a list, so that they are not trained, or saved, with it."""

    def __init__(self):
        super().__init__()
        self.recent = [nn.BatchNorm1d(3, affine=False, dtype=torch.float64)]

    def scale_of(self, x):
        return self.recent[0](x)


@pytest.mark.parametrize("kind", [FrozenFirst, GuardsBelow, GuardedByShape, Recurrent, Hidden])
@pytest.mark.parametrize("form", ["region", "nested"])
def test_state_of_other_kinds(form, kind):
    assert_as_eager(functools.partial(steps_of_many_sizes, kind), Run("ours", form))


@pytest.mark.parametrize("form", ["region", "nested"])
@pytest.mark.parametrize("between", ["nothing", "reset"])
def test_an_attribute_that_is_none_before_and_after(form, between):
    """By forward or by the caller: what a rerun binds it to is undone."""

    class Flip(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = None

        def forward(self, x):
            y = (x if self.state is None else x + self.state).sin()
            self.state = y.detach().mean(0) if between == "reset" or self.state is None else None
            return y.exp()

    def program(run):
        module, x = Flip(), torch.ones(2, 3, requires_grad=True)
        first, second = run(module, x), run(module, x * 2)
        if between == "reset":
            module.state = None
        (first.sum() + second.sum()).backward()
        return module.state

    assert_as_eager(program, Run("ours", form))


@pytest.mark.parametrize("form", ["region", "nested"])
@pytest.mark.parametrize("guard", ["table", "flag"])
def test_parts_that_a_guard_stands_before(form, guard):
    """They are made once, though what the guard is changes together with a tensor."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.built, self.table = nn.ModuleList(), False, None
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            if not self.built if guard == "flag" else self.table is None:
                self.heads.append(nn.Linear(3, 3))
                self.table, self.built = torch.ones(3), True
            for head in self.heads:
                x = head(x).sin()
            return x * self.table

    def program(run):
        module, found = Heads(), []
        for _ in range(5):
            x = torch.randn(4, 3, requires_grad=True)
            found += [gradients(run(module, x), x, *module.parameters()), len(module.heads), module.seen.clone()]
        return found

    assert_as_eager(program, Run("ours", form))


@pytest.mark.parametrize("way", ["in place", "data"])
@runs()
def test_parameters_that_the_first_forward_initialises(run, way):
    """By numbers of the first batch: a rerun finds them as they were, and does it once more."""

    class Initialised(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.ready = nn.Linear(3, 3), False
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            if not self.ready:
                with torch.no_grad():
                    self.mean.copy_(self.linear(x).mean(0))
                    weight = self.linear.weight
                    (weight.data if way == "data" else weight).div_(self.linear(x).std())
                self.ready = True
            return (self.linear(x) - self.mean).sin().exp()

    def program(run):
        torch.manual_seed(3)
        module, found = Initialised(), []
        for _ in range(3):
            x = torch.randn(4, 3, requires_grad=True)
            y = run(module, x)
            found += [*gradients(y, x, module.linear.weight), module.linear.weight.detach().clone(), torch.tensor(module.ready)]
        return found

    assert_as_eager(program, run)


@runs(torch_fails=SILENT)
def test_a_frozen_parameter_that_is_written_to_after_forwards_that_failed(run):
    """These count for nothing: a forward that has not ended may yet have written to it."""

    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)

        def forward(self, x, *, fails):
            if fails:
                raise ValueError
            self.codes.data.mul_(1.5)
            return (x * self.codes.clone()).sin()

    def program(run):
        module, x = Codes(), leaf(3)
        for _ in range(5):
            with pytest.raises(ValueError):
                run(module, x, fails=True)
        return gradients(run(module, x, fails=False), x), module.codes.clone()

    assert_as_eager(program, run)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("way", ["list", "outside"])
def test_old_graphs_are_not_kept(way):
    """A list that is bound anew, and an attribute that the caller binds: what is in them is of the forward before."""

    class Logged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(3, 3), None

        def forward(self, x):
            y = self.linear(x).sin()
            if way == "list":
                self.last = [(y * y).mean()]
            return y.exp()

    module, alive = Logged(), []
    for _ in range(5):
        x = torch.randn(4, 3)
        alive.append(weakref.ref(x))
        y = ckpt_hooks.checkpoint(module, x)
        if way == "outside":
            module.last = y
        del x, y
    assert [reference() is not None for reference in alive] == [False] * 4 + [True]


@runs("region", "nested")
@pytest.mark.parametrize("what", ["module", "parameter"])
def test_a_part_that_the_first_forward_makes(run, what):
    """It is the one that stays: gradients go to it, and the rerun uses it."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = None

        def forward(self, x):
            if self.part is None:
                weight = nn.Parameter(torch.randn(3, dtype=torch.float64))
                self.part = nn.ParameterList([weight]) if what == "module" else weight
            return ((self.part[0] if what == "module" else self.part) * x).sin()

    def program(run):
        head, found = Head(), []
        for _ in range(5):
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            y = run(head, x)
            (weight,) = head.parameters()
            found += [*gradients(y, x, weight), next(head.parameters()) is weight]
        return found

    assert_as_eager(program, run)


@runs("region", "nested", torch_fails=SILENT)
def test_lazy_modules(run):
    """Their first forward, which makes parameters and draws for them, is kept whole."""

    def program(run):
        module, found = nn.Sequential(nn.LazyLinear(3), nn.Dropout(), nn.LazyBatchNorm1d(), nn.Tanh()), []
        for _ in range(5):
            x = torch.randn(4, 3, requires_grad=True)
            found += [gradients(run(module, x), x, *module.parameters()), *module.buffers()]
        return found

    assert_as_eager(program, run)
    if run.ours:
        assert_as_eager(program, run.selecting([torch.ops.aten.addmm.default]))


def test_lazy_modules_in_debug_mode():
    """Clear words before anything has run, where torch fails in the middle of a kernel's checks."""
    module, x = nn.LazyLinear(3), torch.randn(2, 3, requires_grad=True)
    with pytest.raises(ckpt_hooks.CheckpointError, match=r"region 'LazyLinear' .* lazy modules .* Run the model once before"):
        ckpt_hooks.checkpoint(module, x, debug=True)
    module(x)
    ckpt_hooks.checkpoint(module, x, debug=True).sum().backward()


class Plain(torch.Tensor):
    """A tensor of another class, with nothing of its own."""


OTHER_KINDS = {
    "subclass": lambda: torch.ones(3, 3).as_subclass(Plain),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", list(OTHER_KINDS))
@runs("region", torch_fails=UNNOTICED)
def test_buffers_of_other_kinds_that_forward_writes_to(run, kind):
    """They cannot be put back; that they were written to is noticed."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", OTHER_KINDS[kind]())

        def forward(self, x):
            scale = self.scale.dequantize() if kind == "quantised" else self.scale
            y = (scale.to_dense() @ x if kind == "sparse" else scale.as_subclass(torch.Tensor) * x).tanh()
            with torch.no_grad():
                self.scale.copy_(torch.zeros(3, 3)) if kind == "quantised" else self.scale.mul_(0.9)
            return y.exp()

    x = torch.randn(3, 3, requires_grad=True)
    y = run(Scaled(), x)
    with pytest.raises(ckpt_hooks.MutationError, match="the buffer 'scale' of Scaled"):
        y.sum().backward()


@runs("region", torch_fails=SILENT)
def test_a_wide_batch_norm(run):
    """Its statistics move no version, and are larger than what is compared of other buffers."""

    def program(run):
        module, x = nn.BatchNorm1d(20_000), torch.randn(2, 20_000, requires_grad=True)
        return gradients(run(module, x).sin(), x), module.running_mean, module.running_var

    assert_as_eager(program, run)


@runs("region", "nested", torch_fails=SILENT)
def test_batch_norm_with_several_backwards(run):
    """Two forwards before their backwards, one of which runs twice."""

    def program(run):
        module = batch_norm()
        x = data(module)
        first, second = run(module, x), run(module, x * 2)
        first.sum().backward(retain_graph=True)
        first.sum().backward()
        return results(second, x, module)

    assert_as_eager(program, run)


def through_closure(run, module, x):
    return run(lambda x: module(x).sin(), x)


def through_default_argument(run, module, x):
    def function(x, module=module):
        return module(x).sin()

    return run(function, x)


def through_partial(run, module, x):
    return run(functools.partial(lambda module, x: module(x).sin(), module), x)


_global_module = batch_norm()


def uses_global(x):
    return _global_module(x).sin()


class Block(nn.Module):
    """Has a part of itself checkpointed."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def part(self, x):
        return self.norm(x).sin()


class Keeper(nn.Module):
    """Has a module within something else than a module."""

    def __init__(self, kept, apply):
        super().__init__()
        if isinstance(kept, nn.Module):
            object.__setattr__(self, "kept", kept)  # past its registration
        else:
            self.kept = kept
        self.apply_kept = apply

    def forward(self, x):
        return self.apply_kept(self.kept, x).sin()


def kept_as(wrap, apply):
    """Returns a way to reach a module by a module that keeps it in something."""
    return lambda run, module, x: run(Keeper(wrap(module), apply), x)


def through_registered_proxy(run, module, x):
    """A module that knows the one around it, as a proxy that is registered like a module."""
    inner, outer = Block(module), Block(module)
    inner.parent = weakref.proxy(outer)
    return run(inner.part, x)


REACHED = {
    "module past registration": kept_as(lambda module: module, lambda kept, x: kept(x)),
    "object": kept_as(lambda module: types.SimpleNamespace(m=module), lambda kept, x: kept.m(x)),
    "kept partial": kept_as(functools.partial, lambda kept, x: kept(x)),
    "kept method": kept_as(lambda module: module.forward, lambda kept, x: kept(x)),
    "kept closure": kept_as(lambda module: lambda x: module(x), lambda kept, x: kept(x)),
    "nested containers": kept_as(lambda module: {"a": [(module,)]}, lambda kept, x: kept["a"][0][0](x)),
    "set": kept_as(lambda module: {module}, lambda kept, x: next(iter(kept))(x)),
    "beside a proxy": through_registered_proxy,
    "module": lambda run, module, x: run(module, x),
    "bound method": lambda run, module, x: run(module.forward, x),
    "method of a parent": lambda run, module, x: run(Block(module).part, x),
    "partial": through_partial,
    "closure": through_closure,
    "default argument": through_default_argument,
    "argument": lambda run, module, x: run(lambda x, module: module(x).sin(), x, module),
    "argument in a list": lambda run, module, x: run(lambda x, c: c[0](x).sin(), x, [module]),
    "keyword": lambda run, module, x: run(lambda x, *, module: module(x).sin(), x, module=module),
    "global": lambda run, module, x: run(uses_global, x),
}


@pytest.mark.parametrize("way", list(REACHED))
@runs(*FORMS, torch_fails=SILENT)
def test_batch_norm_however_the_function_reaches_it(run, monkeypatch, way):
    def program(run):
        module = batch_norm()
        monkeypatch.setitem(globals(), "_global_module", module)
        x = data(module)
        return results(REACHED[way](run, module, x), x, module)

    assert_as_eager(program, run)


@runs("region", "nested")
def test_preserve_buffers_false_updates_them_with_each_run(run):
    module = nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64), nn.Tanh())
    x = data(module)
    y = run.having(preserve_buffers=False)(module, x)
    assert module[0].num_batches_tracked == 1
    y.sum().backward()
    assert module[0].num_batches_tracked > 1


@pytest.mark.parametrize(
    ("kind", "buffer"), [("BatchNorm", "0.running_var"), ("FP8 amax in place", "history"), ("FP8 amax rebound", "history")]
)
@runs("region", "nested", torch_fails=(SILENT, RuntimeError))
def test_buffers_that_another_graph_has_saved(run, kind, buffer):
    """Putting buffers back is no change that a graph outside of the region would notice."""

    def program(run):
        module = make(kind)
        x = data(module)
        y = run(module, x)
        z = x.sum() * module.get_buffer(buffer)
        y.sum().backward()
        return results(z, x, module)

    assert_as_eager(program, run)


@runs("region", "nested", torch_fails=SILENT)
def test_buffers_after_a_failed_rerun(run):
    module, fails = batch_norm(), threading.Event()

    def function(x):
        h = module(x) * 2
        if fails.is_set():
            raise ValueError("not now")
        return h.sin().exp()

    x = data(module)
    y = run(function, x).sum()
    expected = {name: buffer.clone() for name, buffer in module.named_buffers()}
    fails.set()
    with pytest.raises(ValueError, match="not now"):
        y.backward()
    assert all(same(buffer, expected[name]) for name, buffer in module.named_buffers())
    fails.clear()
    y.backward()
    assert all(same(buffer, expected[name]) for name, buffer in module.named_buffers())


# Side effects


@runs(*FORMS, torch_fails=SILENT)
def test_logging_and_counters(run):
    calls = []

    def function(x):
        if not run.is_recomputing():
            calls.append(1)
        return x.sin().exp()

    run(function, leaf(3)).sum().backward()
    assert calls == [1]


@runs(*FORMS, torch_fails=SILENT)
def test_aux_losses(run):
    def program(run):
        losses = []

        def function(x):
            h = x.sin().exp()
            loss = h.square().mean()
            if not run.is_recomputing():
                losses.append(loss)
            return h.cos()

        x = leaf(3)
        total = run(function, x).sum() + losses[0]
        return gradients(total, x), losses

    assert_as_eager(program, run)


CACHE_READERS = {
    "as many tensors": lambda cache: torch.stack(cache).sum(0).sin(),
    "other shapes": lambda cache: torch.cat(cache).sin().sum(),
}


def attend(x, cache, read):
    cache.append(x.exp())
    return x * read(cache)


@pytest.mark.parametrize("read", CACHE_READERS.values(), ids=CACHE_READERS)
@runs(*FORMS, torch_fails=(SILENT, RuntimeError))
def test_function_appends_to_a_list_it_was_given(run, read):
    def program(run):
        cache, x = [], leaf(3)
        y = run(attend, run(attend, x, cache, read), cache, read)
        return gradients(y, x), cache

    assert_as_eager(program, run)


@runs(*FORMS, torch_fails=SILENT)
def test_attributes_of_the_function_itself(run):
    def program(run):
        def function(x):
            function.calls += 1
            function.seen.append(function.calls)
            return (x * function.calls).sin()

        function.calls, function.seen = 0, []
        x = leaf(3)
        return gradients(run(function, run(function, x)), x), function.calls, function.seen

    assert_as_eager(program, run)


@runs("region", "nested", torch_fails=(SILENT, RuntimeError))
def test_function_adds_to_a_dict_it_was_given(run):
    def program(run):
        def function(x, cache):
            cache["keys"] = torch.cat([cache["keys"], x.exp()]) if "keys" in cache else x.exp()
            return (x.sum() * cache["keys"]).sin()

        cache, x = {}, leaf(3)
        y = run(function, run(function, x, cache), cache)
        return gradients(y, x), cache

    assert_as_eager(program, run)
