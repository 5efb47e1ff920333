"""The tape of a recorded region by itself: facts of operators, plans, and replays, without autograd (Rules 13 to 17)."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
import torch.nn.functional as F

import ckpt_hooks
from ckpt_hooks._core.threads import this_thread
from ckpt_hooks._operators.facts import KNOWN, facts_of
from ckpt_hooks._operators.kinds import Kind
from ckpt_hooks._recorded.recorder import Recorder
from ckpt_hooks._recorded.replay import Replay, bring_back
from ckpt_hooks._recorded.schedule import plan_for, work_for
from ckpt_hooks._recorded.tape import Tape
from tests.measure import CountOps
from tests.regions import assert_same

aten = torch.ops.aten

# What is known of operators


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


# Plans


@contextlib.contextmanager
def recording(**options):
    """Gives a tape for a block of operators alone: no frame, no autograd."""
    tape = Tape(this_thread(), None, **{"respect_hooks": True, "is_in_frame": False, **options})
    with Recorder(tape):
        yield tape


def numbers(values):
    return [value.number for value in values]


def frame(start=0, size=0):
    """Stands for the frame whose values are replayed."""
    return types.SimpleNamespace(
        outer=None,
        start=start,
        bytes=size,
        current=None,
        whole=None,
        watch=None,
        observed=lambda run, *args, in_order: run(*args),
        unseen=[],
    )


def test_readers_are_counted():
    """By operator and argument, and each who asks (Rule 13)."""
    x = torch.randn(3)
    with recording() as tape:
        h = x.sin()
        y = (h * h).cos() + h
        values = [tape.tables.known[id(tensor)] for tensor in (h, y)]
        source = values[0].op.args[0]
    plan, work = plan_for([values[1], values[0], values[1]], 0, nested=False)
    assert plan.readers[source.number] == 1
    assert plan.readers[values[0].number] == 4
    assert plan.readers[values[1].number] == 2
    assert [work.steps[number].facts.name for number in sorted(work.steps)] == ["sin", "mul", "cos", "add"]
    assert (work.leaves, work.crossing) == ([source], [])
    assert not plan.in_order
    assert source.saved.tensor is x


def test_what_nobody_needs_is_in_no_plan():
    """Neither operators that nothing asked for came from, nor what only they read (Rule 17)."""
    x, other = torch.randn(3), torch.randn(3)
    with recording() as tape:
        h = x.sin()
        (h + other).exp()
        y = h.cos()
        value = tape.tables.known[id(y)]
    plan, work = plan_for([value], 0, nested=False)
    assert [op.facts.name for op in work.steps.values()] == ["cos", "sin"]
    assert len(work.leaves) == 1
    assert len(plan.readers) == 3


def test_readers_in_lists_and_keywords():
    """``cat`` takes a list, ``index`` a list with holes, ``out=`` comes by name."""
    x, index = torch.randn(3), torch.tensor([2, 0])
    with recording() as tape:
        h = x.sin()
        joined = torch.cat([h, x, h])
        taken = joined[:, None][index, :]
        out = torch.zeros(2, 1)
        torch.add(taken, taken, out=out)
        known = tape.tables.known
        h_value, x_value, joined_value = known[id(h)], known[id(h)].op.args[0], known[id(joined)]
        value = tape.tables.known[id(out)]
    plan, work = plan_for([value], 0, nested=False)
    assert plan.readers[h_value.number] == 2
    assert plan.readers[x_value.number] == 2
    assert plan.readers[joined_value.number] == 1
    assert sorted(numbers(work.leaves)) == sorted([x_value.number, *(value.number for value in tape_leaves(work, index))])
    assert plan.written == {id(value.store)}


def tape_leaves(work, tensor):
    return [value for value in work.leaves if value.saved.tensor is tensor]


def test_a_leaf_is_one_value_however_often_it_is_read():
    x = torch.randn(3)
    with recording() as tape:
        y = (x * x) + x
        value = tape.tables.known[id(y)]
    plan, work = plan_for([value], 0, nested=False)
    assert [saved.saved.tensor is x for saved in work.leaves] == [True]
    assert plan.readers[work.leaves[0].number] == 3


def test_what_was_there_before_a_frame_is_another_ones():
    """A read that crosses goes by the number of what made the value (Rule 14)."""
    x = torch.randn(3)
    with recording() as tape:
        h = x.sin()
        start = tape.tables.number
        y = h.cos() * h
        values = [tape.tables.known[id(tensor)] for tensor in (h, y)]
    plan, work = plan_for([values[1]], start, nested=True)
    assert [op.facts.name for op in work.steps.values()] == ["mul", "cos"]
    assert work.crossing == [values[0]]
    assert work.leaves == []
    assert plan.readers[values[0].number] == 2
    plan, work = plan_for(values[:1], start, nested=True)  # asked for by a handle
    assert (work.steps, work.crossing) == ({}, [values[0]])


def test_a_write_in_a_frame_to_a_storage_that_was_there_crosses():
    """What such a storage is after the write is the outer frame's, who may have any view of it."""
    x = torch.randn(3)
    with recording() as tape:
        h = x.sin()
        start = tape.tables.number
        h.mul_(2)
        y = h.cos()
        values = [tape.tables.known[id(tensor)] for tensor in (h, y)]
    _, work = plan_for([values[1]], start, nested=True)
    assert work.crossing == [values[0]]
    assert [op.facts.name for op in work.steps.values()] == ["cos"]
    _, outer = plan_for([values[0]], 0, nested=False)
    assert sorted(step.facts.name for step in outer.steps.values() if hasattr(step, "facts")) == ["mul_", "sin"]


