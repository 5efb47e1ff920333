"""Selective policies: what a policy keeps stands in for running an operator, and for nothing else."""

from __future__ import annotations

import contextlib
import enum
import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import grad

import ckpt_hooks
from ckpt_hooks import CheckpointPolicy
from tests.behaviours.runs import SILENT, Run, assert_as_eager, gradients, runs
from tests.measure import CountOps, leaf

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE

#: What torch's regions do on a second backward, on a write to what was kept, on operators that forward had not.
REFUSES = RuntimeError

pytestmark = pytest.mark.filterwarnings("ignore:.*but views run again in each recompute")


def saving(*operators):
    """Returns a policy function that saves some operators."""
    return lambda ctx, op, *args, **kwargs: SAVE if op in operators else RECOMPUTE


def everything(ctx, op, *args, **kwargs):
    return SAVE


def recomputed(y, *inputs, **options):
    """Returns the gradients, and how often each operator of forward ran in backward."""
    with CountOps() as ops:
        found = grad(y.sum(), inputs, **options)
    return found, ops.counts


# Rows of the table


@runs("region", "nested", torch_fails=REFUSES)
@pytest.mark.parametrize("where", ["inside", "through a view", "through an unsafe view"])
def test_an_operator_that_writes_to_an_output_that_was_kept(run, where):
    """The entry is no longer what the operator returned, which runs again."""

    def function(x, w):
        h = x @ w
        if where == "inside":
            h.mul_(2)
        elif where == "through a view":
            h[0].mul_(2)
        elif where == "through an unsafe view":
            aten.unsafe_split(h, 1)[0].mul_(2)
        return h, (h + 1).sin()

    def program(run):
        x, w = leaf(3, 3), leaf(3, 3)
        _, y = run(function, x, w)
        return gradients(y, x, w)

    if not run.ours and where == "through an unsafe view":
        pytest.skip("torch gives other gradients and says nothing, in the nested form as well")
    assert_as_eager(program, run.selecting([aten.mm.default]))


@runs("region", "nested", torch_fails=(SILENT, RuntimeError))
@pytest.mark.parametrize("name", ["in place", "set item", "out"])
def test_a_policy_that_saves_an_operator_that_writes(run, name):
    """What it writes to is what matters, so it runs again."""

    def function(x):
        h = x * 2
        if name == "in place":
            h.add_(1).mul_(3)
        elif name == "set item":
            h[0] = 5
        else:
            with torch.no_grad():
                torch.add(h.detach(), 1, out=h.data)
        return h.sin() * h

    def program(run):
        x = leaf(4)
        return gradients(run(function, x), x)

    assert_as_eager(program, run.selecting(everything))


@runs("region", "nested")
def test_a_policy_that_saves_views(run):
    """Views are made again, of the tensors of the recompute."""

    def function(x):
        h = x.sin()
        first, second = h.view(2, 2).t().unbind()
        return first.exp() * second.expand(2, 2).cos()

    def program(run):
        x = leaf(4)
        return gradients(run(function, x), x)

    assert_as_eager(program, run.selecting(everything))


def test_a_stop_swallowed_inside_an_inner_region_is_no_difference():
    """The stop of the region around cuts the inner one's forward short, which then runs a backward over what it has."""
    x = leaf(3)

    def inner(x):
        y = x.exp()
        with contextlib.suppress(BaseException):
            torch.linalg.vector_norm(x) + 1
        w = x.sin()
        return w * y * grad(w.sum(), x, retain_graph=True)[0]

    def outer(x):
        return Run("ours").selecting([aten.linalg_vector_norm.default])(inner, x).sum()

    (found,) = grad(ckpt_hooks.checkpoint(outer, x * 1), x)
    assert torch.equal(found, grad(inner(x * 1).sum(), x)[0])


@runs("region", torch_fails=SILENT)
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
def test_offload_of_an_output_on_the_host_keeps_it(run, policy):
    """There is nothing to move, and nothing to compute again."""
    x, w = leaf(3, 3), leaf(3, 3)
    y = run.selecting(lambda ctx, op, *args, **kwargs: policy if op is aten.mm.default else RECOMPUTE)(
        lambda x, w: (x @ w).sin().cos(), x, w
    )
    _, counts = recomputed(y, x)
    assert counts["mm"] == 1  # that of backward


class Foreign(enum.Enum):
    """Another enum of the same names."""

    MUST_SAVE = 7
    PREFER_RECOMPUTE = 9


@pytest.mark.parametrize("members", [torch.utils.checkpoint.CheckpointPolicy, Foreign])
def test_enums_are_taken_by_name(members):
    """Torch's own is ours; of others the names count. Booleans are what they are in torch."""
    x = leaf(3)
    for yes, no in ((members.MUST_SAVE, members.PREFER_RECOMPUTE), (True, False)):
        y = Run("ours").selecting(lambda ctx, op, *args, yes=yes, no=no, **kwargs: yes if op is aten.sin.default else no)(
            lambda x: x.sin().cos().exp().tanh(), x
        )
        _, counts = recomputed(y, x)
        assert (counts["sin"], counts["exp"]) == (1, 1)  # the sine of backward; and cos' gradient takes none of forward's


@runs("region", torch_fails=SILENT)
def test_what_is_kept_goes_through_hooks_around_the_region(run):
    """``save_on_cpu`` and the like see what a policy keeps."""
    x, w = leaf(3, 3), leaf(3, 3)
    seen = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.clone(), lambda t: t)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with hooks:
            y = run.selecting([aten.mm.default])(lambda x, w: (x @ w).sin().cos(), x, w)
    product = (x @ w).detach()
    assert sum(torch.equal(tensor, product) for tensor in seen) == 1
    found, counts = recomputed(y, x, w)
    assert counts["mm"] == 2  # those of backward
    assert torch.equal(found[0], grad((x @ w).sin().cos().sum(), x)[0])


