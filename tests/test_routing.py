"""Routes of mixtures of experts: kept by a policy, and named in errors where a recompute takes others.

A tie is broken otherwise by the kernel of top-k, which these tests exchange: among equal values it takes the first, or the last
once a test says so.
"""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ckpt_hooks import CheckpointPolicy, DeterminismError, checkpoint, checkpoint_region
from ckpt_hooks.policies import dots_saveable, routing_saveable, save_from_both_policies
from tests.measure import CountOps, Log, as_library, leaf

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
BOTH = save_from_both_policies(dots_saveable, routing_saveable)


@pytest.fixture
def ties():
    """Breaks ties of top-k; ``ties.last`` says whether the last of equal values comes first."""
    state = types.SimpleNamespace(last=False)

    def topk(x, k, dim=-1, largest=True, sorted=True):
        values, indices = torch.sort(x.flip(dim) if state.last else x, dim=dim, descending=largest, stable=True)
        values, indices = (part.narrow(dim, 0, k).contiguous() for part in (values, indices))
        return values, x.size(dim) - 1 - indices if state.last else indices

    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is a kernel already
        library.impl("topk", topk, "CPU")
        yield state


class Experts(nn.Module):
    """A mixture of experts whose first two experts have equal scores for every row."""

    def __init__(self, *, reads=False, under_no_grad=False, writes=False):
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.reads, self.under_no_grad, self.writes = reads, under_no_grad, writes
        with torch.no_grad():
            self.gate.weight[1] = self.gate.weight[0]
            self.gate.weight[2] = 0
        self.double()

    def route(self, x):
        """Returns weights and numbers of experts."""
        scores = self.gate(x).softmax(-1)
        if not self.under_no_grad:
            weights, chosen = scores.topk(1)
            if self.writes:
                weights /= weights.sum(-1, keepdim=True) + 1
            return weights, chosen
        with torch.no_grad():  # as DeepSeek's models do
            chosen = scores.topk(1).indices
            if self.writes:
                chosen.clamp_(max=1)
        return scores.gather(1, chosen), chosen

    def forward(self, x):
        weights, chosen = self.route(x.sin())
        chosen, out = chosen.squeeze(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.reads and not (chosen == number).any():
                continue
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows])
        return out.tanh()


def region(kind, policy, module, x, **options):
    """Runs a module in a region of a kind."""
    if kind == "plain":
        return module(x)
    if kind == "function":
        return checkpoint(policy=policy, **options)(module)(x) if policy is not None else checkpoint(module, x, **options)
    with checkpoint_region(policy=policy):
        return module(x)


def made(**options):
    torch.manual_seed(0)
    return Experts(**options), leaf(6, 4)


def gradients(y, x, module):
    return grad(y.sum(), (x, *module.parameters()), allow_unused=True)


def equal(found, expected):
    return all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


EXPERTS = {"loop": {}, "python reads": {"reads": True}, "no grad": {"under_no_grad": True}}


@pytest.mark.parametrize("experts", list(EXPERTS))
@pytest.mark.parametrize("policy", [routing_saveable, BOTH], ids=["routing", "both"])
@pytest.mark.parametrize("kind", ["function", "recorded"])
def test_with_the_policy_a_tie_is_broken_as_in_forward(ties, kind, policy, experts):
    """Twice, since a later backward recomputes anew; and no top-k runs again."""
    module, x = made(**EXPERTS[experts])
    expected = gradients(module(x), x, module)
    y = region(kind, policy, module, x)
    ties.last = True
    for retain_graph in (True, False):
        with CountOps() as ops:
            found = grad(y.sum(), (x, *module.parameters()), allow_unused=True, retain_graph=retain_graph)
        assert equal(found, expected)
        assert ops.counts["topk"] == ops.counts["nonzero"] == ops.counts["_local_scalar_dense"] == 0


