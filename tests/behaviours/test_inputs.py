"""Inputs: a rerun sees what forward saw, or an error says which input is no longer what it was."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import ckpt_hooks
from ckpt_hooks.policies import dots_saveable
from tests.behaviours.applied import ALL_REGIONS, function_regions, in_regions
from tests.behaviours.runs import (
    FORMS,
    SILENT,
    UNNOTICED,
    Run,
    assert_as_eager,
    assert_as_eager_or_error,
    gradients,
    plain,
    runs,
)
from tests.measure import Log, leaf


def weighted(x, mask):
    return (x.sin() * mask).exp()


# Mutation after forward

SECOND = "the saved tensor at position 1"


def assert_notices(run, call, mutate, *, tensor):
    """Asserts that backward raises, under plain autograd too, and that our error names the tensor."""
    for caller in (plain, run):
        y = call(caller)
        with torch.no_grad():
            mutate()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            y.sum().backward()
    if run.ours:
        found = caught.value
        assert isinstance(found, ckpt_hooks.MutationError)
        assert (found.found - found.expected, type(found.expected)) == (1, int)
        assert found.region
        assert found.tensor == tensor
        assert tensor in str(found)


@runs(*FORMS, torch_fails=UNNOTICED)
def test_closure_tensor_mutated(run):
    x, mask = leaf(3), torch.ones(3, dtype=torch.float64)
    assert_notices(run, lambda run: run(lambda x: weighted(x, mask), x), lambda: mask.add_(1), tensor=SECOND)


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@runs(*FORMS, torch_fails=UNNOTICED)
def test_parameter_mutated(run, trainable):
    """An optimizer step too early, or weights that are loaded."""
    layer = nn.Sequential(nn.Tanh(), nn.Linear(3, 3, dtype=torch.float64), nn.Tanh())
    layer.requires_grad_(trainable)
    x = leaf(2, 3)
    tensor = "the parameter '1.weight' of Sequential" if trainable else SECOND
    assert_notices(run, lambda run: run(layer, x), lambda: layer[1].weight.add_(1), tensor=tensor)


class Casting(nn.Sequential):
    """Enters autocast itself."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


@runs(*FORMS, torch_fails=SILENT)
@pytest.mark.parametrize("forwards", [1, 6], ids=["first", "seventh"])
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize(
    ("name", "autocast"), [("weight", "around"), ("weight", "inside"), ("bias", "around"), ("bias", "inside"), ("bias", "not")]
)
def test_parameter_mutated_that_autograd_has_not_saved(run, name, autocast, trainable, forwards):
    """Under autocast it has saved a cast of a weight, and of a bias nothing; a rerun would read what is there by then."""

    def program(run):
        torch.manual_seed(0)
        kind = Casting if autocast == "inside" else nn.Sequential
        layer = kind(nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).requires_grad_(trainable)
        x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast == "around"):
            for _ in range(forwards):
                y = run(layer, x)
        with torch.no_grad():
            getattr(layer[1], name).add_(1)
        return gradients(y.float(), x)

    assert_as_eager_or_error(program, run, naming=f"the parameter '1.{name}' of {'Casting' if autocast == 'inside' else 'Seq'}")


