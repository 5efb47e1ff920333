"""Policies: what they say of operators, how they explain themselves, and what they refuse."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import grad

import ckpt_hooks
from ckpt_hooks import CheckpointPolicy
from ckpt_hooks import policies as p
from tests.measure import CountOps, leaf

aten = torch.ops.aten
SAVE, RECOMPUTE, OFFLOAD = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_CPU_OFFLOAD
CONTEXT = p.SelectiveCheckpointContext(op_output=None)


def test_enum_and_context_are_torchs():
    """Policies written for one serve the other."""
    assert CheckpointPolicy is torch.utils.checkpoint.CheckpointPolicy
    assert issubclass(p.SelectiveCheckpointContext, torch.utils.checkpoint.SelectiveCheckpointContext)
    assert CONTEXT.is_recompute is False


@pytest.mark.parametrize(
    ("policy", "kept", "not_kept"),
    [
        (p.everything_saveable, [aten.sin.default, aten.mm.default], []),
        (p.nothing_saveable, [], [aten.sin.default, aten.mm.default]),
        (p.dots_saveable, [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.mv.default], [aten.sin.default]),
        (p.dots_with_no_batch_dims_saveable, [aten.mm.default, aten.addmm.default], [aten.bmm.default, aten.baddbmm.default]),
        (
            p.save_compute_and_communication,
            [aten.mm.default, aten.convolution.default, aten.topk.default, aten._scaled_dot_product_flash_attention.default],
            [aten.gelu.default, aten.topk.values],
        ),
        (p.save_ops(aten.sin.default), [aten.sin.default], [aten.cos.default]),
        (
            p.save_from_both_policies(p.dots_saveable, [aten.sin.default]),
            [aten.sin.default, aten.mm.default],
            [aten.cos.default],
        ),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, p.Policy) else "",
)
def test_what_each_policy_keeps(policy, kept, not_kept):
    """As a function, and by operator."""
    for op in kept:
        assert policy(CONTEXT, op) is SAVE
        assert policy.for_op(op) is SAVE
    for op in not_kept:
        assert policy(CONTEXT, op) is RECOMPUTE
    assert policy.start() is policy


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (p.save_ops, [aten.mm.default, aten.bmm.default]),
        (p.offload_ops, [aten.mm.default, aten.bmm.default]),
        (p.save_only_these_names, ["a", "b"]),
        (p.save_any_names_but_these, ["a", "b"]),
        (p.save_modules, ["attn", nn.Linear, "mlp.*"]),
    ],
)
def test_makers_take_lists(make, given):
    """Lists, tuples and sets, alone or beside others, are their entries."""
    expected = repr(make(*given))
    assert {repr(make(given)), repr(make(tuple(given))), repr(make(given[:1], *given[1:]))} == {expected}
    assert make({*given}).expects == make(frozenset(given)).expects == make(*given).expects == {*given}


def test_products_without_batch_dimensions_are_offloaded():
    """The ones that ``dots_with_no_batch_dims_saveable`` keeps, by operator and as a function."""
    policy, keeps = p.offload_dot_with_no_batch_dims, p.dots_with_no_batch_dims_saveable
    for op in (aten.mm.default, aten.addmm.default, aten.mv.default, aten.linear.default, aten.bmm.default, aten.sin.default):
        assert policy.for_op(op) is policy(CONTEXT, op) is (OFFLOAD if keeps.for_op(op) is SAVE else RECOMPUTE)
    assert policy.for_op(aten.mm.default) is OFFLOAD
    both = p.save_from_both_policies(policy, [aten.mm.default])  # kept on the device where one of the two says so
    assert (both.for_op(aten.mm.default), both.for_op(aten.addmm.default)) == (SAVE, OFFLOAD)


def test_collectives_are_kept():
    """By the names that functional collectives have, where there are any."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no collectives")
    importlib.import_module("torch.distributed._functional_collectives")
    policy = p.save_compute_and_communication
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        assert policy.for_op(getattr(torch.ops._c10d_functional, name).default) is SAVE


def test_both_policies_and_counts():
    """What one keeps is kept, whatever the other counts; keeping is stronger than moving, moving than neither."""
    both = p.save_from_both_policies(p.save_every(aten.sin.default, 2), p.offload_ops(aten.sin.default, aten.cos.default))
    decide = both.start()
    assert decide is not both
    assert [decide(CONTEXT, aten.sin.default) for _ in range(4)] == [OFFLOAD, SAVE, OFFLOAD, SAVE]
    assert decide(CONTEXT, aten.cos.default) is OFFLOAD
    assert decide(CONTEXT, aten.tan.default) is RECOMPUTE


