"""``split_backward=True``: gradients of inputs and gradients of weights as two backwards, with one recompute."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_module, checkpoint_region
from ckpt_hooks.policies import dots_saveable
from tests.measure import CountOps, Frames


class Block(nn.Module):
    """A residual block with dropout and saved tensors which require no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.2)


def nested(block, split):
    return checkpoint(split_backward=split)(lambda x: checkpoint(split_backward=split)(block)(x) * 1)


def nested_regions(block, split):
    def run(x):
        with checkpoint_region(split_backward=split):
            h = x * 1
            with checkpoint_region(policy=dots_saveable):
                h = block(h)
            return h * 1

    return run


def frame_in_region(block, split):
    return checkpoint_region(split_backward=split)(lambda x: checkpoint(split_backward=split)(block)(x * 1) * 1)


def region_in_frame(block, split):
    return checkpoint(split_backward=split)(lambda x: checkpoint_region(split_backward=split)(block)(x * 1) * 1)


REGIONS = {
    "checkpoint": lambda block, split: checkpoint(split_backward=split)(block),
    "policy": lambda block, split: checkpoint(split_backward=split, policy=dots_saveable)(block),
    "values": lambda block, split: checkpoint(split_backward=split, determinism_check="values")(block),
    "late": lambda block, split: checkpoint(split_backward=split, early_stop=False)(block),
    "nested": nested,
    "region": lambda block, split: checkpoint_region(split_backward=split)(block),
    "region-parts": lambda block, split: checkpoint_region(split_backward=split, replay_whole=False)(block),
    "region-policy": lambda block, split: checkpoint_region(split_backward=split, policy=dots_saveable)(block),
    "nested-regions": nested_regions,
    "frame-in-region": frame_in_region,
    "region-in-frame": region_in_frame,
    "module": lambda block, split: checkpoint_module(block, split_backward=split),
    "recorded-module": lambda block, split: checkpoint_module(block, split_backward=split, recorded=True),
}


def blocks():
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(3)), torch.randn(4, 8, requires_grad=True)


def in_parts(loss, x, weights):
    """Gradients of inputs, then gradients of weights, each as one backward."""
    return [*grad(loss, x, retain_graph=True), *grad(loss, weights)]


def by_schedule(loss, x, weights):
    """The same, as the stages of torch's zero-bubble schedules do it."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    found, groups = stage_backward_input([loss], None, [x], iter(weights))
    stage_backward_weight(iter(weights), groups)
    return [*found, *(weight.grad for weight in weights)]


SCHEDULES = [in_parts]
if torch.distributed.is_available():
    SCHEDULES.append(by_schedule)


def train(region, split, schedule):
    """Returns gradients, and how often the backwards ran ``gelu``, the one operator which backward has no use for itself."""
    layers, x = blocks()
    weights = list(layers.parameters())
    torch.manual_seed(1)
    h = x
    for layer in layers:
        h = (layer if region is None else region(layer, split))(h)
    with CountOps() as ops:
        found = schedule(h.pow(2).sum(), x, weights)
    return found, ops.counts["gelu"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_rule_3_one_recompute_serves_both_parts(region, schedule):
    """Gradients are those without regions, and each block runs once again."""
    expected, _ = train(None, None, schedule)
    found, count = train(region, True, schedule)
    assert all(map(torch.equal, found, expected))
    assert count == (6 if region is region_in_frame else 3)  # the frame runs again, and then the region is replayed
    found, more = train(region, False, schedule)
    assert all(map(torch.equal, found, expected))
    assert more >= 2 * count


def test_the_recompute_of_a_schedule_without_the_option():
    """The figure that the option is for: a function frame is run again in each of the schedule's backwards."""
    if by_schedule not in SCHEDULES:
        pytest.skip("this torch has no pipelines")
    assert train(REGIONS["checkpoint"], False, by_schedule)[1] == 12
    assert train(REGIONS["checkpoint"], True, by_schedule)[1] == 3


FORMS = {
    "function": lambda **options: checkpoint(**options),
    "region": lambda **options: checkpoint_region(**options),
    "region in parts": lambda **options: checkpoint_region(replay_whole=False, **options),
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request):
    return request.param