@pytest.mark.parametrize("form", ["weights", "weights, nested", "routes"])
@pytest.mark.parametrize("kind", ["function", "recorded"])
def test_a_write_to_weights_or_routes_does_not_let_the_top_k_go(ties, kind, form):
    """Many routers normalise in place the weights which top-k returned, and some change the numbers of experts."""
    module, x = made(writes=True, under_no_grad=form == "routes")
    expected = gradients(module(x), x, module)
    if form == "weights, nested":  # its recompute finds what the region inside kept, or what it keeps anew
        y = region(kind, routing_saveable, lambda x: region(kind, routing_saveable, module, x * 1), x)
    else:
        y = region(kind, routing_saveable, module, x)
    ties.last = True
    for retain_graph in (True, False):
        with CountOps() as ops:
            found = grad(y.sum(), (x, *module.parameters()), allow_unused=True, retain_graph=retain_graph)
        assert equal(found, expected)
        assert ops.counts["topk"] == 0


@pytest.mark.parametrize("experts", ["loop", "no grad"])
@pytest.mark.parametrize("policy", [None, dots_saveable], ids=["none", "products"])
@pytest.mark.parametrize("kind", ["function", "recorded"])
def test_without_it_the_error_says_so(ties, kind, policy, experts):
    """It names the top-k, with its line, where a function runs again in debug mode; else what has another shape after it."""
    module, x = made(**EXPERTS[experts])
    y = region(kind, policy, module, x, debug=True)
    ties.last = True
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    error = caught.value
    assert "pass policy=ckpt_hooks.policies.routing_saveable, or save_from_both_policies(routing_saveable, policy)" in str(
        error
    )
    if kind == "function" and policy is None:
        assert error.routing == ("aten.topk.default",)
        assert "ran aten.topk.default at test_routing.py:" in str(error)
    else:
        assert "shape in forward: [2, 1]\nshape in the replay: [0, 1]\nThe recompute ran aten." in str(error)
    ties.last = False  # and the region is as before: once ties are broken as in forward, it can be recomputed
    assert equal(gradients(y, x, module), gradients(module(x), x, module))


def test_routes_of_the_same_shape_are_noticed_by_values(ties):
    """Experts that are passed over where they have no rows save as many tensors of the same shapes, whichever they are."""
    module, x = made(reads=True)
    y = checkpoint(module, x, determinism_check="values", debug=True)
    ties.last = True
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    assert caught.value.routing == ("aten.topk.default",)


def changing(before, after):
    """Runs a region whose recompute does something else, and returns the error of debug mode."""
    todo = Log([before, after])
    y = region("function", None, lambda x: (todo.pop(0) if len(todo) > 1 else todo[0])(x), leaf(4, 4), debug=True)
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    return caught.value


def test_several_choices_are_named_once_each():
    def function(x, count):
        for _ in range(2):
            x = x.topk(3).values.exp()
        x = x + x.masked_select(x > -100).sum() + (x > 0).nonzero().topk(1, 0).values.sum()  # chosen by integers and masks
        return (x * (x > 0)).argsort().float().sin() + x[:count].sum().exp()

    error = changing(lambda x: function(x, 4)[:4].exp(), lambda x: function(x, 4)[:3].exp())
    assert error.routing == ("aten.topk.default", "aten.gt.Scalar", "aten.sort.default")
    assert str(error).count("aten.topk.default at") == 1


def test_a_choice_before_the_first_saved_tensor_is_named():
    error = changing(lambda x: x[x.detach()[:, 0].topk(2).indices].exp(), lambda x: x[x.detach()[:, 0].topk(3).indices].exp())
    assert (error.index, error.routing) == (0, ("aten.topk.default",))


