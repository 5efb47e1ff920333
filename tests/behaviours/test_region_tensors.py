"""Operators and tensors of unusual kinds in recorded regions: recurrent layers, custom functions, subclasses, sparse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_hooks import checkpoint_region, policies
from tests import regions
from tests.behaviours.recorded import Recorded, runs
from tests.behaviours.runs import assert_as_eager, gradients
from tests.measure import leaf

# Layers


@runs("region", "nested", "inside")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(run, kind, dtype):
    """Their kernels choose by gradient mode, alias what their schemas deny, and have several version counters."""

    def program(run):
        layers = kind(4, 4, 2, dropout=0.25, bidirectional=True, dtype=dtype)
        x = torch.randn(3, 2, 4, dtype=dtype, requires_grad=True)
        return gradients(run(lambda x: layers(x.sin())[0].exp(), x), x, *layers.parameters())

    assert_as_eager(program, run)


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_draws_without_values(preserve_rng_state):
    """There is no generator for the meta device, and nothing to draw."""
    x = torch.ones(4, device="meta", requires_grad=True)
    with checkpoint_region(preserve_rng_state=preserve_rng_state):
        y = F.rrelu(x, training=True).exp() * torch.rand_like(x).exp()
    assert torch.autograd.grad(y.sum(), x)[0].is_meta


def test_sparse_results_that_a_policy_keeps():
    """They have no storage of their own."""
    x = leaf(3, 3)

    def program(region):
        with region(policy=policies.everything_saveable):
            return torch.sparse.mm((x * 2).to_sparse(), x.exp()).sin()

    regions.assert_as_eager(program, x)


# Functions of the user's


@runs("region", "nested")
def test_custom_operators(run):
    """Of a library of the user's: one that computes, one that writes, one that draws without saying so."""
    if not hasattr(torch.ops, "ckpt_hooks_tests") or not hasattr(torch.ops.ckpt_hooks_tests, "shift"):

        @torch.library.custom_op("ckpt_hooks_tests::shift", mutates_args=())
        def shift(x: torch.Tensor, by: float) -> torch.Tensor:
            return x + by

        @torch.library.custom_op("ckpt_hooks_tests::double_", mutates_args={"x"})
        def double_(x: torch.Tensor) -> None:
            x.mul_(2)

        @torch.library.custom_op("ckpt_hooks_tests::noise", mutates_args=())
        def noise(x: torch.Tensor) -> torch.Tensor:
            return torch.rand_like(x)

    ops = torch.ops.ckpt_hooks_tests

    def program(run):
        x = leaf(4)

        def function(x):
            with torch.no_grad():
                table = ops.shift(x, 1.5).exp()
                ops.double_(table)
                drawn = ops.noise(table)
            return (x.sin() * table * drawn).exp()

        return gradients(run(function, x), x)

    assert_as_eager(program, run)


# Tensors of other kinds


class Tagged(torch.Tensor):
    """A subclass that does nothing but be one."""


@runs("region", "nested")
@pytest.mark.parametrize("kind", ["parameter", "input", "made inside"])
def test_a_subclass_that_runs_by_torch_function(run, kind):
    """It is what it was in backward, too."""

    def program(run):
        x, seen = leaf(4), []
        if kind == "parameter":
            w = nn.Parameter(torch.randn(4, dtype=torch.float64).as_subclass(Tagged))
        elif kind == "input":
            w = leaf(4).as_subclass(Tagged)
        else:
            w = leaf(4)

        def function(x):
            h = (x * (w.as_subclass(Tagged) if kind == "made inside" else w)).sin()
            h.register_hook(lambda g: seen.append(type(g).__name__) and None)
            return h.exp().as_subclass(torch.Tensor) if kind == "made inside" else h.exp()

        y = run(function, x)
        found = torch.autograd.grad(y.sum(), x)[0]
        return [type(y).__name__, y.detach().as_subclass(torch.Tensor), found.as_subclass(torch.Tensor)]

    assert_as_eager(program, run)


def test_a_subclass_in_a_region_in_a_function_frame():
    """Torch runs a backward that starts from a subclass with its function switched off, so the rerun makes plain tensors."""
    x, w = leaf(4), nn.Parameter(torch.randn(4, dtype=torch.float64).as_subclass(Tagged))
    (found,) = torch.autograd.grad(Recorded("inside")(lambda x: (x * w).sin().exp(), x).sum(), x)
    assert torch.equal(found, torch.autograd.grad((x * w).sin().exp().sum(), x)[0])


