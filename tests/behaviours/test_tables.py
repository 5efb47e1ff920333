"""Operators that only one of the two runs has, under a policy: tables that are built once, weights that are cached, logging.

Either results are those of the program without regions, or an error says where the two runs part.
"""

from __future__ import annotations

import contextlib
import functools
import re

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn

from ckpt_hooks import CheckpointPolicy, DeterminismError, checkpoint, is_recomputing, policies
from tests.behaviours.runs import Run, assert_as_eager, gradients, plain
from tests.measure import CountOps, Log, leaf

aten = torch.ops.aten
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*but views run again in each recompute"),
    pytest.mark.filterwarnings("ignore:.*names operators that did not run"),
]


def answering(answer, *operators):
    return lambda ctx, op, *args, **kwargs: answer if not operators or op in operators else CheckpointPolicy.PREFER_RECOMPUTE


#: A policy that counts is one for each region.
POLICIES = {
    "a list": [aten.mm.default, aten.bmm.default, aten.addmm.default],
    "a list with the table's": [aten.mm.default, aten.mul.Tensor, aten.sin.default, aten.cos.default],
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "every second product": policies.save_every(aten.mul.Tensor, 2),
    "every first sine": policies.save_every(aten.sin.default, 1),
    "must save": answering(CheckpointPolicy.MUST_SAVE),
    "prefer save": answering(CheckpointPolicy.PREFER_SAVE),
    "must save products": answering(CheckpointPolicy.MUST_SAVE, aten.mm.default, aten.mul.Tensor),
    "offload": policies.offload_ops(aten.mm.default, aten.mul.Tensor),
    "must offload": answering(CheckpointPolicy.MUST_CPU_OFFLOAD),
    "both": policies.save_from_both_policies([aten.mm.default], policies.save_every(aten.mul.Tensor, 3)),
}


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def table(size, width, dtype):
    frequencies = 1.0 / 10.0 ** (torch.arange(0, width, 2, dtype=dtype) / width)
    angles = torch.outer(torch.arange(size, dtype=dtype), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def causal_mask(size, dtype):
    mask = torch.full((size, size), float("-inf"), dtype=dtype)
    return torch.triu(mask, 1)


class Cached(nn.Module):
    """A layer of attention whose tables and mask come from functions with a cache."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3))
        self.table = functools.lru_cache(table)
        self.mask = functools.lru_cache(maxsize=1)(causal_mask)

    def tables(self, x):
        return (*self.table(x.shape[0], 4, x.dtype), self.mask(x.shape[0], x.dtype))

    def forward(self, x):
        cos, sin, mask = self.tables(x)
        q, k = rotate(self.q(x), cos, sin), rotate(self.k(x), cos, sin)
        return torch.softmax(q @ k.t() + mask, -1) @ self.v(x) + x


class Lazy(Cached):
    """Keeps them in attributes, as Megatron does."""

    _cos_cached = _sin_cached = _mask_cached = None

    def tables(self, x):
        if self._cos_cached is None or self._cos_cached.shape[0] < x.shape[0]:
            self._cos_cached, self._sin_cached = table(x.shape[0], 4, x.dtype)
            self._mask_cached = causal_mask(x.shape[0], x.dtype)
        return tuple(one[: x.shape[0]] for one in (self._cos_cached, self._sin_cached, self._mask_cached))


class InAnObject(Cached):
    """Keeps them in a dictionary of an object that is no module."""

    def __init__(self):
        super().__init__()
        self.store = type("Store", (), {})()
        self.store.tables = {}

    def tables(self, x):
        if x.shape[0] not in self.store.tables:
            self.store.tables[x.shape[0]] = (*table(x.shape[0], 4, x.dtype), causal_mask(x.shape[0], x.dtype))
        return self.store.tables[x.shape[0]]


def several_steps(run, module, steps=3):
    """Trains for some steps; returns all that is to be compared."""
    found = []
    for _ in range(steps):
        x = leaf(3, 4)
        module.zero_grad()
        found += gradients(run(module, run(module, x)), x)
        found += [parameter.grad.clone() for parameter in module.parameters()]
    return found


@pytest.mark.parametrize("check", ["default", "none", "values"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Cached, Lazy, InAnObject])
@pytest.mark.slow
def test_tables_that_forward_builds(kind, policy, check):
    """The first step and later ones, whatever is kept."""
    run = Run("ours").selecting(POLICIES[policy], determinism_check=check)
    assert_as_eager(lambda run: several_steps(run, kind()), run)


#: The counts of these are others where a table is not built, and what the inner region keeps is the outer one's to count.
COUNTING = ("every second product", "every first sine", "both")


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in COUNTING])
def test_tables_that_forward_builds_in_nested_regions(policy):
    """What no gradient flows through is not kept by way of a region around."""
    assert_as_eager(lambda run: several_steps(run, Cached()), Run("ours", "nested").selecting(POLICIES[policy]))


@pytest.mark.parametrize("policy", COUNTING)
def test_tables_and_policies_that_count_in_nested_regions(policy):
    with contextlib.suppress(DeterminismError):
        assert_as_eager(lambda run: several_steps(run, Cached()), Run("ours", "nested").selecting(POLICIES[policy]))


@pytest.mark.parametrize("options", [{"early_stop": False}, {"debug": True}, {"preserve_rng_state": False}], ids=str)
def test_tables_under_other_options(options):
    run = Run("ours").selecting(POLICIES["must save products"], **options)
    assert_as_eager(lambda run: several_steps(run, Cached()), run)


@pytest.mark.parametrize("policy", ["a list", "everything", "every second product"])
def test_several_backwards_over_a_forward_that_built_a_table(policy):
    def program(run):
        module, x = Cached(), leaf(3, 4)
        y = run(module, x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found = [first.detach(), *torch.autograd.grad(y.square().sum(), (x, *module.parameters()), retain_graph=True)]
        return [*found, *gradients(first.square().sum() + y.sum(), x)]

    assert_as_eager(program, Run("ours").selecting(POLICIES[policy]))


@pytest.mark.parametrize("outer", ["a list", "everything", None])
@pytest.mark.parametrize("inner", ["a list with the table's", "everything", None])
def test_tables_in_nested_regions_of_different_policies(outer, inner):
    def wrap(policy, function):
        return checkpoint(function) if policy is None else checkpoint(policy=POLICIES[policy])(function)

    def call(policy, function, *args):
        return checkpoint(function, *args) if policy is None else checkpoint(policy=POLICIES[policy])(function)(*args)

    def program(run):
        module, x = Cached(), leaf(3, 4)
        if run is plain:
            return gradients(module(module(x).sin()).cos(), x)
        return gradients(call(outer, lambda x: call(inner, module, call(inner, module, x).sin()).cos(), x), x)

    assert_as_eager(program, Run("ours"))


def test_autocast_casts_weights_besides():
    """One run casts a weight that the other finds cast, which makes a node."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.table = functools.lru_cache(lambda size: torch.arange(size).float().sin())

        def forward(self, x):
            return self.layer(x * self.table(4)).sin() + self.layer(x)

    def program(run):
        module, x = Half(), leaf(2, 4).float().detach().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = module.layer(x)
            y = run(module, x)
        return gradients(before.float() + y.float(), x, *module.parameters())

    for policy in ("a list", "everything", "must save"):
        assert_as_eager(program, Run("ours").selecting(POLICIES[policy]))


def test_what_is_kept_does_not_run_again_from_the_second_step_on():
    """The first recompute runs everything, for what was kept to be compared."""
    module = Cached()
    counts = []
    for _ in range(3):
        y = checkpoint(policy=POLICIES["a list"])(module)(leaf(3, 4))
        with CountOps() as ops:
            y.sum().backward()
        counts.append(ops.counts["mm"])
    assert counts[0] - counts[1] == 4
    assert counts[1] == counts[2]


# Weights that are cached


class Symmetric(nn.Module):
    """Computes a weight from half of it."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_parametrize_cached(policy, trained, inside):
    """Forward computes a weight, the recompute finds it; or the other way round, where backward runs outside of the block."""

    def program(run):
        layer = nn.Linear(4, 4, dtype=torch.float64)
        parametrize.register_parametrization(layer, "weight", Symmetric())
        layer.parametrizations.weight.original.requires_grad_(trained)
        found = []
        for _ in range(2):
            x = leaf(2, 4)
            with parametrize.cached():
                y = run(lambda x: layer(x.sin()).exp(), x)
                if inside or not trained:
                    y = run(lambda x: layer(x.sin()).exp(), y)
                if inside:
                    y.sum().backward()
            if not inside:
                y.sum().backward()
            found += [y, x.grad, *(parameter.grad for parameter in layer.parameters())]
        return found

    assert_as_eager(program, Run("ours").selecting(POLICIES[policy]))


@pytest.mark.parametrize("policy", ["a list", "everything", "nothing"])
def test_a_weight_that_requires_grad_and_is_gone_in_backward(policy):
    """Nothing tells that what the recompute computes is what forward found."""
    layer = nn.Linear(4, 4, dtype=torch.float64)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    with parametrize.cached():
        layer(leaf(2, 4))
        y = checkpoint(policy=POLICIES[policy])(lambda x: layer(x.sin()).exp())(leaf(2, 4))
    with pytest.raises(DeterminismError, match=re.escape("run backward inside of `parametrize.cached()`")) as caught:
        y.sum().backward()
    assert (caught.value.index, caught.value.expected, caught.value.found) == (1, "aten.addmm.default", "aten.triu.default")


# Operators in one run alone: right, or an error


def in_forward():
    return not is_recomputing()


def in_the_rerun():
    return is_recomputing()


ONE_RUN = pytest.mark.parametrize("where", [in_forward, in_the_rerun])
KEEPS = pytest.mark.parametrize("policy", ["everything", "must save", "every second product", "nothing", "must save products"])


def raises_or_is_right(function, policy, *, error):
    """Runs a function of three tensors under a policy; the third needs no gradient."""

    def program(run):
        x, w, data = leaf(3, 3), leaf(3, 3), leaf(3, 3).detach()
        return gradients(run(function, x, w, data), x, w)

    with pytest.raises(DeterminismError) if error else contextlib.nullcontext():
        assert_as_eager(program, Run("ours").selecting(POLICIES[policy]))


@ONE_RUN
@KEEPS
def test_the_same_operator_on_another_tensor_just_before(where, policy):
    """A product for logging, and then a product of the same shapes."""

    def function(x, w, data):
        if where():
            data * 3
        return ((x * w) * w).sin() @ w

    raises_or_is_right(function, policy, error=False)


@ONE_RUN
@KEEPS
def test_a_whole_layer_of_identical_ones_for_logging(where, policy):
    def layer(x, w):
        return (x @ w).sin() * w

    def function(x, w, data):
        if where():
            with torch.no_grad():
                layer(data, data)
        for _ in range(3):
            x = layer(x, w)
        return x

    raises_or_is_right(function, policy, error=False)


@ONE_RUN
@KEEPS
@pytest.mark.parametrize("saves", [True, False])
def test_a_whole_layer_of_identical_ones(where, policy, saves):
    """Shifting by one layer is never right."""

    def function(x, w, data):
        for _ in range(3 + where()):
            x = (x @ w).sin() * w if saves else (x * 2 + data).neg()
        return x.exp()

    raises_or_is_right(function, policy, error=True)


@ONE_RUN
@KEEPS
@pytest.mark.parametrize("place", ["first", "middle", "last", "after what is kept"])
def test_an_operator_that_gradients_flow_through(where, policy, place):
    """It saves nothing, so that only its node tells."""

    def function(x, w, data):
        def step(name, value):
            return value * 2 if name == place and where() else value

        h = (step("first", x) @ w).sin() * w
        h = step("middle", h).exp() @ w
        h = step("last", h).cos() * data
        return step("after what is kept", h).sin()

    raises_or_is_right(function, policy, error=True)


@ONE_RUN
@pytest.mark.parametrize("policy", ["everything", "must save"])
def test_data_that_is_computed_otherwise(where, policy):
    """No gradient flows there, but what was kept downstream is compared."""

    def function(x, w, data):
        if where():
            data = data + 1
        return (x * data).sin() @ w

    raises_or_is_right(function, policy, error=True)


@ONE_RUN
@KEEPS
@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, lambda t: torch.rand(3), lambda t: t.clone().normal_()])
def test_random_numbers_in_one_run(where, policy, draw):
    """What is drawn after that would be other numbers."""

    def function(x, w, data):
        if where():
            draw(data)
        return (nn.functional.dropout(x * w, 0.5) @ w).sin()

    raises_or_is_right(function, policy, error=True)


@KEEPS
def test_random_numbers_around_a_table(policy):
    build = functools.lru_cache(lambda size: torch.arange(size, dtype=torch.float64).sin())

    def function(x, w, data):
        h = nn.functional.dropout(x * w, 0.5) * build(3)
        return nn.functional.dropout(h @ w, 0.5).sin()

    def program(run):
        build.cache_clear()
        x, w, data = leaf(3, 3), leaf(3, 3), leaf(3, 3).detach()
        return gradients(run(function, x, w, data), x, w)

    assert_as_eager(program, Run("ours").selecting(POLICIES[policy]))


@ONE_RUN
@KEEPS
def test_another_operator_in_its_place(where, policy):
    def function(x, w, data):
        h = (x @ w).sin()
        return (h.exp() if where() else h.tanh()) @ w

    raises_or_is_right(function, policy, error=True)


@KEEPS
def test_one_table_in_forward_and_another_one_in_the_rerun(policy):
    """Both runs have operators of their own at one place."""

    def function(x, w, data):
        (data.exp() if in_forward() else data.tanh()).sum()
        return (x * w).sin() @ w

    raises_or_is_right(function, policy, error=True)


@KEEPS
def test_a_loop_whose_trip_count_changes(policy):
    """Without gradients and unused, it is logging; what it leaves in the values is another matter."""
    trips = [4, 2]

    def function(x, w, data):
        total = data
        for _ in range(trips[is_recomputing()]):
            total = total * 2
        return (x * w).sin() @ w

    raises_or_is_right(function, policy, error=False)


def test_an_error_names_what_returned_other_values():
    def function(x, data):
        if is_recomputing():
            data = data + 1
        return (x * data).exp()

    y = checkpoint(policy=[aten.mul.Tensor], name="scaled")(function)(leaf(3), leaf(3).detach())
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    error = caught.value
    assert error.region == ("scaled",)
    assert (error.index, error.expected, error.found) == (
        1,
        "aten.mul.Tensor that returned what the policy kept",
        "aten.mul.Tensor that returned other values",
    )


def test_the_function_runs_twice_in_the_first_recompute_only():
    calls = Log()
    build = functools.lru_cache(lambda: torch.arange(3.0).sin())

    def function(x):
        calls.append(is_recomputing())
        return (x * build()).exp()

    for _ in range(2):
        checkpoint(policy=[aten.exp.default])(function)(leaf(3)).sum().backward()
    assert calls == [False, True, True, False, True]


def test_an_exception_of_the_function_is_its_own():
    """It is not called again for one that it raises though the operators are those of forward."""
    calls = Log()

    def function(x):
        calls.append(1)
        h = x.sin()
        if len(calls) == 2:
            raise ValueError("on purpose")
        return h.exp()

    y = checkpoint(policy=[aten.sin.default])(function)(leaf(3))
    with pytest.raises(ValueError, match="on purpose"):
        y.sum().backward()
    assert len(calls) == 2


def test_backward_in_the_middle_of_forward():
    """A recompute then has not all of forward's operators to be laid beside."""
    build = functools.lru_cache(lambda: torch.arange(3, dtype=torch.float64).sin())

    def function(x):
        h = (x * build()).exp()
        return h * torch.autograd.grad(h.sum(), x, create_graph=True)[0]

    x = leaf(3)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    build.cache_clear()
    with contextlib.suppress(DeterminismError):
        assert torch.equal(torch.autograd.grad(checkpoint(policy=[aten.exp.default])(function)(x).sum(), x)[0], expected)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("policy", ["everything", "must save", "a list"])
def test_nothing_is_held_after_a_recompute_that_was_done_twice(policy):
    import weakref

    module, x = Cached(), leaf(3, 4)
    y = checkpoint(policy=POLICIES[policy])(module)(x)
    y.sum().backward()
    reference = weakref.ref(module)
    node = weakref.ref(y)
    del module, y
    assert node() is None
    assert reference() is None
