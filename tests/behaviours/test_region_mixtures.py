"""What makes replays hard: writes to memory of which some faces are kept, writes that fail, subclasses, failed replays."""

from __future__ import annotations

import contextlib

import pytest
import torch

from ckpt_hooks import GraphExecGroup, checkpoint, checkpoint_region, policies
from ckpt_hooks.report import Reason

ATEN = torch.ops.aten


def gradient(function, *, region=None):
    """Runs a function of a tensor, in a region if one is given; returns its output and the gradient."""
    x = (torch.arange(8.0).reshape(2, 4) / 7 - 0.4).requires_grad_()
    if region is None:
        y = function(x)
    else:
        with region:
            y = function(x)
    y.sum().backward()
    return y.detach().clone(), x.grad


def assert_same(function, policy=None, hooks=None, **options):
    expected = gradient(function)
    with contextlib.nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks):
        found = gradient(function, region=checkpoint_region(policy=policy, **options))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


COPYING = (lambda tensor: tensor.detach().clone(), torch.clone)


@pytest.mark.parametrize("hooks", [None, COPYING], ids=["no hooks", "copying hooks"])
@pytest.mark.parametrize("kept", ["sin", "mul_", "add_"])
def test_one_write_that_is_kept_and_another_one_that_is_not(kept, hooks):
    """With views of the memory that are read in between and afterwards."""

    def function(x):
        h = x.sin()
        first, second = h.unsafe_split(1)
        view = h.view(-1)
        h.mul_(0.5)
        u = view.exp()
        view[:3].add_(1)
        return (h.cos() * u.view(2, 4)).sum(0) + first * second.sin()

    operators = {"sin": ATEN.sin.default, "mul_": ATEN.mul_.Tensor, "add_": ATEN.add_.Tensor}
    assert_same(function, [operators[kept]], hooks)


@pytest.mark.parametrize("whole", [True, False])
def test_copies_of_what_hooks_brought_back_are_told_apart(whole):
    """By the memory that they are copies of, which may be gone and somebody else's by the time the next one comes."""
    weights = [torch.full((4, 4), 0.1 * (i + 1)) + torch.eye(4) for i in range(6)]

    def function(x):
        return sum(((x @ weight).relu_() * weight.sum()).sin() for weight in weights)

    assert_same(function, policies.dots_saveable, COPYING, replay_whole=whole)


def test_a_write_that_raises_half_way():
    """What it wrote is seen, though there is no operator on the tape that did it."""

    def function(x):
        h, small = x.sin(), torch.zeros(3)
        with contextlib.suppress(RuntimeError):
            torch._foreach_add_([h, small], [torch.ones(2, 4), torch.ones(2, 2)])
        return (h * h.cos()).exp()

    assert_same(function)


def test_a_policy_that_raises_after_a_write():
    """The write has happened; the error is the policy's, and who goes on finds what was written.

    Policies are asked about operators that write only where these return something new besides, as batch norm does.
    """

    def policy(ctx, op, *args, **kwargs):
        if op is ATEN.native_batch_norm.default:
            raise KeyError("not today")
        return policies.CheckpointPolicy.PREFER_RECOMPUTE

    def function(x, raises=True):
        h, mean = x.sin(), torch.zeros(4).add_(0.5)
        with contextlib.suppress(KeyError):
            torch.nn.functional.batch_norm(h, mean, torch.ones(4), training=True)
            assert not raises
        return (h.cos() * mean).exp()

    y = gradient(function, region=checkpoint_region(policy=policy))
    x = (torch.arange(8.0).reshape(2, 4) / 7 - 0.4).requires_grad_()
    expected = function(x, raises=False)
    expected.sum().backward()
    assert torch.equal(y[0], expected.detach())
    assert torch.equal(y[1], x.grad)


def test_noise_that_is_saved_before_it_is_drawn_is_not_kept():
    """``rrelu`` saves memory that nobody has written to yet; what is drawn into it is brought back."""
    x = torch.linspace(-1, 1, 8, requires_grad=True)
    with checkpoint_region() as region:
        torch.nn.functional.rrelu(x.sin(), training=True).exp()
        y = torch.nn.functional.rrelu(x.sin(), training=True).exp()
    assert {kept.reason for kept in region.kept()} == {Reason.RANDOM_STATE}
    assert y.requires_grad


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


def test_writes_by_way_of_a_subclass():
    """To memory of the tape, and to memory from outside."""
    outside = torch.ones(2, 4)

    def function(x):
        h = x.sin()
        k = h * 2
        h.detach().as_subclass(Tagged).mul_(2)
        outside.as_subclass(Tagged).add_(1)
        return (k * h.detach()).exp() * outside

    expected = gradient(function)
    outside.fill_(1)
    found = gradient(function, region=checkpoint_region())
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_a_cast_that_autocast_has_made_before_the_region_around(policy):
    """A rerun of the function finds it not made, and does not count it either."""
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)

    def gradients(call, region):
        def function(h):
            with region:
                return layer(h).sin()

        with torch.autocast("cpu", torch.bfloat16):
            y = call(function, layer(x)).float()
        return torch.autograd.grad(y.sum(), [x, *layer.parameters()])

    expected = gradients(lambda function, h: function(h), contextlib.nullcontext())
    assert all(map(torch.equal, gradients(checkpoint, checkpoint_region(policy=policy)), expected))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_backward_whose_gradients_a_rerun_adds_to():
    """A rerun of the function around finds those of forward, and does not count what it reads of them."""

    def gradients(call, region):
        w, x = torch.eye(3).requires_grad_(), torch.ones(3, 3, requires_grad=True)

        def function(x):
            with region:
                h = (x @ w).sin()
                (h.detach() * w).exp().sum().backward(create_graph=True, inputs=[w])
                return (h @ w).cos()

        return torch.autograd.grad(call(function, x).sum(), [x, w])

    expected = gradients(lambda function, x: function(x), contextlib.nullcontext())
    found = gradients(checkpoint, checkpoint_region(policy=policies.dots_saveable))
    assert all(map(torch.equal, found, expected))


def test_a_warning_that_is_an_error_leaves_no_mode_behind():
    """Of a policy that names an operator which does not come; equal lists are one policy, and warn once."""
    for _ in range(2):
        gradient(torch.sin, region=checkpoint_region(policy=[ATEN.erfinv.default]))
    with pytest.raises(UserWarning, match="regions under it had"):  # warnings are errors in these tests
        gradient(torch.sin, region=checkpoint_region(policy=[ATEN.erfinv.default]))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_replay_that_failed_in_a_group_can_be_asked_again():
    x = torch.ones(4, requires_grad=True)
    with checkpoint_region():
        y = x.sin().exp().cos()
    once = [True]

    class Fail(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is ATEN.exp.default and once:
                once.clear()
                raise MemoryError
            return func(*args, **(kwargs or {}))

    with GraphExecGroup():
        with Fail(), pytest.raises(MemoryError):
            torch.autograd.grad(y.sum(), x, retain_graph=True)
        (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(x.sin().exp().cos().sum(), x)
    assert torch.equal(found, expected)
