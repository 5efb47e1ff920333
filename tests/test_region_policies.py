"""Policies and names in recorded regions: what is kept, why, and what then runs no more."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks

from ckpt_hooks import CheckpointPolicy, MutationError, checkpoint, checkpoint_name, checkpoint_region, policies
from ckpt_hooks.report import Reason
from tests.measure import CountOps, leaf
from tests.regions import assert_as_eager, replayed

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def mixed(x, w, region, **options):
    """A product, a random operator, an operator that writes, a view, two outputs."""
    with region(**options):
        h = (x @ w).sin()
        h = F.dropout(h, 0.5).mul_(2).t()
        best, _ = h.max(1)
        return (h @ w).exp() * best.cos()


def inputs():
    return leaf(4, 4), leaf(4, 4)


# What runs


@pytest.mark.parametrize(
    ("policy", "spared"),
    [
        (policies.dots_saveable, {"mm": 2}),
        (policies.save_compute_and_communication, {"mm": 2}),
        ([aten.mm.default, aten.exp.default], {"mm": 2, "exp": 1}),
        (policies.save_ops(aten.sin.default), {"sin": 1}),  # its derivative needs what it read
        (policies.save_every(aten.mm.default, 2), {"mm": 1}),
        (policies.save_from_both_policies([aten.exp.default], policies.dots_saveable), {"mm": 2, "exp": 1}),
        (lambda ctx, op, *args, **kwargs: op is aten.mm.default, {"mm": 2}),
        (policies.offload_ops(aten.mm.default), {"mm": 2}),  # on the host it is
        (policies.offload_dot_with_no_batch_dims, {"mm": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_kept_does_not_run(policy, spared):
    x, w = inputs()
    ran = replayed(lambda region: mixed(x, w, region), x, w)
    left = replayed(lambda region: mixed(x, w, region, policy=policy), x, w)
    assert {name: count - left.get(name, 0) for name, count in ran.items() if count != left.get(name, 0)} == spared


def test_a_nested_region_has_a_policy_of_its_own():
    """Where everything is kept in a region within one that keeps nothing, its operators do not run again.

    What the inner region keeps nothing of runs once for its own handles and once for the outer one's, which ``cos`` saved.
    """
    x = leaf(3)

    def program(region, outer, inner):
        with region(policy=outer):
            h = x.sin()
            with region(policy=inner):
                h = h.exp().tanh()
            return h.cos().sinh()

    keep = policies.everything_saveable
    ran = {
        (outer is not None, inner is not None): replayed(
            lambda region, outer=outer, inner=inner: program(region, outer, inner), x
        )
        for outer in (None, keep)
        for inner in (None, keep)
    }
    assert ran == {
        (False, False): {"sin": 1, "exp": 2, "tanh": 2, "cos": 1},
        (False, True): {"cos": 1},
        (True, False): {"exp": 2, "tanh": 2},
        (True, True): {},
    }


# What is given for a policy


# What is kept, and why


def kept_by(region):
    """Returns description, reason and more words on each tensor that a region keeps."""
    return [(kept.description, kept.reason, kept.why) for kept in region.kept()]


def test_what_a_region_keeps_and_why():
    """Inputs from outside but for parameters, what the policy says, by operator and by name."""
    x, w, other, none = leaf(4, 4), leaf(4, 4), torch.ones(4), torch.ones(0)
    region = checkpoint_region(policy=policies.save_from_both_policies([aten.mm.default], policies.save_only_these_names("e")))
    hidden = x * 2
    with region:
        y = checkpoint_name((hidden @ w + other + none.sum()).sin().exp(), "e").cos()
    assert kept_by(region) == [
        ("float64[4, 4]", Reason.INPUT, "saved, from outside of the region"),
        ("float64[4, 4]", Reason.POLICY, "kept by the policy"),
        ("float32[4]", Reason.INPUT, "from outside of the region"),
        ("float64[4, 4]", Reason.NAME, "kept by the policy, by the name of 'e'"),
    ]
    del y
    with region:
        y = (hidden.sin() @ w).mul(other).cos()
    assert kept_by(region) == [
        ("float64[4, 4]", Reason.INPUT, "saved, from outside of the region"),
        ("float32[4]", Reason.INPUT, "saved, from outside of the region"),
        ("float64[4, 4]", Reason.INPUT, "from outside of the region"),
        ("float64[4, 4]", Reason.POLICY, "kept by the policy"),
    ]
    y.sum().backward()
    assert region.kept() == []


def test_kept_of_a_region_of_which_nothing_is_dropped():
    """It has no frame any more: the graph holds what was saved."""
    x, region = leaf(3), checkpoint_region()
    z = x * 2
    with region:
        y = z.sin()
    (kept,) = region.kept()
    assert (kept.reason, kept.why, kept.nbytes) == (Reason.INPUT, "saved, from outside of the region", z.nbytes)
    y.sum().backward()
    assert region.kept() == []


def test_what_is_on_the_host_and_what_hooks_have_is_listed(transfers):
    """Each with its size, though no tensor is at hand; what goes to the hooks may be anything."""
    x, w = leaf(1024), leaf(4, 4)
    with checkpoint_region(policy=policies.offload_ops(aten.exp.default)) as region:
        y = (x * 2).exp()
    (kept,) = region.kept()
    assert (*kept[:3], kept.description) == (
        *(Reason.OFFLOADED, "kept by the policy, as a result of aten.exp.default", 8192),
        "float64[1024] on the host",
    )
    del y
    there = []
    hooks = saved_tensors_hooks(lambda tensor: there.append(tensor) or len(there), lambda n: there[n - 1])
    with hooks, checkpoint_region(policy=[aten.mm.default]) as region:
        y = (w @ w).sin().sum() + (w[:0] @ w).sin().sum()
    words = Reason.HOOKS, "kept by the policy"
    assert [kept[:5] for kept in region.kept()] == [(*words, 128, None, 0), (*words, 0, None, 0)]
    y.sum().backward()


def test_what_is_kept_by_its_name_needs_no_input_any_more():
    other = leaf(4) * 3
    with checkpoint_region(policy=policies.save_only_these_names("h")) as region:
        y = checkpoint_name((other * 2).exp(), "h").sin()
    assert kept_by(region) == [("float64[4]", Reason.NAME, "kept by the policy, by the name of 'h'")]
    del y


def test_what_cannot_be_brought_back_is_kept():
    """Memory that was written to in part, and what is written to by other ways than operators (Rule 16)."""
    x = leaf(4)
    with checkpoint_region() as region:
        table = torch.empty(4, dtype=torch.float64)
        table[:2] = 1
        table[2:] = 2
        y = (x.sin() * table).exp()
    assert kept_by(region) == [
        ("float64[4]", Reason.NOT_REPLAYED, "saved, memory that was written to in part"),
        ("float64[4]", Reason.NOT_REPLAYED, "memory that was written to in part"),
    ]
    one, other = region.kept()
    assert one.nbytes == other.nbytes == 32
    assert one.storage != other.storage  # what may be written to since is copied when the region ends
    (found,) = grad(y.sum(), x)
    assert torch.equal(found, grad((x.sin() * torch.tensor([1, 1, 2, 2])).exp().sum(), x)[0])


def test_what_an_operator_has_written_to_that_raised_is_kept():
    """It may have written to some of it."""

    def fails(x):
        x.mul_(3)
        raise ValueError

    x = leaf(4)
    with torch.library._scoped_library("ckpt_hooks_tests", "FRAGMENT") as library:
        library.define("fails(Tensor(a!) x) -> ()")
        library.impl("fails", fails, "CPU")
        region, found = checkpoint_region(), []
        for block in (region, contextlib.nullcontext()):
            with block:
                table = x.detach() * 2
                with pytest.raises(ValueError):
                    torch.ops.ckpt_hooks_tests.fails(table)
                y = (table.exp() * x).sin()
            if block is region:
                why = "written to by ckpt_hooks_tests.fails.default, which raised"
                assert ("float64[4]", Reason.NOT_REPLAYED, why) in kept_by(region)
            found += grad(y.sum(), x)
        assert torch.equal(*found)


def test_a_collective_does_not_run_again():
    """All processes would have to run it at the same time: so it is kept, also where a policy prefers to have it run again."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no collectives")
    importlib.import_module("torch.distributed._functional_collectives")
    collectives = torch.ops._c10d_functional
    for policy in (None, lambda ctx, op, *args, **kwargs: RECOMPUTE):
        with FakeTensorMode():
            x = leaf(4)
            with checkpoint_region(policy=policy):
                table = collectives.wait_tensor(collectives.all_reduce(x.detach() * 2, "sum", "0"))
                y = (table.exp() * x).sin()
            with CountOps() as ops:
                grad(y.sum(), x)
        assert (ops.counts["exp"], ops.counts["all_reduce"]) == (1, 0)


