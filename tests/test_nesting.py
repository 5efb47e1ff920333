"""Rules 1 to 6 of nested regions, by number, against plain autograd and counted."""

from __future__ import annotations

import random

import pytest
import torch
from torch.autograd import grad

from ckpt_hooks import checkpoint, checkpoint_region, policies
from ckpt_hooks.offload import offload_saved_tensors
from tests.measure import Calls, CountOps, Log, in_turns, leaf


def chain(x):
    return x.sin().exp().cos()


def test_rule_2_inputs_are_saved_with_the_parent():
    """Inner input and outer saves are handles of the outer frame; bringing back the inner one reruns the outer once."""
    outer_calls, inner_calls = Calls(lambda x: checkpoint(inner_calls, x.sin())), Calls(chain)
    x = leaf(3)
    y = checkpoint(outer_calls, x)
    assert (outer_calls.count, inner_calls.count) == (1, 1)
    (g,) = grad(y.sum(), x)
    # The outer rerun meets the inner region and runs it forward; the inner frame of the first forward then reruns.
    assert (outer_calls.count, inner_calls.count) == (2, 2)
    assert torch.equal(g, grad(chain(x.sin()).sum(), x)[0])


def test_rule_3_recomputes_once_a_backward(impl):
    calls = Calls(lambda x: chain(chain(chain(x))))
    x = leaf(3)
    y = impl(calls, x).sum()
    y.backward(retain_graph=True)
    assert calls.count == 2
    y.backward()
    assert calls.count == 3


def test_rule_5_stops_at_the_last_saved_tensor(impl):
    x = leaf(3)
    y = impl(lambda x: x.sin().cos().neg().neg().neg(), x)
    with CountOps() as ops:
        y.sum().backward()
    # ``cos`` saves its input before it runs, and is the last to save; the backward of ``cos`` calls ``sin``, that of ``sin``
    # calls ``cos``: one each.
    assert ops.counts["neg"] == 3 + 1
    assert ops.counts["sin"] == 1 + 1
    assert ops.counts["cos"] == 0 + 1


def test_rule_5_dead_handles_do_not_count():
    for lives in (True, False):
        a, b = checkpoint(lambda x: ((x + 1).sin(), x.exp().tanh()), leaf(3))
        b = b if lives else None
        with CountOps() as ops:
            a.sum().backward()
        # The sine saves its input: without the others the stop comes before its kernel.
        assert [ops.counts[name] for name in ("add", "sin", "exp", "tanh")] == [1, *[lives] * 3]


SMALL, LARGE = 3, 5000


def begun_and_ended(function, size):
    """Returns how often a region's function began and came to its end, in forward and backward."""
    begun, ended, x = Log(), Log(), leaf(size)

    def region(x):
        begun.append(1)
        y = function(x)
        ended.append(1)
        return y

    found, expected = (grad(y[0].sum() if isinstance(y, tuple) else y.sum(), x) for y in (checkpoint(region, x), function(x)))
    assert torch.equal(found[0], expected[0])
    return len(begun), len(ended)


def exps(num_negs):
    """Returns a function whose last operators save their results, but for so many that save nothing."""

    def function(x):
        y = x.sin().exp().exp()
        for _ in range(num_negs):
            y = y.neg()
        return y

    return function


FROZEN, LEAF = torch.ones(SMALL, 2000, dtype=torch.float64), torch.ones(2, SMALL, dtype=torch.float64, requires_grad=True)

RETURNING = {
    "nothing left": (exps(0), LARGE),
    "nothing left, small": (exps(0), SMALL),
    "two small operators": (exps(2), SMALL),
    "two small operators, and the last one to save": (lambda x: x.sin().exp().cos().neg().neg(), SMALL),
}
STOPPED = {
    "an operator": (exps(1), LARGE),
    "the operator that saves": (lambda x: x.sin().exp().cos(), LARGE),
    "the operator that saves a mask": (lambda x: x.sin().exp() * torch.ones(LARGE, dtype=x.dtype), LARGE),
    "three small operators": (exps(3), SMALL),
    "a large result": (lambda x: exps(0)(x).repeat(LARGE), SMALL),
    "a result in a tuple": (lambda x: (exps(1)(x),), SMALL),
    "a large weight": (lambda x: x.sin().exp() @ FROZEN, SMALL),
    "a leaf, of any size": (lambda x: torch.mv(LEAF, x.sin().exp()), SMALL),
}


