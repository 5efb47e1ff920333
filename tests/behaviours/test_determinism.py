"""Determinism and errors: a rerun that does something else is noticed, one that fails or is cut short does no harm."""

from __future__ import annotations

import contextlib
import random
import re

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torch.utils.flop_counter
from torch import nn

import ckpt_hooks
from tests.behaviours.runs import (
    FORMS,
    UNNOTICED,
    Run,
    assert_as_eager,
    gradients,
    runs,
    same,
)
from tests.measure import Log, Table, as_library, leaf


@as_library
class Switch:
    """A function that does one thing at first and, once ``then`` was called, another thing."""

    def __init__(self, first, other):
        self.function, self.other = first, other

    def __call__(self, x):
        return self.function(x)

    def then(self):
        self.function = self.other


# Other tensors than those of forward


def first(x):
    return x.sin().cos().exp()


# What the rerun does instead, and what the error should say: index, node, expected, found.
DIFFERENCES = {
    "count": (lambda x: x.sin(), 1, "CosBackward0", "3 tensors", "1 tensors"),
    "shape": (lambda x: first(x[:2]), 0, "SinBackward0", "float64[3] on cpu", "float64[2] on cpu"),
    "dtype": (lambda x: first(x.float()), 0, "SinBackward0", "float64[3] on cpu", "float32[3] on cpu"),
    "device": (lambda x: first(x.to("meta")), 0, "SinBackward0", "float64[3] on cpu", "float64[3] on meta"),
    "later": (lambda x: x.sin()[:2].cos().exp(), 1, "CosBackward0", "float64[3] on cpu", "float64[2] on cpu"),
}


def raised_by(run, first, other, **options):
    """Returns the error of a region that does something else when it is rerun."""
    function = Switch(first, other)
    y = run.having(**options)(function, leaf(3) * 2.0)
    function.then()
    with pytest.raises(torch.utils.checkpoint.CheckpointError) as caught:
        y.sum().backward()
    return caught.value


@pytest.mark.parametrize("difference", list(DIFFERENCES))
@runs(*FORMS)
def test_other_metadata_is_an_error(run, difference):
    phrases = "A different number of tensors was saved|have different metadata than during the forward pass"
    assert re.search(phrases, str(raised_by(run, first, DIFFERENCES[difference][0])))


@pytest.mark.parametrize("difference", list(DIFFERENCES))
@runs(torch_fails=AttributeError)
def test_other_metadata_is_said_where(run, difference):
    other, index, grad_fn, expected, found = DIFFERENCES[difference]
    error = raised_by(run, first, other, name="block")
    assert (error.region, error.index, error.expected, error.found) == (("block",), index, expected, found)
    assert error.grad_fn == grad_fn
    assert "block" in str(error)
    assert grad_fn in str(error)
    assert isinstance(error, ckpt_hooks.DeterminismError)


# Other values

_scales = Table(now=1.0)


def by_global(run):
    """Whose content is changed in place; one that is bound to another object is another one for forward alone."""
    x = leaf(3)
    y = run(lambda x: (x * _scales["now"]).sin().exp(), x)
    return y, lambda: _scales.update(now=2.0)


@as_library
class Settings:
    """An object that no region puts back."""

    doubled = True


class ScaledByFlag(nn.Module):
    """Does something else when an object that it has says so."""

    def __init__(self):
        super().__init__()
        self.config = Settings()

    def forward(self, x):
        return (x * (2.0 if self.config.doubled else 1.0)).sin().exp()


def by_object(run):
    module = ScaledByFlag()
    return run(module, leaf(3)), lambda: setattr(module.config, "doubled", False)


def by_swapped_operators(run):
    function = Switch(lambda x: x.sin().cos().exp(), lambda x: x.cos().sin().exp())
    return run(function, leaf(3)), function.then


def by_swapped_rows(run):
    """The same numbers at other places."""
    function = Switch(lambda x: x.sin().cos(), lambda x: x.flip(0).sin().cos())
    return run(function, leaf(3)), function.then


def by_even_numbers_of_equal_values(run):
    """Of which a hash by exclusive or sees nothing: four of anything are zero to it."""
    function = Switch(lambda x: x * torch.full((4,), 2.0), lambda x: x * torch.full((4,), 3.0))
    return run(function, leaf(4)), function.then