@pytest.mark.parametrize(
    ("name", "expected"), [("write last", False), ("read before", True), ("view before", False), ("read a view before", True)]
)
def test_order_matters_where_something_is_read_that_is_overwritten(name, expected):
    """And only there: else values are brought back one by one."""
    x = torch.randn(2, 2)
    with recording() as tape:
        h = x.sin()
        other = x
        if name == "read before":
            other = h.exp()
        elif name == "view before":
            view = h.t()
        elif name == "read a view before":
            other = h.t().exp()
        h.mul_(2)
        y = (view if name == "view before" else h) * other
        value = tape.tables.known[id(y)]
    assert plan_for([value], 0, nested=False)[0].in_order is expected


def test_work_for_what_is_left():
    """Of what is there nothing is done again."""
    x = torch.randn(3)
    with recording() as tape:
        h = x.sin()
        k = h.exp()
        y = k.cos()
        values = [tape.tables.known[id(tensor)] for tensor in (h, k, y)]
    work = work_for(values[2], 0, {values[0].number: h}, set(), nested=False)
    assert [op.facts.name for op in work.steps.values()] == ["cos", "exp"]
    work = work_for(values[2], 0, {values[1].number: k}, set(), nested=False)
    assert [op.facts.name for op in work.steps.values()] == ["cos"]
    work = work_for(values[0], 0, {}, set(), nested=False)
    assert [op.facts.name for op in work.steps.values()] == ["sin"]


# Replays


def assert_brought_back(program, *, size=0):
    """Records a program, which returns tensors, and brings each back to what it was; returns the operators that ran."""
    with recording() as tape:
        tensors = program()
        values = [tape.tables.known[id(tensor)] for tensor in tensors]
        expected = [tensor.clone() for tensor in tensors]
    tape.close()
    del tensors
    again = Replay(frame(size=size), values, None)
    found = []
    with CountOps() as ops:
        for value in values:
            if not again.has(value):
                bring_back(again, value)
            found.append(again.take(value))
    assert_same(found, expected)
    assert (again.tensors, again.held) == ({}, {})
    assert not any(again.readers.values())
    return ops.counts


@pytest.mark.parametrize("size", [0, 1 << 30], ids=["at once", "one by one"])
def test_values_come_back_and_go(size):
    """Each operator runs once, and nothing is left of what was brought back (Rule 13)."""
    x, w = torch.randn(4, 4), torch.randn(4, 4)

    def program():
        h = (x @ w).sin()
        first, second = h.split(2)
        best, index = second.max(1)
        return h, first.exp() * second, best, index, torch.cat([first, first]).softmax(-1)

    ran = assert_brought_back(program, size=size)
    assert ran == {"mm": 1, "sin": 1, "split": 1, "exp": 1, "mul": 1, "max": 1, "cat": 1, "_softmax": 1}


@pytest.mark.parametrize("size", [0, 1 << 30], ids=["at once", "one by one"])
def test_written_values_come_back(size):
    """The values before a write, and those after; inputs from outside are not written to."""
    x = torch.randn(4, 4)
    before = x.clone()

    def program():
        h = x.sin()
        k = h.exp()
        h[1:].mul_(2)
        h.t_()
        e = torch.empty(4)
        e.uniform_()
        torch._foreach_mul_([e, k], 3.0)
        return h, k, h.cos(), e

    ran = assert_brought_back(program, size=size)
    assert (ran["sin"], ran["exp"], ran["mul_"], ran["uniform_"], ran["_foreach_mul_"]) == (1, 1, 1, 1, 1)
    assert torch.equal(x, before)


def test_random_numbers_come_back_and_the_stream_stays():
    """Each operator from the state that it drew from (Rule 7); afterwards the generator is where it was."""
    generator = torch.Generator().manual_seed(1)
    x = torch.ones(100)

    def program():
        return F.dropout(x, 0.5), torch.bernoulli(x / 2, generator=generator), torch.rand(5), torch.randperm(9)

    states = []
    with recording() as tape:
        tensors = program()
        values = [tape.tables.known[id(tensor)] for tensor in tensors]
        states.append((torch.get_rng_state(), generator.get_state()))
    again = Replay(frame(), values, None)
    for value, tensor in reversed(list(zip(values, tensors, strict=True))):
        if not again.has(value):
            bring_back(again, value)
        assert torch.equal(again.take(value), tensor)
    assert torch.equal(torch.get_rng_state(), states[0][0])
    assert torch.equal(generator.get_state(), states[0][1])


def test_a_tape_without_a_frame_is_not_seen_by_the_runtime():
    """A recorder alone makes no handles."""
    x = torch.randn(3, requires_grad=True)
    with recording():
        y = x.sin()
    assert y.grad_fn._saved_self is x
    assert not ckpt_hooks.is_recomputing()