@pytest.mark.parametrize(("function", "size"), RETURNING.values(), ids=RETURNING)
def test_rule_5_a_rerun_that_is_as_good_as_through_returns(function, size):
    assert begun_and_ended(function, size) == (2, 2)


@pytest.mark.parametrize(("function", "size"), STOPPED.values(), ids=STOPPED)
def test_rule_5_a_rerun_with_work_left_is_stopped(function, size):
    assert begun_and_ended(function, size) == (2, 1)


def test_rule_5_beside_other_ranks_reruns_are_stopped(monkeypatch):
    """What is left might be a collective, which other ranks do not run."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert begun_and_ended(exps(0), SMALL) == (2, 1)


def test_rule_5_a_rerun_for_one_value_is_stopped():
    """The function may write to the value afterwards."""
    calls, ended = Calls(exps(0)), Log()
    y = checkpoint(lambda x: (calls(x), ended.append(1))[0], leaf(SMALL))
    assert torch.equal(y.grad_fn._saved_result, y)
    assert (calls.count, len(ended)) == (2, 1)


def test_rule_5_a_rerun_that_saves_more_is_stopped_where_it_does():
    calls = Calls(lambda x: exps(0)(x) if calls.count == 1 else exps(0)(x).tanh().cos().cos())
    x = leaf(SMALL)
    y = checkpoint(calls, x)
    with CountOps() as ops:
        (g,) = grad(y.sum(), x)
    assert torch.equal(g, grad(exps(0)(x).sum(), x)[0])
    # ``tanh`` saves its result, which stops the rerun; the backward of ``sin`` calls ``cos``.
    assert (ops.counts["tanh"], ops.counts["cos"]) == (1, 1)


@pytest.mark.parametrize("caught", [Exception, BaseException])
def test_rule_8_a_fallback_around_the_stop(caught):
    """One for errors does not run; what one for everything does is not taken for good."""
    fallbacks, results = Log(), Log()

    def function(x):
        try:
            return (x * 2).sin().exp().neg().neg().neg()
        except caught:
            fallbacks.append(1)
            y = x.cos()
            results.append(1)  # the stop comes again before, at the tensor that ``cos`` saves
            return y.tanh().tanh()

    x = leaf(3)
    (g,) = grad(checkpoint(function, x).sum(), x)
    assert torch.equal(g, grad((x * 2).sin().exp().neg().neg().neg().sum(), x)[0])
    assert (len(fallbacks), len(results)) == (caught is BaseException, 0)


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("early_stop", [True, False])
def test_rule_8_what_a_function_raises_behind_the_last_value(raised, early_stop):
    """As on being stopped, an error is of no consequence where the function need not have come that far."""
    calls = Log()

    def function(x):
        y = exps(0)(x)
        calls.append(1)
        if len(calls) > 1:
            raise raised
        return y

    x = leaf(3)
    y = checkpoint(early_stop=early_stop)(function)(x).sum()
    if early_stop and raised is ValueError:
        assert torch.equal(grad(y, x)[0], grad(exps(0)(x).sum(), x)[0])
    else:
        with pytest.raises(raised):
            grad(y, x)
    assert len(calls) == 2


def test_rule_6_backward_inside_forward_leaves_regions_around_alone():
    """Forward still has its arguments at hand, so nobody needs to run the regions around up to here again."""
    outer_calls, inner_calls = Log(), Log()

    def inner(x):
        inner_calls.append(1)
        y = x.sin().cos()
        return y * grad(y.sum(), x, create_graph=True)[0].detach()

    def outer(x):
        outer_calls.append(1)
        return checkpoint(inner, checkpoint(inner, x.exp()).tanh()).sin()

    x = leaf(3)
    y = checkpoint(outer, x)
    assert (len(outer_calls), len(inner_calls)) == (1, 4)  # each of the two once more, for its own backward
    (found,) = grad(y.sum(), x)
    plain = leaf(3)
    with torch.no_grad():
        plain.copy_(x)

    def unwrapped(x):
        for after in (torch.tanh, torch.sin):
            y = x.sin().cos()
            x = after(y * grad(y.sum(), x, create_graph=True)[0].detach())
        return x

    (expected,) = grad(unwrapped(plain.exp()).sum(), plain)
    assert torch.equal(found, expected)
    assert len(outer_calls) == 2


def test_rule_6_a_region_after_a_backward_inside_forward():
    def function(x):
        h = x.sin().exp()
        (found,) = grad(h.sum(), x, retain_graph=True)
        return checkpoint(lambda h: h.sin().exp(), h * found.detach()).cos()

    x = leaf(4)
    assert torch.equal(grad(checkpoint(function, x).sum(), x)[0], grad(function(x).sum(), x)[0])


@pytest.mark.parametrize("early_stop", [True, False])
def test_rule_6_a_rerun_in_the_middle_of_forward_does_not_run_ahead(early_stop):
    """A backward inside asks for tensors before forward has come to the write below."""

    def found(form):
        x = torch.linspace(-1, 1, 8, requires_grad=True)
        h, log = x * 1.2, Log()

        def function():
            y = h * 0.25
            (inner,) = grad(torch.nn.functional.celu(y).sum(), y, create_graph=True)
            h.view(2, 4)[0].mul_(-0.7)
            log.append(inner.detach())
            return h * inner

        result = form(function)
        return [result.detach(), h.detach(), *log]

    expected = found(lambda function: function())
    results = found(lambda function: checkpoint(early_stop=early_stop)(function)())
    assert list(map(torch.equal, results, expected)) == [True] * 3


def test_rule_6_access_outside_of_backward_stops_at_what_was_asked_for():
    """One saved tensor outside of backward costs the operators up to it."""
    x = leaf(3)
    y = checkpoint(lambda x: x.sin().exp().tanh().cos(), x)
    node = y.grad_fn.next_functions[0][0].next_functions[0][0]  # exp's
    with CountOps() as ops:
        node._saved_result  # noqa: B018
    assert ops.counts == {"sin": 1, "exp": 1}


# Saved tensors in any order, which torch leaves open


def program(x, w):
    h = torch.nn.functional.dropout(x @ w, 0.5)
    for _ in range(2):
        h = torch.tanh(h @ w) * h.exp() + (h.sin() * h.cos()).softmax(-1)
    return h.sigmoid() @ w


def region(function, *args):
    return checkpoint_region()(function)(*args)


def offloaded(function, *args):
    with offload_saved_tensors(min_offload_size=1024):
        return region(function, *args)


MM = torch.ops.aten.mm.default
#: Ways to run the program, and how often one backward calls it again: a recorded region does not.
FORMS = {
    "checkpoint": (checkpoint, 1),
    "to its end": (lambda function, *args: checkpoint(function, *args, early_stop=False), 1),
    "policy": (lambda function, *args: checkpoint(policy=[MM])(function)(*args), 0),
    "policy that offloads": (lambda function, *args: checkpoint(policy=policies.offload_ops(MM))(function)(*args), 0),
    "nested": (lambda function, *args: checkpoint(lambda *args: checkpoint(function, *args), *args), 1),
    "region": (region, 0),
    "region among offloaded tensors": (offloaded, 0),
    "region in checkpoint": (lambda function, *args: checkpoint(lambda *args: region(function, *args), *args), 1),
    "checkpoint in region": (lambda function, *args: region(lambda *args: checkpoint(function, *args), *args), 1),
}


def read(y, order):
    """Reads the saved tensors of a graph in an order; returns them in the order of packing, None where a node needs none."""
    nodes, todo = {}, [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes and node.name() != "torch::autograd::AccumulateGrad":
            nodes[node] = node._sequence_nr()
            todo += [below for below, _ in node.next_functions]
    found = [
        (node, name)
        for node in sorted(nodes, key=nodes.__getitem__)
        for name in dir(node)
        if name.startswith("_saved_") and isinstance(getattr(node, f"_raw{name}", None), torch._C._autograd.SavedTensor)
    ]
    shuffled = found[::-1] if order == "backward" else found[:]
    if isinstance(order, int):
        random.Random(order).shuffle(shuffled)
    values = {(node, name): getattr(node, name) for node, name in shuffled}
    return [values[access] for access in found]


@pytest.mark.parametrize(("form", "order", "within"), in_turns(FORMS, ("forward", "backward", 0, 1), (True, False)))
@pytest.mark.usefixtures("transfers")
def test_rule_6_saved_tensors_in_any_order(form, within, order):
    """Each is plain autograd's bit for bit. In one backward a recompute serves them all, and the next one another."""
    run, reruns = FORMS[form]
    x, w = leaf(16, 16), (torch.randn(16, 16, dtype=torch.float64) / 16).requires_grad_()
    torch.manual_seed(0)
    plain = program(x.sin(), w)
    expected = [None if value is None else value.clone() for value in read(plain, "forward")]
    gradients = grad(plain.sum(), (x, w))
    torch.manual_seed(0)
    calls, found = Calls(program), []
    y = run(calls, x.sin(), w)
    if within:  # in the course of a backward which has nothing to do with it
        unrelated = leaf(1) * 1
        unrelated.register_hook(lambda gradient: found.extend(read(y, order)))
        unrelated.sum().backward()
        assert calls.count == 1 + reruns
        calls.count = 1
    else:
        found = read(y, order)
    assert len(found) == len(expected)
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(map(torch.equal, grad(y.sum(), (x, w)), gradients))
    assert not within or calls.count == 1 + reruns


