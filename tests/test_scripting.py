"""TorchScript in regions: the first calls of a function save other tensors than later ones, and what any saves is kept."""

from __future__ import annotations

import importlib.util
import weakref

import pytest
import torch
from torch import nn

from ckpt_hooks import CheckpointPolicy, DeterminismError, checkpoint, checkpoint_region, is_recomputing, policies
from tests.behaviours.runs import same
from tests.measure import Log, in_turns

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]

SOURCE = """
import torch
from torch import nn
from typing import List

def gate(a: torch.Tensor, b: torch.Tensor, n: List[int]) -> torch.Tensor:
    both = a + b
    return torch.tanh(both[:, : n[0]]) * torch.sigmoid(both[:, n[0] :])

def gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

def in_place(x):
    y = x.sin()
    y.mul_(2)
    return y.exp() * y

def inner(x):
    return x.sin() * x.tanh()

inner = torch.jit.script(inner)

@torch.jit.ignore
def in_python(x: torch.Tensor) -> torch.Tensor:
    return inner(x) * x

def with_python(x):
    return (in_python(x.cos()) * x).exp()

def bias_gelu(x, b):
    y = x + b
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))

def scaled(x, w):
    y = x * w
    return torch.tanh(y) * torch.sigmoid(y * x) * w

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return torch.tanh(self.linear(x)) * torch.sigmoid(x)
"""


@pytest.fixture
def source(tmp_path):
    """Returns a function which makes the functions of the source anew, as in a process that has run none of them."""
    made = Log()

    def make():
        path = tmp_path / f"scripted_{len(made)}.py"
        path.write_text(SOURCE)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made.append(module)
        return module

    return make


def with_gate(source):
    gate = torch.jit.script(source.gate)
    return lambda x: gate(x, x.cos(), [4]).repeat(1, 2).sin()


def with_gelu(source):
    gelu = torch.jit.script(source.gelu)
    return lambda x: gelu(gelu(x.cos()) * x).sin()


def in_place(source):
    function = torch.jit.script(source.in_place)
    return lambda x: function(x.exp()).sin()


def through_python(source):
    outer, other = torch.jit.script(source.with_python), torch.jit.script(source.gelu)
    return lambda x: other(outer(x)).sin()


def block_with_bias_gelu(source):
    torch.manual_seed(3)
    up, down, bias = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.zeros(16))
    bias_gelu = torch.jit.script(source.bias_gelu)
    return lambda x: down(bias_gelu(up(x), bias))


def frozen_layers(source):
    """One function for several layers, of which others are trained in each step."""
    function = torch.jit.script(source.scaled)
    weights = Log()  # out of sight, as if they were changed between the steps
    weights.extend(torch.linspace(0.1, 1, 8) for _ in range(3))

    def run(x):
        if not is_recomputing():
            for number, weight in enumerate(weights):
                weight.requires_grad_(bool(len(x) >> number & 1))
        h = x
        for weight in weights:
            h = function(h.cos(), weight.sin()).sin()
        return h

    return run


def of_a_module(source):
    torch.manual_seed(3)
    block = torch.jit.script(source.Block())
    return lambda x: block(x.cos()).sin()


def two_traced_modules(source):
    torch.manual_seed(3)
    first, second = (torch.jit.trace(source.Block(), torch.ones(3, 8)) for _ in range(2))
    return lambda x: second(first(x.cos())).sin()


PROGRAMS = [
    with_gate,
    with_gelu,
    in_place,
    through_python,
    block_with_bias_gelu,
    frozen_layers,
    of_a_module,
    two_traced_modules,
]


def recorded(function, x, **options):
    with checkpoint_region(**options):
        return function(x)


def nested(function, x):
    return checkpoint(lambda x: checkpoint(function, x.sin()).cos(), x)


def inner_twice(function, x):
    return checkpoint(lambda x: function(checkpoint(function, x.sin())), x)