@runs("region", "nested")
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("reached", ["method", "closure"])
def test_parameters_that_a_region_reaches_and_does_not_read_may_change(run, reached, autocast):
    """An optimizer that steps in the course of a backward has changed the layers behind."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

        def step(self, index, x):
            return self.layers[index](x)

    def program(run):
        torch.manual_seed(0)
        model = Model()
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        x = y = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            for index in range(3):
                y = run(model.step if reached == "method" else lambda i, x: model.step(i, x), index, y)
        return [*gradients(y.float(), x), *model.parameters()]

    assert_as_eager(program, run)


@runs("region", torch_fails=SILENT)
@pytest.mark.parametrize("when", ["before", "after"])
def test_parameter_that_forward_decays(run, when):
    """A rerun would start from what forward left: an error, whether forward reads it before that or after it."""

    class Decaying(nn.Linear):
        def forward(self, x):
            if when == "before":
                self.bias.detach().mul_(0.9)
            y = super().forward(x).tanh()
            if when == "after":
                self.bias.detach().mul_(0.9)
            return y.exp()

    def program(run):
        torch.manual_seed(0)
        layer = Decaying(3, 3)
        x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        return gradients(run(layer, x), x)

    assert_as_eager_or_error(program, run, naming="the parameter 'bias' of Decaying")


# Functions that mutate their inputs

OWN_INPUT = {
    "positional": lambda run, fn, x, buffer: run(fn, x, buffer),
    "list": lambda run, fn, x, buffer: run(lambda x, c: fn(x, c[0]), x, [buffer]),
    "dict": lambda run, fn, x, buffer: run(lambda x, c: fn(x, c["buffer"]), x, {"buffer": buffer}),
    "kwarg": lambda run, fn, x, buffer: run(fn, x, buffer=buffer),
}


def own_input(place, function):
    """Returns a program that hands a buffer to a function which writes to it."""

    def program(run):
        x, buffer = leaf(3), torch.rand(3, dtype=torch.float64)
        y = OWN_INPUT[place](run, function, x, buffer)
        return gradients(y, x), buffer

    return program


def write_then_use(x, buffer):
    buffer.add_(1)
    return (x.sin() * buffer).exp()


@runs("region", "nested")
def test_function_mutates_its_positional_input(run):
    assert_as_eager_or_error(own_input("positional", write_then_use), run, naming="args[1]")


@pytest.mark.parametrize(
    ("place", "name"), [("list", "args[1][0]"), ("dict", "args[1]['buffer']"), ("kwarg", "kwargs['buffer']")]
)
@runs("region", "nested", torch_fails=SILENT)
def test_function_mutates_its_nested_input(run, place, name):
    assert_as_eager_or_error(own_input(place, write_then_use), run, naming=name)


# Nested tensors under outer hooks


# requires_grad changed before backward


@pytest.mark.parametrize("place", OWN_INPUT)
@pytest.mark.parametrize("also_inside", [False, True])
@runs("region", "nested")
def test_function_has_an_argument_require_grad(run, place, also_inside):
    """Positions of atoms, of which forces are the gradient: some backward of them inside the region, all of them after it."""
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def energy(x, buffer):
        buffer.requires_grad_()
        energy = (layer(buffer) * x).sum()
        if also_inside:
            (force,) = torch.autograd.grad(energy, buffer, create_graph=True)
            energy = energy + force.square().sum()
        return energy

    gradients = []
    for impl in (lambda function, *args, **kwargs: function(*args, **kwargs), run):
        layer.zero_grad()
        x, position = torch.linspace(1, 2, 3).requires_grad_(), torch.linspace(-1, 1, 9).reshape(3, 3)
        OWN_INPUT[place](impl, energy, x, position).backward()
        assert position.requires_grad
        gradients.append([x.grad, position.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(map(torch.equal, *gradients))


class Patched(Run):
    """Calls functions as regions of torch, which are the library's."""

    def __init__(self):
        super().__init__("torch")
        self.ours = True

    def _region(self, function, *args, **kwargs):
        with ckpt_hooks.patch_torch():
            return super()._region(function, *args, **kwargs)


class AsksForGrad(nn.Module):
    """Computes by whether the bias requires grad, which saves the same tensors either way."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return (self.linear(x) * (2 if self.linear.bias.requires_grad else 3)).sin().exp()


class SwitchesGrad(AsksForGrad):
    """Switches off whether a weight requires grad, and on again when its last tensor is saved."""

    def forward(self, x):
        self.linear.weight.requires_grad_(False)
        y = super().forward(x).sin()
        self.linear.weight.requires_grad_(True)
        return y + 1


READERS = {
    "module": lambda run, module, x: run(module, x),
    "closure": lambda run, module, x: run(lambda x: module(x).sin(), x),
    "argument": lambda run, module, x: run(lambda x, module: module(x).sin(), x, module),
    "arguments": lambda run, module, x: run(
        lambda x, *weights: torch.func.functional_call(
            module, dict(zip(dict(module.named_parameters()), weights, strict=True)), x
        ),
        x,
        *module.parameters(),
    ),
    "list": lambda run, module, x: run(
        lambda x, weights=list(module.parameters()): torch.func.functional_call(  # noqa: B008
            module, dict(zip(dict(module.named_parameters()), weights, strict=True)), x
        ),
        x,
    ),
}
DISCRIMINATORS = {
    # The weight is larger than what is copied of a small tensor.
    "linear": lambda: nn.Sequential(nn.Linear(3, 1500), nn.Tanh(), nn.Linear(1500, 3), nn.Tanh(), nn.Linear(3, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 1)),
    "asking": AsksForGrad,
    "switching": SwitchesGrad,
}
LIBRARY_REGIONS = {
    **ALL_REGIONS,
    "sequential": Run("ours", "sequential"),
    "policy": Run("ours", policy=dots_saveable),
    "patched": Patched(),
}


@pytest.mark.parametrize("kind", list(DISCRIMINATORS))
@pytest.mark.parametrize("reader", list(READERS))
@in_regions(**LIBRARY_REGIONS)
def test_a_discriminator_frozen_and_unfrozen_between_forward_and_backward(run, kind, reader):
    """The generator's loss goes through frozen weights, the other one does not; both backwards come last."""

    def program(run):
        discriminator, generator, found = DISCRIMINATORS[kind](), nn.Linear(2, 3), []
        optimizer = torch.optim.SGD(discriminator.parameters(), 0.1)
        for step in range(3):
            fake = generator(torch.randn(4, 2))
            discriminator.requires_grad_(step == 2)
            loss = READERS[reader](run, discriminator, fake)
            discriminator.requires_grad_(step != 2)
            other = READERS[reader](run, discriminator, fake.detach() + 1)
            discriminator.requires_grad_(step == 0)
            loss.sum().backward(retain_graph=True)
            discriminator.requires_grad_(True)
            if other.requires_grad:
                other.sum().backward()
            loss.sum().backward()
            found += [loss, other, *(one.grad.clone() for one in generator.parameters())]
            found += [None if one.grad is None else one.grad.clone() for one in discriminator.parameters()]
            found += [one.requires_grad for one in discriminator.parameters()]
            optimizer.step()
        return found

    assert_as_eager(program, run)


