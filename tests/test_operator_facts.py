"""The facts known of an operator: what it writes to, what it is, where its tensors are."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks._operators.facts import KNOWN, Kind, facts_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        # The noise is filled, which neither what is returned nor a version tells.
        (aten.rrelu_with_noise.default, [("noise", 1, False, True)]),
        (aten.rrelu_with_noise_.default, [("self", 0, True, True), ("noise", 1, False, True)]),
        # Inputs by the schema.
        (aten.native_batch_norm.default, [("running_mean", 3, False, False), ("running_var", 4, False, False)]),
        (aten._native_batch_norm_legit.default, [("running_mean", 3, False, False), ("running_var", 4, False, False)]),
        # Returns nothing, and its versions count all the same.
        (aten._foreach_mul_.Scalar, [("self", 0, True, False)]),
        (aten.add.out, [("out", 3, True, True)]),
        (aten.copy_.default, [("self", 0, True, True)]),
        (aten.relu_.default, [("self", 0, True, False)]),
        (aten.t_.default, [("self", 0, True, False)]),
        (aten.index.Tensor, []),
        (aten.split.Tensor, []),
        (aten.empty_like.default, []),
    ],
    ids=str,
)
def test_what_operators_write_to(operator, expected):
    """The argument, where it is, whether its version counts (Rule 15), whether nothing of it is left (Rule 16)."""
    assert [(one.name, one.position, one.counted, one.overwritten) for one in facts_of(operator).written] == expected


ATTRIBUTES = (
    "has_fresh",
    "is_uninitialized",
    "is_collective",
    "is_fast",
    "is_inplace_view",
    "is_like",
    "is_opaque",
    "is_random",
    "is_trusted",
    "is_view",
    "may_drop_out",
    "replaces_storage",
    "single",
)


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (aten.mm.default, "has_fresh is_fast is_trusted single"),
        (aten.aminmax.default, "has_fresh is_fast is_trusted"),
        (aten.max.dim, "has_fresh is_trusted"),  # a choice, which is noted
        (aten.split.Tensor, "is_fast is_trusted is_view"),
        (aten.t.default, "is_fast is_trusted is_view single"),
        (aten.t_.default, "is_inplace_view is_trusted single"),
        (aten._unsafe_view.default, "has_fresh is_fast is_trusted single"),  # no view by its versions
        (aten.unsafe_split.Tensor, "has_fresh is_fast is_trusted"),
        (aten.cat.default, "has_fresh is_trusted single"),
        (aten.index.Tensor, "has_fresh is_trusted single"),
        (aten.empty_like.default, "has_fresh is_uninitialized is_trusted single"),
        (aten.zeros_like.default, "has_fresh is_like is_trusted single"),
        (aten.add.out, "is_trusted single"),
        (aten._foreach_mul_.Scalar, "is_trusted"),
        (aten.native_dropout.default, "has_fresh is_random is_trusted"),
        (aten.rrelu_with_noise.default, "has_fresh is_random is_trusted single"),
        (aten.native_batch_norm.default, "has_fresh is_trusted"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, "has_fresh is_random is_trusted may_drop_out"),
        (aten.set_.source_Tensor, "is_inplace_view is_trusted replaces_storage single"),
        (torch.ops.higher_order.cond, "has_fresh is_opaque"),
    ],
    ids=str,
)
def test_what_operators_are(operator, expected):
    facts = facts_of(operator)
    assert [name for name in ATTRIBUTES if getattr(facts, name)] == expected.split()


@pytest.mark.parametrize(
    ("operator", "tensors", "lists", "keywords"),
    [
        (aten.mm.default, [(), (0,), (0, 1)], (), {"self", "mat2"}),
        (aten.index.Tensor, [(), (0,), (0,)], (1,), {"self", "indices"}),
        (aten.cat.default, [(), (), ()], (0,), {"tensors"}),
        (aten.index_put_.default, [(), (0,), (0,), (0, 2), (0, 2)], (1,), {"self", "indices", "values"}),
        (aten.add.out, [(), (0,), (0, 1), (0, 1), (0, 1, 3)], (), {"self", "other", "out"}),
        (aten._foreach_mul_.Scalar, [(), (), ()], (0,), {"self"}),
    ],
    ids=str,
)
def test_where_tensors_are(operator, tensors, lists, keywords):
    """By number of positional arguments; lists of tensors, optional ones as well, by themselves."""
    facts = facts_of(operator)
    assert (facts.tensors, facts.lists, facts.keywords) == (tensors, lists, keywords)


def test_facts_are_found_out_once():
    """By identity, which is of no other operator as long as the entry holds this one."""
    facts = facts_of(aten.mm.default)
    assert facts_of(aten.mm.default) is facts
    assert facts.kind is Kind.SAVEABLE
    assert KNOWN[id(aten.mm.default)] is facts
    assert facts.operator is aten.mm.default
