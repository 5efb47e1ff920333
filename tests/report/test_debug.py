"""Debug mode: errors begin with the first operator that differs, its line and its module."""

from __future__ import annotations

import inspect
import math
import pathlib
import pickle
import re
import weakref

import pytest
import torch
from torch import nn

from ckpt_hooks import DeterminismError, checkpoint, is_recomputing
from tests import golden
from tests.measure import Log, leaf

pytestmark = pytest.mark.usefixtures("no_gc")

SCALE = Log([1.0])

# Held where no region looks, so that a recompute finds its mode of today.
OUT_OF_REACH = {"dropout": [nn.Dropout(0.5)]}


def place(function: object, text: str) -> str:
    """Returns file and line of the line of a function that has a text in it."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [number for number, line in enumerate(lines) if text in line]
    return f"{pathlib.Path(inspect.getsourcefile(function)).name}:{first + found}"


class Layer(nn.Module):
    """A layer with a dropout."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        h = self.linear(x).exp()
        h = OUT_OF_REACH["dropout"][0](h)  # a line that faults blame
        return h.sin().exp().cos()


def swapped_operators(x):
    h = x.exp().sin()
    h = h.cos().tan() if not is_recomputing() else h.tan().cos()  # swapped
    return (h * x).exp().sin()


def missing_operator(x):
    h = x.exp().sin()
    if not is_recomputing():
        h = h.cos()  # missing
    h = h.sin()
    return (h * x).exp().sin()


def surplus_operator(x):
    h = x.exp().sin()
    if is_recomputing():
        h = h.cos()  # surplus
    h = h.sin()
    return (h * x).exp().sin()


def other_dtype(x):
    h = x.exp().sin()
    h = h.to(torch.float16 if is_recomputing() else torch.float32)  # cast
    return (h * x).exp().sin()


def message_of(function, x, change=lambda: None, **options):
    y = checkpoint(function, x, debug=True, **options)
    change()
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    return str(caught.value)


def head_of(message):
    """Returns the lines before the operators around."""
    return message.partition("Operators around")[0]


@pytest.fixture(autouse=True)
def scale():
    SCALE.clear()
    SCALE.append(1.0)


@pytest.mark.parametrize(
    ("function", "line", "blamed"),
    [
        (swapped_operators, "# swapped", "Forward ran aten.cos.default, and the recompute ran aten.tan.default"),
        (missing_operator, "# missing", "Forward ran aten.cos.default, and the recompute did not"),
        (surplus_operator, "# surplus", "The recompute ran aten.cos.default, and forward did not"),
        (other_dtype, "# cast", "aten._to_copy.default had other arguments"),
    ],
    ids=["swapped", "missing", "surplus", "dtype"],
)
def test_faults(function, line, blamed):
    message = message_of(function, leaf(3), determinism_check="values")
    first, second = message.split("\n")[:2]
    assert f"the recompute first differs at {place(function, line)} in {function.__name__}()" in first
    assert first.endswith(line)
    assert blamed in second


@pytest.mark.parametrize("training", [True, False])
def test_another_mode_of_a_module(training):
    """The line and the module are named, of a module in a model and of the region's own."""
    layer, (dropout,) = Layer(), OUT_OF_REACH["dropout"]
    dropout.train(training)
    model = nn.Sequential(nn.Identity(), checkpoint(debug=True)(layer))
    y = model(torch.ones(2, 3, requires_grad=True))
    dropout.train(not training)
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    head = head_of(str(caught.value))
    assert place(Layer, "# a line that faults blame") in head.split("\n")[0]
    assert "module Dropout" in head.split("\n")[0]
    assert "module 1 (" in str(caught.value)  # by its name in the model, where it has one


def helped(x):
    return x.tan()


def steps(x, forward, recompute):
    generator = torch.Generator()
    for name in (recompute if is_recomputing() else forward).split():
        if name == "sin":
            x = x.sin()
        elif name == "other":
            x = x.sin()  # at another line
        elif name == "table":
            torch.arange(3).sin()
        elif name == "noise":
            x = x + torch.rand(3)
        elif name == "generator":
            x = x + torch.rand(3, generator=generator)
        elif name == "single":
            x = x.float().double()
        elif name == "cast":
            x = x.to(torch.float16 if is_recomputing() else torch.float32).double()
        elif name == "value":
            x = x + torch.tensor([float(is_recomputing())] * 3)
        elif name == "nan":
            x = x.mul(math.nan).nan_to_num()
        elif name == "sort":
            x = x.sort(descending=is_recomputing()).values
        elif name in ("lt", "le", "gt", "ge", "eq", "ne"):
            x = x + getattr(torch, name)(x, 0)
        elif name == "helped":
            x = helped(x)
        else:
            x = getattr(torch, name)(x)
    return x


