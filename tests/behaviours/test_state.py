"""State and side effects: buffers are written once, and code that must not run twice can tell."""

from __future__ import annotations

import functools
import types
import weakref

import pytest
import torch
from torch import nn

import ckpt_hooks
from tests.behaviours.runs import FORMS, SILENT, UNNOTICED, Run, assert_as_eager, gradients, runs

# Buffers


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


def fake_quantize(name):
    quantization = pytest.importorskip("torch.ao.quantization")
    kind = getattr(quantization, name)
    observed = kind(observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return nn.Sequential(nn.Linear(3, 3), observed, nn.Tanh())


BUFFERED = {
    "BatchNorm": batch_norm,
    "spectral_norm": spectral_norm,
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


class Guarded(nn.Module):
    """Keeps tensors that numbers and flags beside them tell how to use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.ready = False

    def forward(self, x):
        with torch.no_grad():
            scale = self.scale_of(x)
        return (x * scale).sin()


def steps_of_many_sizes(kind, run):
    module, found = nn.Sequential(nn.Tanh(), kind()), []
    for size in (4, 6, 3, 9, 5, 7):
        x = torch.randn(size, 3, dtype=torch.float64, requires_grad=True)
        found += [gradients(run(module, x), x), module[1].mean.clone(), module[1].ready]
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


@pytest.mark.parametrize("form", ["region", "nested"])
def test_a_frozen_parameter_that_forward_fills(form):
    assert_as_eager(functools.partial(steps_of_many_sizes, FrozenFirst), Run("ours", form))


class Clipped(nn.Module):
    """Scales its parameter by way of ``.data``, as weights are clipped: no version tells."""

    def __init__(self, *, trained):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.float64), requires_grad=trained)

    def forward(self, x):
        self.weight.data.mul_(0.5)
        return (x * self.weight).sin().exp()


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@runs(*FORMS, torch_fails=SILENT)
def test_a_parameter_that_forward_clips(run, trained):
    def program(run):
        module, found = Clipped(trained=trained), []
        for _ in range(3):
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            found += [
                gradients(run(module, x), x, *(p for p in module.parameters() if trained)),
                module.weight.detach().clone(),
            ]
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


REACHED = {
    "module past registration": kept_as(lambda module: module, lambda kept, x: kept(x)),
    "object": kept_as(lambda module: types.SimpleNamespace(m=module), lambda kept, x: kept.m(x)),
    "kept method": kept_as(lambda module: module.forward, lambda kept, x: kept(x)),
    "nested containers": kept_as(lambda module: {"a": [(module,)]}, lambda kept, x: kept["a"][0][0](x)),
}


class Adds:
    """A hook with a module, which counts its calls there."""

    def __init__(self, module):
        self.module = module
        module.calls = 0

    def __call__(self, layer, args, output=None):
        self.module.calls += 1
        return self.module(*args if output is None else (output,)) * self.module.calls

    def method(self, layer, args, output):
        return self(layer, args, output)


HOOKS = {
    "closure": lambda layer, module: layer.register_forward_hook(lambda layer, args, output: module(output)),
    "default": lambda layer, module: layer.register_forward_hook(lambda layer, args, output, m=module: m(output)),
    "partial": lambda layer, module: layer.register_forward_hook(
        functools.partial(lambda m, layer, args, output: m(output), module)
    ),
    "object": lambda layer, module: layer.register_forward_hook(Adds(module)),
    "method": lambda layer, module: layer.register_forward_hook(Adds(module).method),
    "pre-hook": lambda layer, module: layer.register_forward_pre_hook(Adds(module)),
    "module": lambda layer, module: layer.register_forward_hook(Inserted(module)),
}


class Inserted(nn.Module):
    """A hook that is a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, layer, args, output):
        return self.module(output)


def hooked(way, *, is_root):
    def reached(run, module, x):
        layer = nn.Softplus()
        HOOKS[way](layer, module)
        return run(layer if is_root else nn.Sequential(nn.Tanh(), layer), x).sin()

    return reached


REACHED |= {f"{way} as a hook": hooked(way, is_root=False) for way in HOOKS}
REACHED |= {f"{way} as a hook of the module itself": hooked(way, is_root=True) for way in HOOKS}


@pytest.mark.parametrize("way", list(REACHED))
@runs(*FORMS, torch_fails=SILENT)
def test_batch_norm_in_something_else_than_a_module(run, way):
    def program(run):
        module = batch_norm()
        x = data(module)
        return results(REACHED[way](run, module, x), x, module)

    assert_as_eager(program, run)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_tool_that_hooks_all_layers_does_not_join_them(is_inside):
    """The region of a layer keeps no weights of the others."""
    layers = [nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Tanh()) for _ in range(2)]
    hooked, seen = [layer[0] if is_inside else layer for layer in layers], {}
    for layer in hooked:
        layer.register_forward_hook(lambda layer, args, output: seen.update({hooked.index(layer): output.detach()}))
    y = ckpt_hooks.checkpoint(layers[0], torch.ones(2, 3, dtype=torch.float64, requires_grad=True))
    gone = weakref.ref(layers[1][0].weight)
    layers[1][0].weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    assert gone() is None
    y.sum().backward()
