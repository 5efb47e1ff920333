"""How policies are asked: about which operators, by which indices, and what they are told."""

from __future__ import annotations

import functools
import itertools
import pathlib
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt_hooks
from ckpt_hooks import CheckpointPolicy, checkpoint, checkpoint_region
from tests.measure import leaf

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def as_function(function, *args, policy):
    return checkpoint(policy=policy)(function)(*args)


def as_block(function, *args, policy):
    with checkpoint_region(policy=policy):
        return function(*args)


def as_torch(function, *args, policy, library=ckpt_hooks):
    contexts = functools.partial(library.create_selective_checkpoint_contexts, policy)
    return library.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


FORMS = pytest.mark.parametrize("run", [as_function, as_block])


class Asked:
    """A policy that notes what it is asked, and answers in turn."""

    def __init__(self, *answers):
        self.answers = answers or (RECOMPUTE,)
        self.seen = []

    def __call__(self, ctx, op, *args, **kwargs):
        self.seen.append((getattr(ctx, "index", None), str(op)))
        return self.answers[len(self.seen) % len(self.answers)]


def inputs():
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def writes(x, w):
    h = (x @ w).mul_(2).relu_()
    mask = torch.empty_like(h).bernoulli_(0.5)
    scale = h.new_empty(4, 4).copy_(h).add_(1)
    out = torch.add(h.detach(), 1, out=torch.empty(4, 4))
    h = h * mask
    h[0].zero_()
    return h.t_().exp() * scale + out


def draws(x, w):
    h = F.dropout(x @ w, 0.5)
    noise = torch.rand(4, 4) + torch.randn_like(h) + torch.bernoulli(x.detach().sigmoid())
    return torch.native_dropout(h * noise, 0.3, True)[0].exp() + F.rrelu(h, training=True)


def casts(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = F.linear(F.linear(x, w).relu(), w)
        return F.linear(h.float().exp(), w).double()


@pytest.mark.parametrize("answers", [(RECOMPUTE,), (SAVE,), (SAVE, RECOMPUTE, RECOMPUTE)], ids=["nothing", "all", "some"])
@pytest.mark.parametrize("program", [writes, draws, casts], ids=lambda program: program.__name__)
def test_operators_are_numbered_and_gradients_are_exact(program, answers):
    x, w = inputs()
    torch.manual_seed(0)
    expected = torch.autograd.grad(program(x, w).sum(), [x, w])
    policy = Asked(*answers)
    torch.manual_seed(0)
    found = torch.autograd.grad(as_function(program, x, w, policy=policy).sum(), [x, w])
    assert all(map(torch.equal, found, expected))
    assert [index for index, _ in policy.seen] == list(range(len(policy.seen)))


@FORMS
def test_what_a_policy_is_asked_about(run):
    """Neither views and their like, nor what only writes in place, nor what makes memory, nor casts that autocast keeps."""
    policy = Asked()
    x, w = inputs()
    run(writes, x, w, policy=policy)
    assert [op.split(".")[1] for _, op in policy.seen] == ["mm", "mul", "exp", "mul", "add"]
    policy = Asked()
    run(casts, x, w, policy=policy)
    assert [op for _, op in policy.seen].count("aten._to_copy.default") == 3  # none of them of a weight


def test_a_function_that_counts_its_calls_decides_the_same_in_a_rerun():
    """Autocast makes the cast of a weight in forward, and has it when the region around is rerun in the same block."""
    x, w = leaf(4, 4), torch.randn(4, 4, requires_grad=True)

    def counts():
        calls = itertools.count()
        return lambda ctx, op, *args, **kwargs: (SAVE, RECOMPUTE)[next(calls) % 2]

    def context_fn():
        return ckpt_hooks.create_selective_checkpoint_contexts(counts())

    def outer(x):
        return checkpoint(lambda x: (x @ w).sin().exp() @ w, x, context_fn=context_fn).tanh()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(outer, x.float())
        gradients = torch.autograd.grad(y.sum(), (x, w))
        expected = torch.autograd.grad(outer(x.float()).sum(), (x, w))
    assert all(map(torch.equal, gradients, expected))


DOUBLES = torch.ones(3, dtype=torch.float64)


# Bytes


def bytes_seen(run, function, *args):
    seen = []
    run(function, *args, policy=lambda ctx, op, *args, **kwargs: seen.append(ctx.nbytes) or RECOMPUTE)
    return seen


@FORMS
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.sin(), [48]),
        (lambda x: x.max(1), [8 * 2 + 8 * 2]),
        (lambda x: torch._foreach_mul([x, x.view(6)], 2.0), [48 + 48]),
        (lambda x: x.expand(5, 2, 3).sin(), [240]),
        (lambda x: x[:0].sin(), [0]),
        (lambda x: x.contiguous().to(torch.float64).view(6).exp(), [48]),
        (lambda x: F.batch_norm(x, DOUBLES * 0, DOUBLES * 1, training=True), [24, 24, 48 + 8 * 3 + 8 * 3]),
        (lambda x: (x > 0).nonzero(), [6, 12 * 8]),
        (lambda x: x.detach().abs().to_sparse(), [48, 48]),  # as a dense one
    ],
    ids=["one", "two", "list", "made larger", "empty", "no copies", "and statistics", "no gradient", "sparse"],
)
def test_bytes_of_outputs(run, function, expected):
    assert bytes_seen(run, function, leaf(2, 3).detach().abs().add(1).requires_grad_()) == expected