VALUES = {
    "global changed": by_global,
    "object changed": by_object,
    "operators swapped": by_swapped_operators,
    "equal values": by_even_numbers_of_equal_values,
}


def fails_by_values(make, run):
    y, change = make(run)
    change()
    with pytest.raises(torch.utils.checkpoint.CheckpointError) as caught:
        y.sum().backward()
    return caught.value


@pytest.fixture(autouse=True)
def _scale_is_put_back(monkeypatch):
    monkeypatch.setitem(_scales, "now", 1.0)


@pytest.mark.parametrize("check", ["values", lambda tensor: tensor.double().sum(), lambda t: t.tolist()])
@pytest.mark.parametrize("change", list(VALUES))
@runs("region", "nested", torch_fails=UNNOTICED)
def test_other_values_are_noticed(run, change, check):
    error = fails_by_values(VALUES[change], run.having(determinism_check=check))
    assert isinstance(error, ckpt_hooks.DeterminismError)
    assert isinstance(error.index, int)
    assert error.expected != error.found


@pytest.mark.parametrize("check", [lambda tensor: tensor.flatten()[::2], lambda tensor: tensor.tolist()])
@runs("region", "nested", torch_fails=UNNOTICED)
def test_the_same_values_at_other_places_are_noticed(run, check):
    error = fails_by_values(by_swapped_rows, run.having(determinism_check=check))
    assert isinstance(error, ckpt_hooks.DeterminismError)
    assert error.expected != error.found


def of_many_kinds(run):
    """Saves tensors of many dtypes and layouts, with values that are not equal to themselves."""

    def function(x, z, index):
        h = x.float().bfloat16().sin()
        h = h.t()[1:, ::2].exp().double()
        picked = x.double()[index].masked_fill(x.double()[index] > 0, 0.5)
        empty = x[:0].exp().sum()
        infinite = (x / 0).sin() * (x / 0)
        return h.sum() + picked.tan().sum() + (z * z.conj()).real.sum() + empty + infinite.half().sin().sum()

    x = torch.randn(3, 4, requires_grad=True)
    z = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    y = run(function, x, z, torch.tensor([2, 0]))
    y.backward()
    return [torch.nan_to_num(t, nan=7.0) for t in (y.detach(), x.grad)] + [z.grad]


@pytest.mark.parametrize("check", ["default", "none", "values", lambda tensor: tuple(tensor.shape)])
@runs(*FORMS[:2])
def test_exact_reruns_pass_every_check(run, check):
    assert_as_eager(of_many_kinds, run.having(determinism_check=check))


@pytest.mark.parametrize("result", ["tensor", "number"])
def test_a_check_of_ones_own_sees_each_saved_tensor_of_both_runs(result):
    seen = []

    def check(tensor):
        seen.append(tensor.detach().clone())
        return tensor.sum() if result == "tensor" else tensor.sum().item()

    x = leaf(3)
    Run("ours").having(determinism_check=check)(lambda x: (x * 2).sin().cos(), x).sum().backward()
    expected = [x.detach() * 2, (x.detach() * 2).sin()]
    assert [same(a, b) for a, b in zip(seen, expected * 2, strict=True)] == [True] * 4


def of_lstm(**options):
    return lambda: (nn.LSTM(4, 6, **options), lambda module, x: module(x)[0], (3, 5, 4))


UNFILLED = {
    "LSTM": of_lstm(num_layers=2, batch_first=True),
    "LSTM in both directions": of_lstm(bidirectional=True),
    "two layers in both directions": of_lstm(bidirectional=True, num_layers=2),
    "two LSTMs": lambda: (
        nn.ModuleList([nn.LSTM(4, 6), nn.LSTM(4, 6)]),
        lambda modules, x: torch.stack([module(x)[1][0] for module in modules]),
        (3, 5, 4),
    ),
    "ctc_loss": lambda: (
        None,
        lambda _, x: F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2], [3, 3]]), torch.tensor([6, 5]), torch.tensor([2, 1])),
        (6, 2, 4),
    ),
    "rrelu that is not in training": lambda: (nn.RReLU().eval(), lambda module, x: module(x).exp(), (300,)),
}