@pytest.mark.parametrize("library", [torch.utils.checkpoint, ckpt_hooks])
@pytest.mark.parametrize("policy", [p.dots_saveable, [aten.mm.default]])
def test_a_policy_serves_torchs_checkpoint(library, policy):
    """Also in our contexts, which are torch's there."""
    x, w = leaf(3, 3), leaf(3, 3)
    contexts = functools.partial(library.create_selective_checkpoint_contexts, policy)
    y = torch.utils.checkpoint.checkpoint(lambda x: (x @ w).sin().cos(), x, use_reentrant=False, context_fn=contexts)
    with CountOps() as ops:
        (found,) = grad(y.sum(), x)
    assert ops.counts["mm"] == 1
    assert torch.equal(found, grad((x @ w).sin().cos().sum(), x)[0])


SAVES_PRODUCTS = {
    "list": [aten.addmm.default],
    "function": lambda ctx, op, *args, **kwargs: (
        torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
        if op is aten.addmm.default
        else torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "function of booleans": lambda ctx, op, *args, **kwargs: op is aten.addmm.default,
    "policy": p.dots_saveable,
}


@contextlib.contextmanager
def within(context):
    with context:
        yield


@pytest.mark.parametrize("form", ["plain", "nested", "in a region", "debug", "of its own", "wrapped"])
@pytest.mark.parametrize("policy", list(SAVES_PRODUCTS))
def test_torchs_contexts_serve_our_checkpoint(policy, form):
    """With buffers that are put back for a recompute, random numbers, and several backwards."""
    make = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, SAVES_PRODUCTS[policy])
    options = {"context_fn": make, "debug": form == "debug"}
    if form == "of its own":
        options["context_fn"] = lambda: make()
    if form == "wrapped":
        options["context_fn"] = lambda: tuple(map(within, make()))
    counts = []

    def program(ours):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.GELU(), nn.Linear(6, 4))
        x, found = torch.randn(3, 4, requires_grad=True), []
        region = ckpt_hooks.checkpoint(**options)(block) if ours else block
        for _ in range(2):
            if ours and form == "nested":
                y = ckpt_hooks.checkpoint(lambda x: region(x) * 1, x)
            elif ours and form == "in a region":
                with ckpt_hooks.checkpoint_region():
                    y = region(x) * 1
            else:
                y = region(x) * 1
            for retain_graph in (True, False) if form != "wrapped" else (False,):
                with CountOps() as ops:
                    found += grad(y.sin().sum(), (x, *block.parameters()), retain_graph=retain_graph)
                counts.append(ops.counts["addmm"] if ours else None)
            found += [buffer.clone() for buffer in block.buffers()]
            found.append(torch.get_rng_state())
        return found

    options.pop("debug") if not options["debug"] else None
    with warnings.catch_warnings():
        if form == "wrapped":  # torch's own have a word on hooks
            warnings.simplefilter("ignore")
        found, expected = program(True), program(False)
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)
    if form not in ("nested", "in a region"):
        assert {count for count in counts if count is not None} == {0}


def test_a_policy_and_contexts_of_ones_own():
    """Both are entered, in forward and in the recompute."""
    entered = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *exc_info):
            entered.append(f"end of {self.name}")

    x, w = leaf(3, 3), leaf(3, 3)
    options = {"policy": p.dots_saveable, "context_fn": lambda: (Context("forward"), Context("recompute"))}
    y = ckpt_hooks.checkpoint(**options)(lambda x: (x @ w).sin().cos())(x)
    with CountOps() as ops:
        (found,) = grad(y.sum(), x)
    assert entered == ["forward", "end of forward", "recompute", "end of recompute"]
    assert ops.counts["mm"] == 1
    assert torch.equal(found, grad((x @ w).sin().cos().sum(), x)[0])