@function_regions
def test_a_rerun_leaves_what_requires_grad(run):
    """What forward switches off for a part of the region stays on, though the rerun ends before it is switched on again."""

    def program(run):
        module, generator = SwitchesGrad(), nn.Linear(2, 3)
        y = run(module, generator(torch.randn(200, 2)))
        y.sum().backward()
        return [module.linear.weight.requires_grad, *(one.grad for one in generator.parameters())]

    assert_as_eager(program, run)


@pytest.mark.parametrize("is_frozen", [False, True])
@function_regions
def test_the_very_parameter_is_there_in_a_rerun_with_another_flag(run, is_frozen):
    """With its attributes, and known by its identity."""

    def program(run):
        layer = nn.Linear(3, 3).requires_grad_(is_frozen)
        layer.weight.scale = 2.0
        scales = {id(layer.weight): 3.0}

        def function(x):
            return (layer(x) * layer.weight.scale).sin() * scales[id(layer.weight)]

        x = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
        y = run(function, x)
        layer.requires_grad_(not is_frozen)
        return *gradients(y, x), layer.weight.grad, layer.weight.requires_grad

    assert_as_eager(program, run)


@pytest.mark.parametrize("reader", ["module", "closure", "arguments"])
@function_regions
def test_a_step_between_is_noticed_though_the_weights_were_frozen_in_forward(run, reader):
    discriminator = nn.Sequential(nn.Linear(3, 1500), nn.Tanh(), nn.Linear(1500, 3)).requires_grad_(False)
    x = torch.ones(2, 3, requires_grad=True)
    y = READERS[reader](run, discriminator, x)
    discriminator.requires_grad_(True)
    with torch.no_grad():
        discriminator[0].weight.mul_(2)
    with pytest.raises(ckpt_hooks.MutationError):
        y.sum().backward()


def scale_all(gradients):
    return tuple(gradient * 0.5 for gradient in gradients)