@pytest.mark.parametrize("around", ["nothing", "the self-check", "a mode"])
@pytest.mark.parametrize("kind", list(UNFILLED))
def test_operators_that_save_memory_which_they_do_not_fill(kind, around):
    """What is in there differs with each run, and is nothing that backward reads."""
    module, function, shape = UNFILLED[kind]()
    for _ in range(8):
        x, garbage = torch.randn(shape, requires_grad=True), [torch.randn(n * 100) for n in range(1, 60)]
        if around != "a mode":
            options = {} if around == "the self-check" else {"determinism_check": "values"}
            y = Run("ours").having(**options)(function, module, x)
        else:
            with torch.utils.flop_counter.FlopCounterMode(display=False), ckpt_hooks.checkpoint_region():
                y = function(module, x)
        del garbage
        y.sum().backward()


MAKES = []


@torch.library.custom_op("ckpt_hooks_tests::memory", mutates_args=())
def memory_of(x: torch.Tensor) -> torch.Tensor:
    """Returns what the last of ``MAKES`` does: other memory each time."""
    return MAKES[-1]()


def operator(node, *, saves_result):
    """Returns an operator with a node of that name, which saves memory besides its input."""

    def forward(ctx, x):
        y, memory = x.exp(), memory_of(x)
        ctx.save_for_backward(*((x, y, memory) if saves_result else (x, memory)))
        ctx.mark_non_differentiable(memory)
        return y, memory

    def backward(ctx, grad, _):
        return grad * ctx.saved_tensors[0].exp()

    name = node.removesuffix("Backward")
    made = type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    return lambda x: made.apply(x)[0]


SEEDS = {
    "state of a generator": lambda n: torch.tensor([n, n], dtype=torch.uint64),
    "seed": lambda n: torch.tensor(n),
    "offset": lambda n: torch.tensor(n, dtype=torch.uint64),
    "unused": lambda n: torch.tensor(float(n)),
}
BYTES = {"workspace": lambda n: torch.full((9,), n, dtype=torch.uint8)}
ATTENTION = [
    "ScaledDotProductFlashAttentionBackward",
    "ScaledDotProductEfficientAttentionBackward",
    "ScaledDotProductCudnnAttentionBackward",
    "ScaledDotProductFusedAttentionOverrideableBackward",
    "FlashAttentionBackward",
    "EfficientAttentionBackward",
    "CudnnAttentionBackward",
]
LIBRARIES = [
    "CudnnRnnBackward",
    "MiopenRnnBackward",
    "CudnnBatchNormBackward",
    "MiopenBatchNormBackward",
    "NativeBatchNormBackward",
    "BatchNormWithUpdateBackward",
    "BatchNormNoUpdateBackward",
]


def save_memory(node, make, check, around, *, saves_result):
    """Runs a region with an operator of that name, to which memory is never the same, forward and backward."""
    values = iter(range(1, 9))
    MAKES[:] = [lambda: make(next(values))]
    function = operator(node, saves_result=saves_result)
    x = leaf(3)
    if around == "nothing":
        y = Run("ours").having(determinism_check=check)(lambda x: function(x).sin(), x)
    else:
        with torch.utils.flop_counter.FlopCounterMode(display=False), ckpt_hooks.checkpoint_region():
            y = function(x).sin()
    y.sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


@pytest.mark.parametrize("saves_result", [True, False])
@pytest.mark.parametrize(("check", "around"), [("values", "nothing"), ("values", "a mode")])
@pytest.mark.parametrize(
    ("node", "make"),
    [
        *(pytest.param(node, make, id=f"{name} of {node}") for node in ATTENTION for name, make in SEEDS.items()),
        *(pytest.param(node, make, id=f"{name} of {node}") for node in LIBRARIES for name, make in BYTES.items()),
    ],
)
def test_memory_that_operators_of_devices_leave_unfilled(node, make, check, around, saves_result):
    assert any(name.rstrip("0123456789") == node for name in dir(torch._C._functions))
    save_memory(node, make, check, around, saves_result=saves_result)


