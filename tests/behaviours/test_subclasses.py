"""Tensors of other classes in regions: wrappers of tensors, nested tensors, and classes with functions of their own."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor

from ckpt_hooks import policies
from tests.behaviours.recorded import Recorded
from tests.behaviours.runs import SILENT, Run, assert_as_eager, runs
from tests.measure import leaf

OURS = {
    "region": Recorded(),
    "part by part": Recorded(replay_whole=False),
    "nested, with a policy": Recorded("nested").selecting(policies.dots_saveable),
    "in a call": Recorded("inside"),
    "contexts": Run("ours").selecting([torch.ops.aten.mm.default]),
    "nested calls": Run("ours", "nested"),
}
# Policies of equal operators count together, and few of these programs have a product.
pytestmark = pytest.mark.filterwarnings("ignore:<save_ops. keeps the outputs of aten.mm.default> names operators:UserWarning")

ours = pytest.mark.parametrize("run", OURS.values(), ids=OURS)
everywhere = pytest.mark.parametrize("run", [*OURS.values(), Run("torch")], ids=[*OURS, "torch"])


def parts_of(tensor):
    """Returns the tensors inside a wrapper."""
    return [getattr(tensor, name).detach() for name in tensor.__tensor_flatten__()[0]]


# Wrappers


def two_leaves(*size):
    return TwoTensor(torch.randn(*size), torch.randn(*size)).requires_grad_()


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "masks": lambda x: x * torch.empty_like(x).bernoulli_(0.6).div_(0.6),
    "numbers": lambda x: x * torch.empty_like(x).uniform_().add_(1),
    "numbers alike": lambda x: x * torch.rand_like(x),
    "filled": lambda x: x * torch.empty_like(x).copy_(x.detach()).mul_(2),
    "filled in part": lambda x: x * torch.cat([torch.empty_like(x[:1]).fill_(2), torch.empty_like(x[1:]).normal_()]),
}


def gradients_twice(y, x):
    """Returns the parts of the gradients of two backwards, which must be of the class of ``x``."""
    found = [torch.autograd.grad(y.sum(), x, retain_graph=retain)[0] for retain in (True, False)]
    assert {type(one) for one in (y, *found)} == {type(x)}
    return [parts_of(one) for one in (y, *found)]


@everywhere
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_writes_to_fresh_memory_of_a_wrapper(run, draw):
    """Memory of its class comes from its own handler: each of the two tensors inside has other numbers."""

    def program(run):
        x = two_leaves(4, 3)
        return gradients_twice(run(lambda x: draw(draw(x.sin()).cos()).exp(), x), x)

    assert_as_eager(program, run)


@everywhere
def test_dropout_of_a_wrapper_under_autocast(run):
    def program(run):
        x, w = two_leaves(4, 3), two_leaves(3, 3)
        with torch.autocast("cpu", torch.bfloat16):
            y = run(lambda x: F.dropout(x @ w, 0.4).sin(), x)
        return gradients_twice(y, x)

    assert_as_eager(program, run)


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


@everywhere
def test_a_write_whose_handler_returns_another_tensor(run):
    """The tensor that was written to is a plain one still."""
    factor = Halved(torch.full((4,), 3.0))

    def function(x):
        h = x * 2
        h.mul_(factor)
        return h.sin()

    def program(run):
        x = torch.randn(4, requires_grad=True)
        y = run(function, x)
        return y, torch.autograd.grad(y.sum(), x)[0].inner

    assert_as_eager(program, run)


@everywhere
def test_a_wrapper_that_the_function_makes_around_its_memory(run):
    """A view of the memory would have other operators."""

    def function(x):
        h = x * 2
        return x * Halved(h.detach()).cos()

    def program(run):
        x = torch.randn(4, requires_grad=True)
        y = run(function, x)
        return y, torch.autograd.grad(y.sum(), x)[0]

    assert_as_eager(program, run)


@runs("region", "nested", torch_fails=SILENT)
def test_a_transposed_wrapper_as_an_argument_whose_copy_was_never_written_to(run):
    """The rerun gets another copy, with strides and version of forward, of the same class."""

    def program(run):
        x = two_leaves(5, 3)
        h = (x * 2).t()
        h.mul_(3)
        with saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            y = run(lambda h: (h * h._version).sin().exp(), h)
        return gradients_twice(y, x)

    assert_as_eager(program, run)


# Nested tensors


@everywhere
@pytest.mark.parametrize("draw", ["dropout", "numbers alike", "filled"])
def test_nested_tensors(run, draw):
    """Of the layout which is a wrapper. To be asked for its sizes is no read of it."""

    def program(run):
        made = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
        x = made.requires_grad_()
        y = run(lambda x: DRAWS[draw](F.gelu(DRAWS[draw](x.sin()))).cos(), x)
        return [torch.autograd.grad(y.values().sum(), x, retain_graph=retain)[0].values() for retain in (True, False)]

    assert_as_eager(program, run)


# Functions of their own


class Shortened(torch.Tensor):
    """Has half the cosine, by a function above autograd."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cos:
            with torch._C.DisableTorchFunctionSubclass():
                out = (out / 2).as_subclass(cls)
        return out


def hooks_that_do_nothing():
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def plain(tensor):
    return tensor.detach().as_subclass(torch.Tensor)


@ours
@pytest.mark.parametrize("draw", ["dropout", "dropout in place", "masks"])
def test_a_backward_that_begins_with_such_a_class(run, draw):
    """In it torch asks no functions of classes, and a recompute does. Torch's checkpoint does not, and says nothing."""

    def program(run):
        x, w = leaf(4), torch.randn(4, dtype=torch.float64).as_subclass(Shortened).requires_grad_()
        y = run(lambda x: DRAWS[draw]((x * w).cos()).sin(), x)
        y.sum().backward()
        return plain(y), plain(x.grad), plain(w.grad)

    assert_as_eager(program, run)


@ours
@pytest.mark.parametrize("hooks", [contextlib.nullcontext, hooks_that_do_nothing])
def test_an_argument_of_such_a_class(run, hooks):
    """Saved-tensor hooks bring back what is in it, and neither class nor attributes."""

    def program(run):
        x = leaf(4)
        h = (x * 2).as_subclass(Shortened)
        h.unit = 3.0
        with hooks():
            y = run(lambda h: (h.cos() * h.unit).sin(), h)
        return plain(y), *torch.autograd.grad(y.as_subclass(torch.Tensor).sum(), x)

    assert_as_eager(program, run)