@pytest.fixture
def rounding():
    """An operator which adds nothing, or the last bit once ``rounding.up`` is set."""
    state = types.SimpleNamespace(up=False)
    with torch.library._scoped_library("ckpt_hooks_routing", "FRAGMENT") as library:
        library.define("rounded(Tensor x) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
        kernel = lambda x: torch.nextafter(x, x + 1) if state.up else x.clone()  # noqa: E731
        library.impl("rounded", kernel, "CPU")
        yield state


@pytest.mark.parametrize("kind", ["function", "recorded"])
def test_a_comparison_that_a_last_bit_turns(rounding, kind):
    """Its mask is kept by the policy, and named without it."""

    def function(x):
        scores = torch.ops.ckpt_hooks_routing.rounded(x.detach().sum(-1))
        return (x[(scores > 1.0).nonzero().squeeze(-1)].sin() * 2).exp()

    x = torch.tensor([[0.5, 0.5], [2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    expected = grad(function(x).sum(), x)
    kept = region(kind, routing_saveable, function, x)
    y = region(kind, None, function, x, debug=True)
    rounding.up = True
    assert equal(grad(kept.sum(), x), expected)
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    assert caught.value.routing == ("aten.gt.Scalar" if kind == "function" else "aten.nonzero.default",)


def rows_of(x, indices):
    return x[indices.flatten() % 4].sin().exp()


def read(x, number):
    return (x[: 1 + int(number) % 3].sin() * 2).exp()


PROGRAMS = {
    "topk": lambda x: rows_of(x, x.topk(2).indices),
    "sort": lambda x: rows_of(x, x.sort(stable=True).indices),
    "argsort": lambda x: rows_of(x, x.argsort()),
    "argmax": lambda x: rows_of(x, x.argmax(-1)),
    "max": lambda x: rows_of(x, x.max(-1).indices),
    "kthvalue": lambda x: rows_of(x, x.kthvalue(2).indices),
    "multinomial": lambda x: rows_of(x, x.softmax(-1).multinomial(2)),
    "searchsorted": lambda x: rows_of(x, torch.searchsorted(x.detach().sort().values, x.detach())),
    "nonzero": lambda x: rows_of(x, (x > 0).nonzero()),
    "where": lambda x: rows_of(x, torch.where(x > 0)[0]),
    "unique": lambda x: rows_of(x, x.detach().round().unique(return_inverse=True)[1]),
    "bincount": lambda x: rows_of(x, x.argmax(-1).bincount(minlength=4)),
    "histc": lambda x: rows_of(x, x.argmax(-1).float().histc(4, 0, 4).long()),
    "masked_select": lambda x: x.masked_select(x > 0).sin().exp(),
    "mask": lambda x: x[x > 0].sin().exp(),
    "repeat_interleave": lambda x: rows_of(x, torch.arange(4).repeat_interleave(x.argmax(-1))),
    "one_hot": lambda x: (nn.functional.one_hot(x.argmax(-1), 4) * x.sin()).exp(),
    "item": lambda x: read(x, x.argmax(-1)[0].item()),
    "item of a float": lambda x: read(x, x.abs().sum().item()),
    "bool": lambda x: read(x, 2 if (x.sum() > 0) else 1),
    "equal": lambda x: read(x, torch.equal(x.floor(), x.ceil())),
    "cast": lambda x: rows_of(x, x.abs().mul(3).long()),
}


@pytest.mark.parametrize("program", list(PROGRAMS))
@pytest.mark.parametrize("kind", ["function", "recorded"])
def test_no_choice_runs_again(kind, program):
    """Neither do comparisons, and numbers that Python reads are those of forward."""
    function, x = PROGRAMS[program], leaf(4, 4)
    torch.manual_seed(1)
    expected = grad(function(x).sum(), x)
    torch.manual_seed(1)
    y = region(kind, routing_saveable, function, x)
    state = torch.get_rng_state()
    with Choices() as choices:
        (found,) = grad(y.sum(), x)
    assert torch.equal(found, expected[0])
    assert choices.ran == []
    assert torch.equal(torch.get_rng_state(), state)


@as_library
class Choices(CountOps):
    """Lists the operators that run again although the policy keeps their results."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch._C._current_graph_task_id() != -1 and routing_saveable(None, func, *args, **(kwargs or {})) is SAVE:
            self.ran.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


#: Shapes from data which are no routes, and operators which are made of others.
NO_ROUTES = {"_ctc_loss", "index", "linalg_lstsq"}


def test_operators_with_shapes_from_data_are_kept():
    """All that torch tags, but for a few."""
    for full_name in torch._C._dispatch_get_all_op_names():
        library, _, name = full_name.partition("::")
        name, _, overload = name.partition(".")
        if library != "aten" or not hasattr(aten, name):
            continue
        op = getattr(getattr(aten, name), overload or "default", None)
        tags = () if op is None else op.tags
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            kept = routing_saveable.for_op(op) is SAVE
            assert kept == (name not in NO_ROUTES and not op._schema.is_mutable), op