class Halved(torch.Tensor):
    """Shares the memory of a tensor, and has another cosine."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, inner):
        self = torch.Tensor._make_subclass(cls, inner)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))
        return out / 2 if func is torch.ops.aten.cos.default else cls(out)


@runs("region", "nested", "inside")
def test_a_subclass_that_an_operator_makes_in_the_memory_of_another_tensor(run):
    """It is kept as it is: a view of the other tensor is no such subclass."""
    halved = Halved(torch.ones(4))
    with torch.library._scoped_library("ckpt_hooks_tests", "FRAGMENT") as library:
        library.define("like(Tensor(a) x, Tensor other) -> Tensor(a)")
        library.impl("like", lambda x, other: x[:], "CPU")

        def function(x):
            h = x.detach() * 2
            return (x * torch.ops.ckpt_hooks_tests.like(h, halved).cos()).sin() + h

        def program(run):
            x = leaf(4)
            return gradients(run(function, x), x)

        assert_as_eager(program, run)


@runs("region", "nested", "inside")
@pytest.mark.parametrize("kind", ["conj", "fft", "real", "linalg"])
def test_complex_tensors(run, kind):
    """Lazy conjugates and negatives are views; decompositions."""

    def function(z):
        if kind == "conj":
            return (z.sin().conj() @ z.mT.conj()).abs()
        if kind == "fft":
            return torch.fft.irfft(torch.fft.rfft(z.real.sin()).cos())
        if kind == "real":
            h = z.exp()
            return h.conj().imag.neg() * torch.view_as_real(h)[..., 0].cos()
        return torch.linalg.solve(z, z.sin()).abs() + torch.linalg.svdvals(z)

    def program(run):
        z = torch.randn(4, 4, dtype=torch.complex128, requires_grad=True)
        return gradients(run(function, z), z)

    assert_as_eager(program, run)


@runs("region", "nested")
@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls some of them a beta
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors(run, layout):
    """They have no storage: kept as inputs, replayed as results."""

    def program(run):
        values, x = leaf(3), leaf(4, 4)
        index = torch.tensor([[0, 1, 3], [1, 2, 0]])
        fixed = torch.sparse_coo_tensor(index, torch.ones(3, dtype=torch.float64), (4, 4), check_invariants=False)
        fixed = fixed.to_sparse_csr() if layout == "csr" else fixed.coalesce()

        def function(values, x):
            if layout == "csr":
                return (fixed @ x.sin()).exp() * values.exp().sum()
            made = torch.sparse_coo_tensor(index, values.exp(), (4, 4), check_invariants=False)
            return torch.sparse.mm(made, x.sin()).exp() * torch.sparse.mm(fixed, x).cos()

        return gradients(run(function, values, x), values, x)

    assert_as_eager(program, run)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", ["region", "nested", "inside"])
@pytest.mark.parametrize("kind", ["alike", "read"])
def test_nested_tensors_without_a_shape(form, kind):
    """Of torch's older layout: nothing asks for their sizes. Torch's checkpoint does, fails, and may leave its hooks behind."""

    def function(a, b):
        nested = torch.nested.as_nested_tensor([a, b]).sin()
        nested = nested * torch.ones_like(nested) if kind == "alike" else (nested * 2).cos()
        return torch.nested.to_padded_tensor(nested, 0.0).sin()

    def program(run):
        a, b = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        return gradients(run(function, a, b), a, b)

    assert_as_eager(program, Recorded(form))


@runs("region", "inside")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors(run):
    """Made like another one, and read before they are written to: memory has the scale, and so have copies."""

    def function(q, x):
        made = torch.empty_like(q)
        made.copy_(q)
        y = (made.dequantize() * x).sin()
        made.copy_(torch.zeros(4))
        return (y + made.dequantize() * x).exp()

    def program(run):
        x = torch.linspace(-1, 1, 4).requires_grad_()
        return gradients(run(function, torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8), x), x)

    assert_as_eager(program, run)


@runs("region")
def test_parameters_made_in_inference_mode(run):
    """They have no version either, and cannot be saved; what does not save them may read them."""

    def program(run):
        with torch.inference_mode():
            layer, scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 2.0))
        x = torch.randn(4, requires_grad=True)
        with torch.inference_mode():
            y = run(lambda x: layer(x.sin()), x)
        return [y.clone(), *gradients(run(lambda x: (x.sin() + scale.detach()).exp().cos(), x), x)]

    assert_as_eager(program, run)