@FORMS
def test_memory_of_arguments_is_not_counted(run):
    """Of what an operator hands through, or says is new."""

    @torch.library.custom_op("ckpt_hooks_tests::handed_through", mutates_args=())
    def handed_through(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [y.sin(), y.new_empty(0)]

    assert bytes_seen(run, lambda x: torch.ops.ckpt_hooks_tests.handed_through(x, x), leaf(6).detach())[-1] == 48
    context = ckpt_hooks.SelectiveCheckpointContext(op_output=[torch.ones(3), None, 3])
    assert context.nbytes == 12
    x = torch.ones(3)
    context._arguments = (x,), {}
    context.op_output = [x.view(3, 1), x + 1]
    assert context.nbytes == 12


# The user's line


def line_of(function, word):
    lines = pathlib.Path(__file__).read_text().splitlines()
    start = function.__code__.co_firstlineno
    return f"test_decisions.py:{next(number for number in range(start, start + 20) if word in lines[number - 1])}"


class Layer(torch.nn.Module):
    """Runs one operator in a module of torch, and one by itself."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        h = self.linear(x)
        return h.exp()


@FORMS
def test_the_users_line(run):
    """The innermost one outside of torch and this package, of whatever policies call."""
    sites, layer = {}, Layer()

    def site_of(ctx):
        return ctx.site

    def policy(ctx, op, *args, **kwargs):
        sites[str(op)] = site_of(ctx)
        assert ctx.site == sites[str(op)]
        return RECOMPUTE

    run(layer, torch.ones(2, 3, requires_grad=True), policy=policy).sum().backward()
    assert sites == {
        "aten.addmm.default": line_of(Layer.forward, "self.linear(x)"),
        "aten.exp.default": line_of(Layer.forward, "h.exp()"),
    }


@FORMS
@pytest.mark.parametrize("inner", [checkpoint, lambda function, x: as_block(function, x, policy=None)])
def test_a_recompute_in_the_middle_of_a_region_is_no_part_of_it(run, inner):
    policy, x = Asked(), leaf(3)
    y = inner(lambda x: x.exp().sin(), x)
    run(lambda x: (y.grad_fn._saved_self, x.cos())[1], x, policy=policy)
    assert policy.seen == [(0, "aten.cos.default")]


@pytest.mark.parametrize("run", [as_function, as_block, as_torch])
def test_facts_hold_while_the_policy_decides(run, no_gc):
    """The context is the mode that runs the region's operators; a policy which keeps it keeps no tensor alive."""
    contexts, outputs = [], []

    def policy(ctx, op, *args, **kwargs):
        assert isinstance(ctx, TorchDispatchMode)
        assert isinstance(ctx, torch.utils.checkpoint.SelectiveCheckpointContext)
        assert not ctx.is_recompute
        assert ctx.index == len(contexts)
        assert ctx.nbytes == 24
        assert ctx.site.startswith("test_decisions.py:")
        assert ctx.op_output.abs().sum() > 0  # operators of the policy's own
        contexts.append(ctx)
        outputs.append(weakref.ref(ctx.op_output))
        return RECOMPUTE

    run(lambda x: x.sin().exp(), leaf(3), policy=policy)
    assert contexts[0] is contexts[1]
    assert [contexts[0].op_output, contexts[0].index, contexts[0].site, contexts[0].nbytes] == [None, None, None, 0]
    assert [output() for output in outputs] == [None, None]