def test_what_such_an_operator_fills_is_compared():
    """Its inputs and results, and of one that may fill all, what it fills."""
    lstm = nn.LSTM(4, 6, bidirectional=True)
    factor = Log([1.0])

    def function(x):
        return lstm(x * factor[0])[0].sin()

    y = Run("ours").having(determinism_check="values")(function, torch.randn(3, 5, 4, requires_grad=True))
    factor[0] = 2.0
    with pytest.raises(ckpt_hooks.DeterminismError, match="Recomputed values differ"):
        y.sum().backward()


class Clamped(nn.Module):
    """Writes to its parameter in each forward, so that a rerun is watched, by a dispatch mode."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x):
        with torch.no_grad():
            self.scale.clamp_(-1, 1)
        return (x.sin() * self.scale).exp()


@pytest.mark.parametrize("mode", ["none", "in forward", "in backward", "watched", "in a region"])
@pytest.mark.parametrize("check", ["default", "none"])
def test_operators_that_write_unless_there_is_a_mode(mode, check):
    """``linear`` adds its bias in place, and out of place under any dispatch mode: what is saved next has another version."""

    def program(run):
        linear, clamped = nn.Linear(4, 3), Clamped()
        x = torch.randn(3, 2, 4, requires_grad=True)

        def function(x):
            h = linear(x)
            return clamped(h) if mode == "watched" else h.sin().exp()

        with contextlib.ExitStack() as around:
            if mode == "in forward":
                around.enter_context(torch.utils.flop_counter.FlopCounterMode(display=False))
            if mode == "in a region" and run.ours:
                around.enter_context(ckpt_hooks.checkpoint_region())
            y = (run.having(determinism_check=check) if run.ours else run)(function, x.transpose(0, 1))
        with torch.utils.flop_counter.FlopCounterMode(display=False) if mode == "in backward" else contextlib.nullcontext():
            return gradients(y, x, *linear.parameters())

    assert_as_eager(program, Run("ours"))


def test_a_check_of_ones_own_in_a_dict():
    """Compared like anything in a list, not-a-numbers included."""

    def check(tensor):
        return {"tensor": tensor.detach() * float("nan"), "numbers": [1.0, float("nan")]}

    run = Run("ours").having(determinism_check=check)
    run(lambda x: (x * 2).sin().cos(), leaf(3)).sum().backward()
    other = iter([1.0, 1.0, 1.0, 2.0])
    run = Run("ours").having(determinism_check=lambda tensor: {"key": torch.tensor([next(other), float("nan")])})
    with pytest.raises(ckpt_hooks.DeterminismError, match="Recomputed values differ"):
        run(lambda x: (x * 2).sin().exp(), leaf(3)).sum().backward()


FINGERPRINTS = {
    "an array of NumPy": lambda tensor: pytest.importorskip("numpy").asarray(tensor.detach()),
    "a dict of tensors": lambda tensor: {"tensor": tensor.detach() * 1},
    "a list of numbers and tensors": lambda tensor: [1, None, tensor.detach() * 1],
}


@pytest.mark.parametrize("check", FINGERPRINTS.values(), ids=FINGERPRINTS)
def test_a_check_of_ones_own_sees_buffers_that_forward_updates(check):
    """Batch normalization saves its running statistics: what a check returns for them is compared within forward too."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    run = Run("ours").having(determinism_check=check)
    run(module, torch.randn(5, 4, requires_grad=True)).sum().backward()


# Random numbers of other libraries, which are tracked or not


def by_control_flow(x):
    return (x * 2).sin() if random.random() < 0.5 else (x * 2).sin().exp()


FINGERPRINTS = ["values", lambda tensor: tensor.sum()]


def second_of(seed):
    source = random.Random(seed)
    source.random()
    return source.random()


@pytest.mark.parametrize("check", FINGERPRINTS)
def test_a_branch_by_a_random_number_that_is_not_tracked(check):
    random.seed(next(seed for seed in range(100) if random.Random(seed).random() < 0.5 <= second_of(seed)))
    y = Run("ours").having(determinism_check=check, early_stop=False)(by_control_flow, leaf(3))
    with pytest.raises(ckpt_hooks.DeterminismError, match=r"ckpt_hooks\.track_rng"):
        y.sum().backward()