def test_names_say_what_is_kept():
    x, w = inputs()

    def program(region, policy):
        with region(policy=policy):
            h = checkpoint_name((x @ w).sin(), "first")
            h = checkpoint_name((h @ w).exp(), "second")
            return (h @ w).cos()

    def left(policy):
        ran = replayed(lambda region: program(region, policy), x, w)
        return [ran.get(name, 0) for name in ("mm", "sin", "exp")]

    assert left(None) == left(policies.nothing_saveable) == [3, 1, 1]
    assert left(policies.save_only_these_names("first")) == [3, 0, 1]  # the derivative of ``sin`` needs what it read
    assert left(policies.save_only_these_names("second")) == [2, 1, 0]
    assert left(policies.save_only_these_names("first", "second")) == [2, 0, 0]
    assert left(policies.save_any_names_but_these("second")) == [3, 0, 1]
    assert left(policies.save_any_names_but_these()) == [2, 0, 0]
    offloading = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["first"], names_which_can_be_offloaded=["second"]
    )
    assert left(offloading) == [2, 0, 0]


# Names


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


@dataclasses.dataclass
class Output:
    """A dataclass, with a field that its constructor does not take."""

    hidden: Any
    others: Any = None
    count: int = 2
    sum: Any = dataclasses.field(init=False, default=None)