def function(x):
    return x.sin().exp().tanh()


def test_rule_4_a_value_goes_after_two_uses(form, no_gc):
    """Also while the graph lives on; and a third and a fourth backward share a recompute again."""
    x = torch.randn(4, requires_grad=True)
    watched = Frames()
    with watched:
        y = form(split_backward=True)(function)(x)
    expected = grad(function(x).sum(), x)[0]
    for _ in range(2):
        with CountOps() as ops:
            assert torch.equal(grad(y.sum(), x, retain_graph=True)[0], expected)
        first = ops.counts["exp"]
        assert watched.values_alive() > 1
        with CountOps() as ops:
            assert torch.equal(grad(y.sum(), x, retain_graph=True)[0], expected)
        assert (first, ops.counts["exp"]) == (1, 0)
        assert watched.values_alive() <= 1  # the argument
    del y
    assert watched.alive() == [False]


def test_rule_4_a_backward_which_frees_the_graph_keeps_nothing(form, no_gc):
    """Each value goes with the only use that it can have, before the frame does."""
    x = torch.randn(4, requires_grad=True)
    sizes = []
    watched = Frames()

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            sizes.append(watched.values_alive())
            return gradient

    with watched:
        y = form(split_backward=True)(lambda x: function(Notes.apply(function(x * 2))))(Notes.apply(x))
    y.sum().backward()
    assert sizes == [0, 0]
    assert torch.equal(x.grad, grad(function(function(x * 2)).sum(), x)[0])


def test_rule_4_a_value_goes_with_its_handle(form, no_gc):
    """A part of the graph that is dropped between the two backwards leaves nothing behind."""
    x = torch.randn(4, requires_grad=True)
    watched = Frames()
    with watched:
        a, b = form(split_backward=True)(lambda x: (x.sin().exp().tanh(), x.cos().exp().tanh()))(x)
    expected = [grad(x.sin().exp().tanh().sum(), x)[0], grad(x.cos().exp().tanh().sum(), x)[0]]
    assert torch.equal(grad(a.sum(), x, retain_graph=True)[0], expected[0])
    del a
    assert torch.equal(grad(b.sum(), x, retain_graph=True)[0], expected[1])
    with CountOps() as ops:
        assert torch.equal(grad(b.sum(), x, retain_graph=True)[0], expected[1])
    assert ops.counts["exp"] == 0
    assert watched.values_alive() <= 1  # the argument
    del b
    assert watched.alive() == [False]


def test_rule_10_what_the_first_backward_writes_to_is_brought_back_anew(form):
    """The second backward must not see the write. Plain autograd raises."""

    class Scales(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            (saved,) = ctx.saved_tensors
            found = gradient * saved
            saved.mul_(2)
            return found

    x = torch.randn(4, requires_grad=True)
    y = form(split_backward=True)(lambda x: Scales.apply(x.sin()))(x)
    expected = grad(x.sin().exp().sum(), x)[0]
    for _ in range(4):
        assert torch.allclose(grad(y.sum(), x, retain_graph=True)[0], expected)


def test_outside_of_a_backward(form):
    """A saved tensor read by hand takes no use away."""
    x = torch.randn(4, requires_grad=True)
    y = form(split_backward=True)(function)(x)
    for _ in range(3):
        assert torch.equal(y.grad_fn._saved_result, y)
    expected = grad(function(x).sum(), x)[0]
    assert torch.equal(grad(y.sum(), x, retain_graph=True)[0], expected)
    assert torch.equal(y.grad_fn._saved_result, y)
    with CountOps() as ops:
        assert torch.equal(grad(y.sum(), x)[0], expected)
    assert ops.counts["exp"] == 0


@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.parametrize("form", [checkpoint, checkpoint_region])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_values_without_a_storage(form, to_sparse):
    x = torch.rand(3, 3, requires_grad=True)

    def function(x):
        return torch.sparse.mm(to_sparse(x * 2), x * 3).sin()

    y, expected = form(split_backward=True)(function)(x).sum(), grad(function(x).sum(), x)[0]
    assert torch.equal(grad(y, x, retain_graph=True)[0], expected)
    assert torch.equal(grad(y, x)[0], expected)