def test_hooks_can_be_opted_out_of():
    """``respect_saved_tensors_hooks=False``."""
    x, w = leaf(3, 3), leaf(3, 3)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        run = Run("ours").selecting([aten.mm.default], respect_saved_tensors_hooks=False)
        y = run(lambda x, w: (x @ w).sin().cos(), x, w)
    assert not seen
    _, counts = recomputed(y, x)
    assert counts["mm"] == 1


@runs("region", "nested", torch_fails=SILENT)
@pytest.mark.parametrize("hooks", ["copying", "handing on", "in a tuple"])
def test_hooks_and_writes_to_what_is_kept(run, hooks):
    """Hooks that copy have what it was; those that hand on the tensor have what became of it, which is an error."""
    pairs = {
        "copying": (torch.clone, lambda t: t),
        "handing on": (lambda t: t, lambda t: t),
        "in a tuple": (lambda t: (t,), lambda packed: packed[0]),
    }

    def function(x, w):
        h = x @ w
        y = h.sin()
        z = aten._unsafe_view(y, [9])
        return y.exp() * 2, z

    def program(run):
        x, w = leaf(3, 3), leaf(3, 3)
        with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(*pairs[hooks]):
            warnings.simplefilter("ignore", FutureWarning)
            y, z = run(function, x, w)
        with torch.no_grad():
            z.zero_()
        return gradients(y, x, w)

    def eager(run):
        x, w = leaf(3, 3), leaf(3, 3)
        return gradients((x @ w).sin().exp() * 2, x, w)

    torch.manual_seed(1)
    expected = eager(run)
    torch.manual_seed(1)
    if run.ours and hooks != "copying":
        with pytest.raises(ckpt_hooks.MutationError, match="kept by the policy"):
            program(run.selecting([aten.mm.default, aten.sin.default]))
        return
    found = program(run.selecting([aten.mm.default, aten.sin.default]))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Random operators


@runs("region", "nested", torch_fails=SILENT)
@pytest.mark.parametrize("explicit", [False, True])
def test_a_random_operator_is_kept_and_later_ones_are_not(run, explicit):
    """The stream is moved past the one that is not run."""

    def function(x, generator):
        kept = torch.rand(x.shape, dtype=x.dtype, generator=generator)
        return (x * kept).sin() * torch.bernoulli(torch.full_like(x, 0.5), generator=generator)

    def program(run):
        generator = torch.Generator().manual_seed(1) if explicit else None
        x = leaf(50)
        return gradients(run(function, x, generator), x)

    assert_as_eager(program, run.selecting(saving(aten.rand.default, aten.rand.generator)))


# Ambient state


@runs("region", "nested", torch_fails=RuntimeError if torch.__version__ >= (2, 13) else None)
def test_autocast_casts_that_were_cached_in_forward(run):
    """A weight was cast before the region."""

    def program(run):
        layer = nn.Linear(4, 4)
        x = leaf(2, 4).float().detach().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = layer(x)
            y = run(lambda h: layer(h).sin(), h)
        return gradients(y.float(), x, *layer.parameters())

    assert_as_eager(program, run.selecting([aten.addmm.default, aten.sin.default]))


def test_a_policy_is_asked_once_an_operator_and_in_forward_only():
    """With what the operator returned."""
    asked = []

    def policy(ctx, op, *args, **kwargs):
        assert isinstance(ctx, torch.utils.checkpoint.SelectiveCheckpointContext)
        asked.append((str(op), ctx.is_recompute, tuple(ctx.op_output.shape), len(args)))
        return False

    x = leaf(3)
    y = Run("ours").selecting(policy)(lambda x: (x.sin() * 2).view(3, 1), x)
    expected = [
        ("aten.sin.default", False, (3,), 1),
        ("aten.mul.Tensor", False, (3,), 2),
        ("aten.view.default", False, (3, 1), 2),
    ]
    assert asked == expected
    y.sum().backward()
    assert asked == expected


# What a policy is told


@runs("region")
def test_several_outputs_and_values_that_are_no_tensors_come_back_whole(run):
    """And their operators do not run again."""
    x = leaf(5)

    def function(x):
        values, indices = x.sin().sort()
        return (values * indices[0].item()).exp()

    y = run.selecting([aten.sort.default, aten._local_scalar_dense.default])(function, x)
    expected = grad(function(x).sum(), x)[0]
    (found,), counts = recomputed(y, x)
    assert torch.equal(found, expected)
    assert counts["sort"] == counts["_local_scalar_dense"] == 0


def test_an_operator_that_returns_its_input():
    """Its output is not kept: that would be another object, of another memory in a recompute."""
    x = leaf(3)

    def function(x):
        h = x.sin()
        same, _ = aten.native_dropout(h, 0.5, False)
        return h.exp() * same.cos()

    y = Run("ours").selecting(everything)(function, x)
    assert torch.equal(grad(y.sum(), x)[0], grad(function(x).sum(), x)[0])


def test_metadata_queries_are_never_kept():
    """As in torch, by the same set."""
    assert ckpt_hooks.SAC_IGNORED_OPS == torch.utils.checkpoint.SAC_IGNORED_OPS
    x = leaf(3)
    asked = []
    Run("ours").selecting(lambda ctx, op, *args, **kwargs: bool(asked.append(op)))(lambda x: x.detach().sin(), x)
    assert asked == [aten.sin.default]
