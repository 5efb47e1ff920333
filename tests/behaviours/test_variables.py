"""Variables that a function closes over, and globals that it names: a rerun finds what forward found."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import ckpt_hooks
from tests.behaviours.runs import FORMS, SILENT, assert_as_eager, gradients, runs
from tests.measure import leaf

# Loops


def layers():
    torch.manual_seed(3)
    return nn.ModuleList(nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Tanh()) for _ in range(3))


def loop(body):
    """Returns a program that runs three layers by ``body(run, layers, x)``, and returns output and gradients."""

    def program(run):
        ls, x = layers(), leaf(2, 3)
        y = body(run, ls, x)
        return gradients(y, x, *ls.parameters())

    return program


def with_numbers(run, ls, h):
    for number, layer in enumerate(ls):
        scale = 1.0 / (number + 1)
        h = run(lambda y: (layer(y) * scale).sin() + number, h)
    return h


def by_a_variable_that_goes(run, ls, h):
    for layer in ls:
        h = run(lambda y: layer(y), h)  # noqa: F821 -- it is there when it is called
    del layer
    return h


def without_arguments(run, ls, h):
    """The input is closed over, too, and its variable is bound to the output at once."""
    for layer in ls:
        h = run(lambda _: layer(h), torch.zeros(()))
    return h


def with_a_residual(run, ls, h):
    """A value with a history, which is freed when its variable is bound to the next."""
    for layer in ls:
        skip = (h.exp() + 1).mul_(2)
        h = run(lambda y: layer(y).sin() * skip, h)
    return h


def by_a_partial(run, ls, h):
    for layer in ls:
        h = run(functools.partial(lambda scale, y: layer(y) * scale, 2.0), h)
    return h


def by_a_function_handed_over(run, ls, h):
    for layer in ls:
        h = run(lambda f, y: f(y), lambda y: layer(y), h)
    return h


def by_a_method_with_a_closure(run, ls, h):
    for layer in ls:

        class Block:
            def forward(self, y):
                return layer(y)

        h = run(Block().forward, h)
    return h


def with_a_region_inside(run, ls, h):
    for layer in ls:
        h = run(lambda y: run(lambda z: layer(z).sin(), y.cos()), h)
    return h


LOOPS = {
    function.__name__: function
    for function in (
        with_numbers,
        by_a_variable_that_goes,
        without_arguments,
        with_a_residual,
        by_a_partial,
        by_a_function_handed_over,
        by_a_method_with_a_closure,
        with_a_region_inside,
    )
}


@pytest.mark.parametrize("body", LOOPS.values(), ids=LOOPS)
@runs(*FORMS, torch_fails=(SILENT, NameError, RuntimeError, IndexError))
def test_loops(run, body):
    assert_as_eager(loop(body), run)


@runs(*FORMS[:2])
def test_a_gradient_inside_by_an_argument_that_is_closed_over_too(run):
    """Hooks hand a rerun another tensor for the argument; then the variable is lent that one as well."""

    def program(run):
        x = leaf(2, 3)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.detach(),), lambda packed: packed[0]):
            h = x.sin()

            def block(u):
                return torch.autograd.grad(h.exp().sum(), u, create_graph=True)[0].sin() * u

            y = run(block, h)
        return gradients(y, x)

    assert_as_eager(program, run)


@pytest.mark.parametrize("place", ["closure", "attributes"])
@runs(*FORMS)
def test_views_of_what_was_written_to_take_their_places_in_the_graph_when_they_are_used(run, place):
    """A view whose base was written to gets a new node as soon as it is looked at; gradients are summed in the nodes' order."""

    def program(run):
        base = leaf(4).exp()
        first, second = base[:2], base[1:3]
        base.mul_(2)
        holder = nn.Module()
        holder.forward = lambda x: (holder.second * x).sum() + (holder.first * x).sum()
        holder.first, holder.second = (first, second) if place == "attributes" else (None, None)
        function = holder if place == "attributes" else lambda x: (second * x).sum() + (first * x).sum()
        y = run(function, leaf(2))
        return [y, second.grad_fn._sequence_nr() < first.grad_fn._sequence_nr()]

    assert_as_eager(program, run)


def test_a_write_to_a_closed_over_tensor_that_is_gone_is_an_error():
    """The memory is there still, in a view; plain autograd has saved what it needs."""
    x = leaf(2, 3)

    def forward():
        h = x * 2
        return ckpt_hooks.checkpoint(lambda: h.exp().tanh()), h[:1]

    y, view = forward()
    with torch.no_grad():
        view.mul_(2)
    with pytest.raises(ckpt_hooks.MutationError, match="at version 1; expected version 0"):
        y.sum().backward()


def test_a_rerun_ends_where_it_reads_what_has_changed():
    """No value to come is right. Here a backward inside would wait for a node of the graph that waits for this rerun."""
    x, lines = leaf(3), []
    h = x * 2

    def block():
        lines.append("began")
        total = h.sum()
        lines.append("went on")
        (gradient,) = torch.autograd.grad(total, x, retain_graph=True)
        torch.nn.functional.dropout(h, 0.5, training=True, inplace=True)
        return gradient

    ckpt_hooks.checkpoint(block)
    with pytest.raises(ckpt_hooks.MutationError, match="the variable 'h'"):
        h.sum().backward()
    assert lines.count("went on") == 1


# Variables that forward itself binds


@runs(*FORMS, torch_fails=SILENT)
def test_a_variable_that_forward_assigns_first(run):
    def program(run):
        x = leaf(3)

        def function(y):
            nonlocal table
            try:
                return (y * table).sin()
            except NameError:
                table = torch.linspace(0, 1, 3, dtype=torch.float64)
                return (y + table).exp().sin()

        y = run(function, x)
        y = run(function, y)
        found = [*gradients(y, x), table]  # noqa: F821 -- by the function
        table = None
        return found

    assert_as_eager(program, run)


# Globals

_scale = 1.0
_layer = nn.Linear(3, 3, dtype=torch.float64)
_act = torch.sin
_bias = torch.zeros(3).double()


@pytest.fixture(autouse=True)
def _globals_are_put_back():
    before = {name: value for name, value in globals().items() if name.startswith("_") and not name.startswith("__")}
    yield
    for name in [name for name in globals() if name.startswith("_") and not name.startswith("__") and name not in before]:
        del globals()[name]
    globals().update(before)


def names_globals(y):
    return _act(_layer(y) * _scale + _bias).exp()


CHANGES = {
    "number": lambda: globals().update(_scale=2.0),
    "module": lambda: globals().update(_layer=nn.Linear(3, 3, dtype=torch.float64)),
    "function": lambda: globals().update(_act=torch.cos),
    "tensor": lambda: globals().update(_bias=torch.ones(3).double()),
    "gone": lambda: globals().pop("_scale"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@runs(*FORMS, torch_fails=(SILENT, NameError))
def test_globals_bound_to_something_else(run, change):
    def program(run):
        torch.manual_seed(5)
        globals().update(_scale=1.0, _layer=nn.Linear(3, 3, dtype=torch.float64), _act=torch.sin, _bias=torch.zeros(3).double())
        x, layer = leaf(2, 3), _layer
        y = run(names_globals, x)
        change()
        now = {name: globals().get(name) for name in ("_scale", "_layer", "_act", "_bias")}
        found = gradients(y, x, *layer.parameters())
        assert all(globals().get(name) is value for name, value in now.items())
        return found

    assert_as_eager(program, run)