def test_a_saved_tensor_may_be_unpacked_twice_in_one_backward():
    """A custom function that reads ``ctx.saved_tensors`` twice costs one more recompute for each tensor, not an error."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, g):
            first, second = ctx.saved_tensors, ctx.saved_tensors
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            return g * second[1], g * second[0]

    calls = Calls(lambda x: Twice.apply(x.sin(), x.exp()).cos())
    x = leaf(3)
    (g,) = grad(checkpoint(calls, x).sum(), x)
    assert calls.count == 4
    assert torch.equal(g, grad((x.sin() * x.exp()).cos().sum(), x)[0])


def test_is_grads_batched_reruns_outside_of_the_map():
    """A backward that maps over gradients reruns the region once, unmapped, with the dropout of its forward."""
    x = leaf(3)
    calls = Calls(lambda x: torch.nn.functional.dropout(x.sin(), 0.5).exp())
    torch.manual_seed(1)
    y = checkpoint(calls, x)
    (g,) = grad(y, x, torch.eye(3, dtype=torch.float64), is_grads_batched=True)
    assert calls.count == 2
    torch.manual_seed(1)
    expected = grad(calls(x), x, torch.eye(3, dtype=torch.float64), is_grads_batched=True)[0]
    assert torch.equal(g, expected)


@pytest.mark.parametrize("options", [{}, {"policy": [torch.ops.aten.exp.default]}])
def test_an_error_of_the_region_around_is_not_one_of_the_region_inside(options):
    """Which asked for its arguments, and whose function has not run."""
    calls = Log()

    def function(x):
        calls.append(x)
        if len(calls) == 2:
            raise KeyError
        return chain(x)

    y = checkpoint(lambda x: checkpoint(**options)(function)(x * 2) * 3, leaf(3))
    with pytest.raises(KeyError):
        y.sum().backward()