#: Ways to register a hook on a tensor or its node, which scales a gradient or is told of it.
HOOKS = {
    "tensor": lambda h, told: h.register_hook(lambda gradient: told(gradient) or gradient * 0.5),
    "accumulated": lambda h, told: h.register_post_accumulate_grad_hook(lambda leaf: told(leaf.grad.mul_(0.5))),
    "node": lambda h, told: h.grad_fn.register_hook(lambda given, _: told(given) or scale_all(given)),
    "before the node": lambda h, told: h.grad_fn.register_prehook(lambda given: told(given) or scale_all(given)),
    "of several, all": lambda h, told: torch.autograd.graph.register_multi_grad_hook([h], told),
    "of several, any": lambda h, told: torch.autograd.graph.register_multi_grad_hook([h], told, mode="any"),
}


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("closes_over", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
@runs(*FORMS, torch_fails=SILENT)
def test_a_hook_that_a_function_registers_counts_once(run, hook, closes_over, backwards):
    """On an argument or a tensor that it closes over: to scale the gradient of what came before, say."""

    def steps(run):
        calls, x = Log(), torch.linspace(-1, 1, 3).requires_grad_()
        h = x if hook == "accumulated" else x.tan()

        def function(argument):
            HOOKS[hook](h if closes_over else argument, calls.append)
            return (argument.sin() * h).exp()

        y = run(function, h)
        for _ in range(backwards):
            y.sum().backward(retain_graph=True)
        assert len(calls) == backwards
        return x.grad

    assert torch.equal(steps(run), steps(plain))


@pytest.mark.parametrize("saved_by", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("backwards", [1, 2])
@runs("region", "nested")
def test_function_replaces_the_hook_on_its_argument(run, saved_by, backwards):
    """The rerun takes off that of forward, and puts on one of its own."""
    gradients = []
    for impl in (lambda function, *args: function(*args), run):
        handles = []

        def function(h, handles=handles):
            if handles:
                handles.pop().remove()
            handles.append(h.register_hook(lambda gradient: gradient * 2))
            return h.sin().exp()

        x = torch.linspace(-1, 1, 4).requires_grad_()
        with saved_by():
            y = impl(function, x.tan())
        for _ in range(backwards):
            y.sum().backward(retain_graph=True)
        gradients.append(x.grad)
    assert torch.equal(*gradients)


# Parameters that are freed after forward and filled again


@pytest.mark.parametrize("part", [slice(None), slice(1), slice(0, 3, 2)], ids=["whole", "first", "every other"])
def test_a_changed_parameter_that_forward_fills_before_it_reads(part):
    """A rerun reads it as forward did if the function fills the whole; it has lost the rest of one filled in part."""
    weight = nn.Parameter(torch.ones(3))

    def function(x):
        with torch.no_grad():
            weight[part].fill_(5)
        return (x * (weight.detach() * 2)).sin()

    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        y = ckpt_hooks.checkpoint(function, x)
        expected = torch.autograd.grad(function(x).sum(), x)[0]
        with torch.no_grad():
            weight.add_(1)
        if part == slice(None):
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
        else:
            with pytest.raises(ckpt_hooks.MutationError, match="weight"):
                y.sum().backward()


def test_a_tensor_that_is_an_argument_and_closed_over_is_one_in_a_rerun():
    """Hooks hand the argument out as another tensor; what the function writes to it, it reads by the other name."""

    def program(run):
        x, table = torch.linspace(0.1, 1, 3).requires_grad_(), torch.full((3,), 1.5)

        def function(x, given):
            given.mul_(2)
            return (x * table * 1.5).sin()

        return gradients(run(lambda x: run(function, x.sin(), table).cos(), x), x)

    assert_as_eager(program, ckpt_hooks.checkpoint)


# Views

VIEWS = {
    "a part of a leaf": lambda x: x[:, 1:],
    "a transposed result": lambda x: x.sin().t(),
    "one of several": lambda x: x.sin().chunk(2)[1],
    "a part without grad": lambda x: x.detach()[1:],
    "the whole": lambda x: x.sin().view_as(x),
    "a number": lambda x: x.sin().sum().view(1),
    "no view": lambda x: x.sin(),
}
PLACES = {
    "argument": lambda run, function, view: run(function, view),
    "in a list": lambda run, function, view: run(lambda views: function(*views), [view]),
    "closed over": lambda run, function, view: run(lambda one: function(view) + one, torch.ones(())),
    "in a cell that is emptied": lambda run, function, view: called_and_forgotten(run, function, [view]),
}


def called_and_forgotten(run, function, views):
    y = run(lambda one: function(views[0]) + one, torch.ones(()))
    views.clear()
    return y


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_a_view_in_a_rerun_with_as_large_a_base(view, place):
    """Compiled code asks: what it saves of a view has no history, and it compares the sizes of the base."""

    def function(h):
        base = h._base
        found.append((h._is_view(), None if base is None else (base.shape, base.stride(), base.storage_offset())))
        return (h * h).exp()

    for form in ("region", "nested"):
        found, x = Log(), leaf(4, 6)
        y = place(Run("ours", form), function, view(x))
        if y.requires_grad:
            y.sum().backward()
            assert len(found) > 1
        assert len(set(found)) == 1


@pytest.mark.parametrize("form", ["region", "nested"])
def test_a_view_is_a_view_in_a_rerun_without_the_memory_of_its_base(form):
    """As hooks bring it back that copy; and a base of another dtype is the view's own memory."""

    def function(h):
        found.append(h._is_view())
        return (h * h).exp()

    for hooks in (contextlib.nullcontext, torch.autograd.graph.save_on_cpu):
        for view in (lambda x: x.sin()[1:], lambda x: torch.complex(x, x).imag, lambda x: torch.complex(x, x).conj()):
            found, x = Log(), leaf(4, 6)
            with hooks():
                y = Run("ours", form)(function, view(x))
            y.abs().sum().backward()
            assert len(found) > 1
            assert set(found) == {True}