FORMS = {
    "checkpoint": checkpoint,
    "to the end": lambda function, x: checkpoint(early_stop=False)(function)(x),
    "debug": lambda function, x: checkpoint(debug=True)(function)(x),
    "policy": lambda function, x: checkpoint(policy=policies.dots_saveable)(function)(x),
    "policy, all": lambda function, x: checkpoint(policy=policies.everything_saveable)(function)(x),
    "values": lambda function, x: checkpoint(determinism_check="values")(function)(x),
    "nested": nested,
    "inner twice": inner_twice,
    "recorded": recorded,
    "recorded inside": lambda function, x: checkpoint(lambda x: recorded(function, x.sin()).cos(), x),
    "inside recorded": lambda function, x: recorded(lambda x: checkpoint(function, x.sin()).cos(), x),
    "inside a policy": lambda function, x: checkpoint(policy=policies.everything_saveable)(
        lambda x: checkpoint(function, x.sin()).cos()
    )(x),
}
PLAIN = {
    "nested": lambda function, x: function(x.sin()).cos(),
    "recorded inside": lambda function, x: function(x.sin()).cos(),
    "inside recorded": lambda function, x: function(x.sin()).cos(),
    "inside a policy": lambda function, x: function(x.sin()).cos(),
    "inner twice": lambda function, x: function(function(x.sin())),
}


def steps(form, function, *, backwards=1, width=3):
    torch.manual_seed(0)
    found = []
    for step in range(6):
        x = torch.randn(width + step // 2, 8, requires_grad=True)
        y = form(function, x)
        for last in range(backwards)[::-1]:
            y.sum().backward(retain_graph=last > 0)
        found += [y.detach(), x.grad]
    return found


@pytest.mark.parametrize(("program", "form", "backwards"), in_turns(PROGRAMS, FORMS, (1, 2)))
def test_each_step_is_the_plain_one(source, program, form, backwards):
    plain = PLAIN.get(form, lambda function, x: function(x))
    expected = steps(plain, program(source()), backwards=backwards)
    if form == "recorded inside" and program is through_python:
        # The rerun around records other operators. A recorded region alone is right, and so is one around.
        with pytest.raises(DeterminismError):
            steps(FORMS[form], program(source()), backwards=backwards)
        return
    found = steps(FORMS[form], program(source()), backwards=backwards)
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def test_a_policy_is_asked_about_operators_of_a_scripted_function(source):
    asked = Log()

    def policy(ctx, operator, *args, **kwargs):
        asked.append(str(operator))
        return CheckpointPolicy.PREFER_RECOMPUTE

    found = steps(lambda function, x: checkpoint(policy=policy)(function)(x), with_gelu(source()))
    assert all(map(same, found, steps(lambda function, x: function(x), with_gelu(source()))))
    assert list(asked).count("aten.tanh.default") == 2 * 6


def test_what_a_call_saves_is_kept_and_nothing_after_a_step(source):
    gelu, seen = torch.jit.script(source().gelu), []

    def function(x):
        h = x.cos()
        seen.append(weakref.ref(h.untyped_storage()))
        return gelu(h).sin()

    for _ in range(4):
        seen.clear()
        y = checkpoint(function, torch.ones(2, 8, requires_grad=True))
        assert seen[0]() is not None
        y.sum().backward()
        del y
        assert [reference() for reference in seen] == [None] * len(seen)


def test_a_recorded_region_drops_what_a_call_saves(source):
    gelu, seen = torch.jit.script(source().gelu), []
    for _ in range(4):
        with checkpoint_region() as region:
            h = torch.ones(2, 8, requires_grad=True).cos()
            seen.append(weakref.ref(h.untyped_storage()))
            y = gelu(h).sin()
        del h
        assert (seen.pop()(), region.kept()) == (None, [])
        y.sum().backward()


def test_the_users_hooks_inside_get_what_a_call_saves(source):
    def found(form):
        gelu, packed = torch.jit.script(source().gelu), Log()

        def pack(tensor):
            if not is_recomputing():
                packed.append(tensor.shape)
            return tensor

        def function(x):
            h = x.cos()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return gelu(h) * h

        results = [packed]
        for _ in range(3):
            x = torch.linspace(-1, 1, 8).view(1, 8).requires_grad_()
            form(function, x).sum().backward()
            results.append(x.grad.tolist())
        return results

    expected = found(lambda function, x: function(x))
    assert expected[0]
    assert found(checkpoint) == expected
