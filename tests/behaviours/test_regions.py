"""Recorded regions, row by row where they differ from function frames: code runs once, and backward needs none of it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.behaviours.recorded import runs
from tests.behaviours.runs import SILENT, assert_as_eager, gradients
from tests.measure import leaf

aten = torch.ops.aten

# Randomness


@runs("region", "nested", "inside")
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout(x, 0.5, inplace=True),
        lambda x: F.alpha_dropout(x, 0.5),
        lambda x: x * torch.rand_like(x),
        lambda x: x + torch.randn(3, dtype=x.dtype),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: x * torch.empty_like(x).uniform_(),
        lambda x: x[torch.randperm(3)],
        lambda x: x * torch.multinomial(torch.ones(3), 3),
        lambda x: F.gumbel_softmax(x, hard=True) * x,
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    ],
    ids=["dropout", "in-place", "alpha", "rand", "randn", "bernoulli", "uniform", "randperm", "multinomial", "gumbel", "sdpa"],
)
def test_the_default_generator(run, draw):
    """Backward draws the same numbers, and leaves the stream where it was."""

    def program(run):
        x = leaf(3, 3)
        found = gradients(run(lambda x: draw(draw(x.sin()).exp() * 1).cos(), x), x)
        return [*found, torch.rand(3)]

    assert_as_eager(program, run)


@runs(torch_fails=SILENT)
def test_a_generator_that_an_operator_is_given(run):
    """Nobody needs to be told of it: the operator that drew knows its state."""

    def program(run):
        generator = torch.Generator().manual_seed(3)
        x = leaf(8)

        def function(x):
            return (torch.bernoulli(torch.full_like(x, 0.5), generator=generator) * x.sin()).exp()

        return [*gradients(run(function, x), x), generator.get_state()]

    assert_as_eager(program, run)


@runs(torch_fails=SILENT)
@pytest.mark.parametrize("source", ["random", "numpy"])
def test_numbers_of_other_libraries(run, source):
    """Python's and NumPy's, drawn once in forward, as scalars and as tensors."""
    numpy = pytest.importorskip("numpy") if source == "numpy" else None

    def program(run):
        x = leaf(4)

        def function(x):
            if numpy is not None:
                return (x.sin() * torch.from_numpy(numpy.random.rand(4)) * float(numpy.random.rand())).exp()
            return (x.sin() * random.random() * torch.tensor([random.random() for _ in range(4)])).exp()

        return gradients(run(function, x), x)

    assert_as_eager(program, run)


@runs(torch_fails=SILENT)
def test_a_policy_that_keeps_one_random_operator_of_two(run):
    """The other one draws what it drew."""

    def program(run):
        x = leaf(8)
        return gradients(run(lambda x: (x.sin() * torch.rand_like(x)).exp() * torch.randn_like(x).cos() * x, x), x)

    assert_as_eager(program, run.selecting([aten.rand_like.default]))


@runs("region", "nested", "inside", torch_fails=SILENT)
def test_a_randomised_rectifier_at_the_end(run):
    """Its noise is complete only when it has run."""

    def program(run):
        x = leaf(8)
        return gradients(run(lambda x: F.rrelu(x.sin(), training=True), x), x)

    assert_as_eager(program, run)


# State and side effects


@runs(torch_fails=SILENT)
def test_running_statistics_are_updated_once(run):
    """Also where one layer comes twice."""

    def program(run):
        norm, x = nn.BatchNorm1d(4, dtype=torch.float64), leaf(6, 4)
        y = run(lambda x: norm(norm(x.sin())).exp(), x)
        return [*gradients(y, x, *norm.parameters()), *norm.buffers()]

    assert_as_eager(program, run)


@runs(torch_fails=SILENT)
def test_spectral_normalisation(run):
    """Each forward moves its vectors a step."""

    def program(run):
        layer, x = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4, dtype=torch.float64)), leaf(6, 4)
        y = run(lambda x: layer(x.sin()).exp(), x)
        return [*gradients(y, x, *layer.parameters()), *layer.buffers()]

    assert_as_eager(program, run)


@runs(torch_fails=SILENT)
def test_side_effects_happen_once(run):
    """A log, a counter in a buffer, a loss on the side."""

    def program(run):
        log, count, x = [], torch.zeros(()), leaf(4)

        def function(x):
            h = x.sin()
            log.append(h.sum().item())
            count.add_(1)
            return h.exp()

        return [*gradients(run(function, x), x), *log, count]

    assert_as_eager(program, run)


@runs(torch_fails=(SILENT, RuntimeError))
def test_a_cache_that_is_built_when_asked_for_first(run):
    """Forward made its tables in the region; a recompute finds them there."""

    def program(run):
        tables, x = [], leaf(4, 4)

        def function(x):
            if not tables:
                tables.append(torch.arange(4, dtype=torch.float64).sin())
            return (x.sin() * tables[0]).exp().sin()

        first = run(function, x)
        return gradients(first * run(function, x), x)

    assert_as_eager(program, run.selecting([aten.sin.default]))


@runs(torch_fails=(SILENT, RuntimeError, IndexError))
def test_a_cache_that_grows(run):
    """A list of keys that each call appends to and reads all of."""

    def program(run):
        cache, x = [], leaf(4)

        def function(x):
            cache.append(x.sin())
            return torch.stack(cache).exp().sum(0)

        y = run(function, x)
        return gradients(y + run(function, x * 2), x)

    assert_as_eager(program, run)


@runs(torch_fails=(SILENT, RuntimeError))
def test_a_cache_that_is_written_to(run):
    """Each step writes its keys into a buffer and reads it; what a step read is not what the next one wrote."""

    def program(run):
        cache, x = torch.zeros(4, 3, dtype=torch.float64), leaf(2, 3)

        def function(x, step):
            with torch.no_grad():
                cache[2 * step : 2 * step + 2] = x * (step + 1)
            return (x @ cache.clone().t()).softmax(-1).sin()

        return [*gradients(run(function, x, 0).sum() + run(function, x, 1).sum(), x), cache]

    assert_as_eager(program, run)


@runs(torch_fails=(SILENT, RuntimeError))
@pytest.mark.parametrize("change", ["global", "eval", "argument"])
def test_what_changes_before_backward(run, change):
    """A variable that the code reads, the mode of a module, a list that was an argument."""

    def program(run):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
        settings, layers = {"scale": 2.0}, [torch.sin, torch.exp]
        x = torch.randn(3, 4, requires_grad=True)

        def function(x, layers):
            x = model(x) * settings["scale"]
            for layer in layers:
                x = layer(x)
            return x

        y = run(function, x, layers)
        if change == "global":
            settings["scale"] = 5.0
        elif change == "eval":
            model.eval()
        else:
            layers.pop()
        return gradients(y, x, *model.parameters())

    assert_as_eager(program, run)


@runs(torch_fails=IndexError)
def test_an_iterator_as_argument(run):
    """It is read once."""

    def program(run):
        x = leaf(4)
        y = run(lambda x, layers: [x := layer(x) for layer in layers][-1], x, iter([torch.sin, torch.exp, torch.tanh]))
        return gradients(y, x)

    assert_as_eager(program, run)


# What is around


@runs("region", "nested", "inside")
@pytest.mark.parametrize("where", ["inside", "outside", "backward"])
@pytest.mark.parametrize("cache", [True, False])
def test_autocast(run, where, cache):
    """In the region, around it, and around backward, where it does not count; with its cache warm and without."""

    def program(run):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)

        def cast(here):
            return torch.autocast("cpu", torch.bfloat16, enabled=where == here, cache_enabled=cache)

        def function(x):
            if where != "inside":
                return model(model(x)).float().exp()
            with cast("inside"):
                return model(model(x)).float().exp()

        with cast("outside"):
            y = run(function, model(x)) + run(function, x)
        with cast("backward"):
            return gradients(y.sum(), x, *model.parameters())

    assert_as_eager(program, run)


@runs("region", "nested", "inside", torch_fails=(SILENT, RuntimeError))
def test_another_default_dtype_in_backward(run):
    """Factories make what they made."""

    def program(run):
        x = torch.randn(4, requires_grad=True)
        y = run(lambda x: (x.sin() * torch.ones(4).exp() * torch.full((4,), 2.0)).exp(), x)
        torch.set_default_dtype(torch.float64)
        try:
            return gradients(y, x)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_as_eager(program, run)


@runs("region", "nested")
@pytest.mark.parametrize("flag", ["mkldnn", "deterministic"])
def test_flags_that_choose_kernels(run, flag):
    """Those of forward count in the replay, those of backward stay as they are."""

    def program(run):
        model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), torch.randn(2, 2, 8, 8, requires_grad=True)
        if flag == "deterministic":
            torch.use_deterministic_algorithms(True)
        else:
            torch.backends.mkldnn.enabled = False
        try:
            y = run(lambda x: model(x.sin()).exp().cumsum(0), x)
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.mkldnn.enabled = True
        found = gradients(y, x, *model.parameters())
        return [*found, torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled]

    if not run.ours and flag == "mkldnn":
        pytest.skip("torch gives other gradients or the same, as kernels happen to round")
    assert_as_eager(program, run)


#: Operators, and switches by which some processors run another kernel of theirs, with other roundings.
KERNELS = {
    "gelu": (lambda x, w: F.gelu(x), torch.backends.mkldnn, "enabled", False),
    "product": (torch.mm, torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
}


@runs("region", "nested", "inside")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_changes_between_two_operators(run, kernel):
    """One operator three times, the second time by another kernel: a replay runs each by the kernel that it had."""
    call, where, name, other = KERNELS[kernel]

    def program(run):
        x, w = torch.randn(65, 65, requires_grad=True), torch.randn(65, 65)
        first = getattr(where, name)

        def function(x):
            x = call(x.sin(), w)
            setattr(where, name, other)
            try:
                x = call(x.sin(), w)
            finally:
                setattr(where, name, first)
            return call(x.sin(), w).exp().sin()

        found = gradients(run(function, x), x)
        assert getattr(where, name) == first
        return found

    assert_as_eager(program, run)


class Double(TorchFunctionMode):
    """Doubles the results of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is self.function else out


@runs("region", "nested")
def test_a_function_mode_in_forward(run):
    """What it made of the program is what is replayed, with it gone."""

    def program(run):
        x = leaf(4)

        def function(x):
            with Double(torch.Tensor.sin):
                return x.sin().exp()

        return gradients(run(function, x), x)

    assert_as_eager(program, run)


@runs("region", "nested")
def test_a_function_mode_around_a_saved_tensor_that_is_read(run):
    """What is replayed for it is none of the mode's business."""

    def program(run):
        x = leaf(4)
        node = run(lambda x: x.sin().cos(), x).grad_fn
        with Double(aten.sin.default):
            saved = node._saved_self
        return saved.detach(), x

    assert_as_eager(program, run)