class Named(dict):
    """A class that torch's trees do not know."""


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda a, b: [a, None, b], lambda out: (out[0], out[2])),
        (lambda a, b: (a, (3, [b])), lambda out: (out[0], out[1][1][0])),
        (Pair, lambda out: (out.first, out.second)),
        (lambda a, b: {"a": a, "b": {2: b}}, lambda out: (out["a"], out["b"][2])),
        (lambda a, b: Named(a=a, b=[b]), lambda out: (out["a"], out["b"][0])),
        (lambda a, b: Output(a, (b, "text")), lambda out: (out.hidden, out.others[0])),
        (lambda a, b: Output([Output(a)], Pair(b, None)), lambda out: (out.hidden[0].hidden, out.others.first)),
    ],
    ids=["list", "tuple", "named tuple", "dict", "dict of a class", "dataclass", "nested"],
)
def test_a_name_of_each_tensor_in_a_container(pack, unpack):
    """The container is the same object, and both tensors are kept; without a region it passes through."""
    x = leaf(3)

    def program(region):
        with region(policy=policies.save_only_these_names("h")):
            container = pack(x.sin().exp(), x.cos().exp())
            named = checkpoint_name(container, "h")
            assert named is container
            first, second = unpack(named)
            return first.tan() + second.tan()

    assert replayed(program, x).get("exp", 0) == 0
    assert_as_eager(program, x)


def test_a_name_is_of_the_innermost_region():
    """The policies of those around it do not know what is made in it, and such a policy's user hears of it."""
    x = leaf(3)

    def program(region):
        with region(policy=policy), region():
            h = checkpoint_name(x.sin(), "h")
            return h.exp().cos()

    policy = policies.save_only_these_names("h")
    assert replayed(program, x)["sin"] == 1
    with pytest.warns(UserWarning, match="names tensors that none of the first 3 regions under it had: h"):
        _ = [program(checkpoint_region) for _ in range(2)]


def test_a_policy_made_anew_in_each_step_is_warned_of_once():
    """Unless some region had the name: others under equal policies may have none."""
    x = leaf(3)

    def steps(kept, *names):
        for name in names:
            with checkpoint_region(policy=policies.save_only_these_names(kept)):
                y = checkpoint_name(x.sin(), name).cos()
            y.sum().backward()

    with pytest.warns(UserWarning, match="names tensors that none .* had: hiden") as caught:
        steps("hiden", *["hidden"] * 8)
    assert len(caught) == 1
    steps("found at once", "found at once", *["hidden"] * 8)  # warnings are errors in these tests


def test_a_name_of_a_written_tensor():
    """It is what the tensor was when it was named."""
    x, w = inputs()

    def program(region, after):
        with region(policy=policies.save_only_these_names("h")):
            h = checkpoint_name((x @ w).neg_(), "h")
            if after:
                h.mul_(2)
            return h.sin()

    assert replayed(lambda region: program(region, False), x, w).get("mm", 0) == 0
    assert_as_eager(lambda region: program(region, True), x, w)


def _product_and_dropout(x, w):
    h = x.sin() @ w
    return h, (h * 0.25 * torch.rand_like(h)).tanh()


def _product_of_products(x, w):
    h = F.gelu((x @ w).t() @ w)
    product = h @ w
    return product, product.sin() * h


@pytest.mark.parametrize("region", [checkpoint, checkpoint_region])
@pytest.mark.parametrize("function", [_product_and_dropout, _product_of_products])
def test_what_a_policy_kept_and_the_program_writes_to_after_is_an_error(function, region):
    """Under torch too. What nothing in the region reads may be written to."""
    policy = policies.save_ops(torch.ops.aten.mm.default)
    x, w = leaf(4, 4), leaf(4, 4)
    h, y = region(policy=policy)(function)(x, w)
    h.detach().zero_()
    with pytest.raises(MutationError, match="kept by the policy"):
        y.sum().backward()
    y = region(policy=policy)(lambda x: x.sin() @ w)(x)
    y.detach().zero_()
    y.sum().backward()