class _Counted(nn.Module):
    """Products around a sine and a dropout; counts its forwards."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.runs = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x):
        self.runs += 1
        return self.two(nn.functional.dropout(self.one(x).sin(), 0.5)).cos()


def _contexts(policy, create):
    return functools.partial(create, policy)


def _applied(module, x, select, **options):
    root = nn.Sequential(module)
    ckpt_hooks.apply_checkpointing(root, select, **options)
    return root(x)


_torchs = torch.utils.checkpoint.create_selective_checkpoint_contexts
_ours = ckpt_hooks.create_selective_checkpoint_contexts
WAYS = {
    "curried": lambda m, x, policy: ckpt_hooks.checkpoint(policy=policy)(m)(x),
    "contexts": lambda m, x, policy: ckpt_hooks.checkpoint(m, x, context_fn=_contexts(policy, _ours)),
    "a lambda": lambda m, x, policy: ckpt_hooks.checkpoint(m, x, context_fn=lambda: _ours(policy)),
    "torch's contexts": lambda m, x, policy: ckpt_hooks.checkpoint(m, x, context_fn=_contexts(policy, _torchs)),
    "a module": lambda m, x, policy: ckpt_hooks.checkpoint_module(m, policy=policy)(x),
    "applied": lambda m, x, policy: _applied(m, x, "0", policy=policy),
    "a mapping": lambda m, x, policy: _applied(m, x, {"0": policy}),
}


NAMED = [name for name in p.__all__ if isinstance(getattr(p, name), p.Policy)]


@pytest.mark.parametrize("name", NAMED)
def test_policies_have_names(name):
    """A region keeps under a name what it keeps under the policy."""
    x = leaf(3, 3).float()

    def kept(policy):
        with ckpt_hooks.checkpoint_region(policy=policy) as region:
            y = (x @ x).softmax(-1).sin()
        return [(holding.reason, holding.why, holding.nbytes) for holding in region.kept()], y

    (by_name, y), (by_policy, z) = kept(name), kept(getattr(p, name))
    assert by_name == by_policy
    assert torch.equal(y, z)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_takes_names_of_policies(way):
    """Products run once, except where torch makes the contexts, which knows no names."""
    if way == "torch's contexts":
        with pytest.raises(TypeError, match="policy_fn_or_list"):
            WAYS[way](nn.Linear(2, 2), leaf(2, 2).float(), "dots_saveable")
        return
    with CountOps() as ops:
        WAYS[way](_Counted(), leaf(2, 4).detach().float().requires_grad_(), "dots_saveable").sum().backward()
    assert (ops.counts["addmm"], ops.counts["sin"]) == (2, 3)  # the sine again, and as the gradient of the cosine


def test_names_of_policies_elsewhere():
    """Patches, combinations, and tables of regions."""
    assert repr(p.save_from_both_policies("dots_saveable", [aten.sin.default])) == repr(
        p.save_from_both_policies(p.dots_saveable, [aten.sin.default])
    )
    with ckpt_hooks.patch_torch(policy="dots_saveable") as patch:
        assert repr(p.dots_saveable) in repr(patch)
    with ckpt_hooks.apply_checkpointing(nn.Sequential(nn.Linear(2, 2)), "0", policy="dots_saveable") as applied:
        assert str(applied).endswith(" dots_saveable")


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_say_a_policy(way):
    """Results are bitwise the plain ones, the function runs once, and the policy is asked once about each product."""
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return SAVE if op is aten.addmm.default else RECOMPUTE

    def step(run):
        torch.manual_seed(0)
        module, x = _Counted(), leaf(2, 4).detach().float().requires_grad_()
        y = run(module, x)
        with CountOps() as ops:
            y.sum().backward()
        return [x.grad, *(parameter.grad for parameter in module.parameters()), torch.get_rng_state()], module.runs, ops.counts

    expected, _, _ = step(lambda module, x: module(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, runs, counts = step(lambda module, x: WAYS[way](module, x, policy))
    assert all(map(torch.equal, found, expected))
    assert (runs, asked.count(aten.addmm.default), counts["addmm"]) == (1, 2, 0)


@pytest.mark.parametrize("name", ["MUST_SAVE", "other", None, []], ids=str)
def test_answers_of_other_enums_count_by_their_names(name):
    """An answer whose name is none of a ``CheckpointPolicy``, and no string, is refused."""
    policy = lambda ctx, op, *args, **kwargs: types.SimpleNamespace(name=name)  # noqa: E731
    with (
        contextlib.nullcontext() if name == "MUST_SAVE" else pytest.raises(TypeError, match="should return a CheckpointPolicy")
    ):
        ckpt_hooks.checkpoint(policy=policy)(torch.sin)(torch.ones(2, requires_grad=True))
