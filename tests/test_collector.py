"""Rules 5 and 8: when a rerun stops, and that nobody can keep it from stopping; what it must have saved."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad

from ckpt_hooks import CheckpointError, DeterminismError, checkpoint
from tests.measure import Calls, CountOps, Log, leaf


@pytest.mark.parametrize("inplace", [False, True])
def test_rule_5_rrelu_is_finished_before_the_stop(inplace):
    """An operator that saves an input and fills it only then is right, also as the last one of a region."""
    module = torch.nn.RReLU(inplace=inplace)
    x = leaf(64)
    torch.manual_seed(3)
    (g,) = grad(checkpoint(lambda x: module(x.sin()), x).sum(), x)
    torch.manual_seed(3)
    (expected,) = grad(module(x.sin()).sum(), x)
    assert torch.equal(g, expected)


def test_rule_5_rrelu_with_a_noise_buffer_that_was_written_before():
    """The same where the tensor that is filled quietly is not fresh and has a version."""

    def function(x):
        noise = torch.empty_like(x).fill_(0.0).add_(7.0)
        return torch.ops.aten.rrelu_with_noise(x.sin(), noise, 0.1, 0.3, True)

    x = leaf(64)
    torch.manual_seed(3)
    (g,) = grad(checkpoint(function, x).sum(), x)
    torch.manual_seed(3)
    (expected,) = grad(function(x).sum(), x)
    assert torch.equal(g, expected)


def test_rule_5_waiting_for_an_operator_ends_with_the_next_one_that_saves():
    """Where the last value is of an operator that may not be through, the stop comes at the next saving operator."""
    x, mask = leaf(3), torch.ones(3, dtype=torch.float64)
    a, b = checkpoint(lambda x: ((m := x.sin() * mask.neg()), m.neg().exp().tanh()), x)
    del b
    with CountOps() as ops:
        a.sum().backward()
    # ``mul`` saves a tensor that needs no gradient, so it runs again (and once as its own backward); ``exp`` saves its result
    # and meets the stop there; ``tanh`` is not reached.
    assert ops.counts["mul"] == 1 + 2
    assert ops.counts["exp"] == 1
    assert ops.counts["tanh"] == 0


def test_rule_5_frozen_weights_do_not_delay_the_stop():
    """A parameter that needs no gradient was complete before the region ran."""
    linear = torch.nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
    x = leaf(2, 3)
    y = checkpoint(lambda x: linear(x.sin()), x)
    with CountOps() as ops:
        y.sum().backward()
    assert ops.counts["addmm"] == 0


class NotesAdditions:
    """Something to add to a tensor, which has a side effect."""

    def __init__(self):
        self.count = 0

    def __radd__(self, tensor):
        self.count += 1
        return tensor


@pytest.mark.parametrize("size", [1, 1 << 16])
def test_rule_5_what_comes_after_the_last_saved_tensor_does_not_run_again(size):
    """Whatever it is in this step and was in the steps before: an addition, one of a large tensor, or a side effect."""
    summand = torch.ones(1)

    def function(x):
        return x.clone().sin() + summand

    for _ in range(4):
        y = checkpoint(function, leaf(1))
        with CountOps() as ops:
            y.sum().backward()
        assert ops.counts["add"] == 0
    summand = torch.ones(size)
    y = checkpoint(function, leaf(1))
    with CountOps() as ops:
        y.sum().backward()
    assert ops.counts["add"] == 0
    summand = NotesAdditions()
    checkpoint(function, leaf(1)).sum().backward()
    assert summand.count == 1


@pytest.mark.parametrize("swallowed", [Exception, BaseException])
def test_rule_8_user_code_cannot_swallow_the_stop(swallowed):
    """A fallback around the last operators of a region is not taken for good: values are those of the path forward took."""
    fallbacks = Log()

    def function(x):
        try:
            return x.sin().exp()
        except swallowed:
            fallbacks.append(1)
            return x.cos().tanh().tanh()

    x = leaf(3)
    (g,) = grad(checkpoint(function, x).sum(), x)
    assert torch.equal(g, grad(x.sin().exp().sum(), x)[0])
    assert len(fallbacks) == (swallowed is BaseException)


def test_rule_8_a_function_that_fails_after_swallowing_the_stop():
    """Once every value is there, what the function does about the stop is of no consequence."""

    def function(x):
        try:
            return x.sin().exp()
        except BaseException:
            raise ValueError("cleaning up failed") from None

    x = leaf(3)
    (g,) = grad(checkpoint(function, x).sum(), x)
    assert torch.equal(g, grad(x.sin().exp().sum(), x)[0])


def test_rule_8_the_stop_comes_again():
    """Each tensor saved after the stop meets it once more."""
    stops = Log()

    def function(x):
        y = x.sin()
        for _ in range(3):
            try:
                z = y.cos()
            except BaseException as stop:
                stops.append(type(stop).__name__)
        return z if not stops else y

    x = leaf(3)
    y = checkpoint(function, x)
    grad(y.sum(), x)
    assert stops == ["StopRecompute"]  # of the three, only the last lives; it is met at that one
    stops.clear()

    def several(x):
        y, results = x.sin(), Log()
        for _ in range(4):
            try:
                results.append(y.exp())
            except BaseException as stop:
                stops.append(type(stop).__name__)
        return (results or [y])[0]

    y = checkpoint(several, x)  # the three others die at once
    grad(y.sum(), x)
    assert stops == ["StopRecompute"] * 4


def test_fewer_tensors_is_an_error():
    """A rerun that ends before every value is there names the region and both counts."""
    calls = Calls(lambda x: x.sin().cos() if calls.count == 1 else x.sin())
    x = leaf(3)
    y = checkpoint(name="block")(calls)(x)
    with pytest.raises(DeterminismError, match="A different number of tensors was saved") as caught:
        y.sum().backward()
    assert caught.value.region == ("block",)
    assert (caught.value.index, caught.value.expected, caught.value.found) == (1, "2 tensors", "1 tensors")


def test_more_tensors_is_an_error_without_early_stop():
    """With early stop off a rerun that saves more is found out."""
    calls = Calls(lambda x: x.neg().sin() if calls.count == 1 else x.neg().sin().cos())
    x = leaf(3)
    y = checkpoint(calls, x, early_stop=False)
    with pytest.raises(DeterminismError, match="trying to save more tensors during recomputation"):
        y.sum().backward()


def test_fewer_tensors_without_early_stop_is_an_error_though_all_that_live_are_there():
    """With early stop off the counts must agree, also where the missing one is not needed any more."""
    calls = Calls(lambda x: (x.neg().sin(), x.cos()) if calls.count == 1 else (x.neg().sin(),))
    x = leaf(3)
    a, b = checkpoint(calls, x, early_stop=False)
    del b
    with pytest.raises(DeterminismError, match="A different number of tensors was saved"):
        a.sum().backward()


@pytest.mark.parametrize(
    ("change", "expected", "found"),
    [
        (lambda x: x[:2], "float64[3] on cpu", "float64[2] on cpu"),
        (lambda x: x.float(), "float64[3] on cpu", "float32[3] on cpu"),
        (lambda x: x.to("meta"), "float64[3] on cpu", "float64[3] on meta"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_other_metadata_is_an_error(change, expected, found):
    """Shape, dtype and device of each value are those of forward."""
    calls = Calls(lambda x: (x if calls.count == 1 else change(x)).neg().sin().cos())
    x = leaf(3)
    y = checkpoint(calls, x)
    with pytest.raises(DeterminismError, match="have different metadata") as caught:
        y.sum().backward()
    assert (caught.value.index, caught.value.expected, caught.value.found) == (0, expected, found)
    assert "tensor at position 1:" in str(caught.value)


def test_check_none_compares_nothing():
    """With ``determinism_check="none"`` a value of another shape is handed on, and autograd finds out or not."""
    calls = Calls(lambda x: (x if calls.count == 1 else x[:1]).neg().sin())
    x = leaf(3)
    (g,) = grad(checkpoint(calls, x, determinism_check="none").sum(), x)
    assert torch.equal(g, -x[:1].neg().cos().expand(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_check_none_does_not_look_at_tensors():
    """Strided nested tensors have no shape to note."""
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], requires_grad=True)
    linear = torch.nn.Linear(3, 3)
    y = checkpoint(lambda a: linear(linear(a)), nested, determinism_check="none")
    (got,) = grad(sum(part.sum() for part in y.unbind()), linear.weight)
    assert torch.equal(got, grad(sum(part.sum() for part in linear(linear(nested)).unbind()), linear.weight)[0])


def test_a_failed_recompute_leaves_the_frame_as_it_was():
    """After an error in a rerun, backward again brings everything back anew."""
    fail = Log([False])

    def function(x):
        y = x.sin().exp()
        if fail[0]:
            raise KeyError("rerun")
        return y.cos()

    x = leaf(3)
    y = checkpoint(function, x).sum()
    for _ in range(2):
        fail[0] = True
        with pytest.raises(KeyError):
            y.backward(retain_graph=True)
        fail[0] = False
        (g,) = grad(y, x, retain_graph=True)
        assert torch.equal(g, grad(function(x).sum(), x)[0])


def test_a_rerun_that_differs_leaves_the_frame_as_it_was():
    """The same after a DeterminismError."""
    calls = Calls(lambda x: x.sin().exp() if calls.count != 2 else x.sin())
    x = leaf(3)
    y = checkpoint(calls, x).sum()
    with pytest.raises(CheckpointError):
        y.backward(retain_graph=True)
    assert torch.equal(grad(y, x)[0], grad(x.sin().exp().sum(), x)[0])


def test_keyboard_interrupt_passes():
    """An interrupt in a rerun is the user's, also after the stop."""

    def function(x):
        try:
            return x.sin().exp()
        except BaseException:
            raise KeyboardInterrupt from None

    x = leaf(3)
    y = checkpoint(function, x)
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