def test_whole_messages():
    """Of operators that are missing, surplus, swapped, moved, in one run without a gradient, and of runs with nothing alike."""
    lines = []
    for pair in (
        *("cos exp|cos tan", "sin cos exp tan sin|sin exp tan sin", "sin exp tan sin|sin cos exp tan sin"),
        *(f"sin {'cos ' * 9}exp tan|sin exp tan", f"sin exp tan|sin {'cos ' * 9}exp tan", "sin cos tan exp|sin tan cos exp"),
        *("sin cos exp|other cos tan", "sin other exp|other sin tan", "sin table exp cos|sin exp tan", "sin cos|sin table tan"),
        *("noise exp cos|generator exp tan", "generator exp cos|noise exp tan", "sin exp cos|sin single exp cos"),
        *(
            "sin cos exp|sin cos",
            "sin cos|sin cos exp",
            "sin cos exp tan|tan exp cos sin",
            "sin exp|",
            "lt le gt ge eq ne exp|lt le gt ge eq ne tan",
        ),
        *("sin table exp cos tan sin|sin exp cos sin tan", "sin exp cos tan sin|sin table exp cos sin tan", "nan exp|nan tan"),
        *(
            "sin other cos exp|other cos exp",
            "other cos exp|sin other cos exp",
            "sin cos|sin helped",
            "sin cast exp|sin cast exp",
        ),
        *("sin table cos exp tan|sin cos exp tan exp", "sort sin|sort sin", "lt exp|lt tan", "sin helped cos|helped sin cos"),
        *(
            "table sin exp cos tan|sin exp other tan",
            "sin exp cos|sin exp sin",
            "value table exp|value exp",
            "lt lt gt le ge exp|lt lt gt le ge tan",
        ),
        *("sort sin exp cos|sort sin exp tan", "sin exp cos exp sin|sin exp cos sin sin", f"{'sin ' * 120}cos exp|cos exp"),
    ):
        for early_stop in (True, False):
            y = checkpoint(steps, leaf(3), *pair.split("|"), debug=True, determinism_check="values", early_stop=early_stop)
            try:
                y.sum().backward()
            except DeterminismError as error:
                found = [f"\n{pair} {error.routing} {re.findall('[0-9] more again', str(error))}"]
                for line in str(error).partition("You are seeing")[0].splitlines():
                    row = re.fullmatch(r"  (.) +(\d+) aten\.(.*?)\(.*", line)
                    found.append(" ".join(row.groups()) if row else re.sub(r"(aten[\w.]+)\(.*", r"\1", line))
                lines += [line for line in [", ".join(found).replace(":, ", ": ")] if line not in lines]
            else:
                lines.append(f"\n{pair}: nothing")
    golden.check("debug", "\n".join(lines))


def test_another_function_altogether():
    """Then operators are compared, and no lines."""
    todo = Log([lambda x: x.sin().cos().exp(), lambda x: x.sin().tan().cos().exp()])
    message = message_of(lambda x: (todo.pop(0) if len(todo) > 1 else todo[0])(x), leaf(3), early_stop=False)
    assert "The recompute ran aten.tan.default, and forward did not." in message


def test_an_error_without_a_difference_of_operators():
    values = (float(number) for number in (1, 2))  # a generator only goes on

    def function(x):
        return (x * torch.full_like(x, 2.0).copy_(torch.tensor([next(values)] * 3))).exp()

    message = message_of(function, leaf(3), determinism_check="values")
    assert "ran the same operators" in message.split("\n")[0]


def test_operators_around_it_and_both_logs():
    y = checkpoint(missing_operator, leaf(3), debug=True)
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    error, message = caught.value, str(caught.value)
    _, forward, recompute = message.split("Operators around it in ")
    assert [line for line in forward.split("\n") if line.startswith("  >")] == [
        f"  >    2 aten.cos.default(float64[3] on cpu) -> float64[3] on cpu  {place(missing_operator, '# missing')}"
    ]
    assert "  >" not in recompute.partition("You are seeing")[0]
    assert [line.partition("(")[0] for line in error.operators] == [
        *("aten.exp.default", "aten.sin.default", "aten.cos.default", "aten.sin.default"),
        *("aten.mul.Tensor", "aten.exp.default", "aten.sin.default"),
    ]
    assert [line.partition("(")[0] for line in error.recomputed_operators] == [
        *("aten.exp.default", "aten.sin.default", "aten.sin.default", "aten.mul.Tensor", "aten.exp.default", "aten.sin.default")
    ]
    assert error.operators[2].endswith("h = h.cos()  # missing")
    assert pickle.loads(pickle.dumps(error)).operators == error.operators


def test_any_number_of_backwards():
    """Each backward has a log of its own; one with another order is found by its own operators."""
    x, fails = leaf(3), Log()

    def function(x):
        h = x.exp().sin()
        if fails:
            h = h.cos()  # blamed
        return h.sin().exp()

    y = checkpoint(function, x, debug=True, determinism_check="values").sum()
    expected = torch.autograd.grad(function(x).sum(), x)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], expected[0])
    fails.append(1)
    for _ in range(2):
        with pytest.raises(DeterminismError) as caught:
            torch.autograd.grad(y, x, retain_graph=True)
        assert place(function, "# blamed") in str(caught.value).split("\n")[0]
    fails.clear()
    assert torch.equal(torch.autograd.grad(y, x)[0], expected[0])


def test_a_log_keeps_no_tensor_alive():
    gone, calls = [], Log()

    def function(x):
        calls.append(1)
        h = torch.stack([x.sin(), x.cos()])
        gone.append(weakref.ref(h))
        h.add_(1)
        y = h.exp()
        return y.sin() if len(calls) < 2 else y

    y = checkpoint(function, leaf(3), debug=True)
    assert gone[0]() is None
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    assert [line.partition(" at ")[0] for line in caught.value.operators[2:4]] == [
        "aten.stack.default([float64[3] on cpu, float64[3] on cpu]) -> float64[2, 3] on cpu",
        "aten.add_.Tensor(float64[2, 3] on cpu, 1) -> float64[2, 3] on cpu",
    ]
