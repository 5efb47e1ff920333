"""What a selective region remembers: kinds of operators, what may be kept of them, and for how long."""

from __future__ import annotations

import contextlib
import pickle
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch.autograd import grad
from torch.testing._internal.two_tensor import TwoTensor

import ckpt_hooks
from ckpt_hooks import CheckpointPolicy, policies
from ckpt_hooks._core.modes import is_compiled_code_running
from ckpt_hooks._function.selective.selection import Selection
from ckpt_hooks._operators.facts import Kind, facts_of
from tests.measure import CountOps, Log, Token, leaf

aten = torch.ops.aten


def region(function, policy, **options):
    return ckpt_hooks.checkpoint(policy=policy, **options)(function)


def assert_as_plain(function, *inputs, policy=policies.everything_saveable):
    """Asserts that gradients under a policy are those without regions."""
    torch.manual_seed(0)
    expected = grad(function(*inputs).sum(), inputs)
    torch.manual_seed(0)
    found = grad(region(function, policy)(*inputs).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Kinds of operators


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        (aten.detach.default, Kind.IGNORED),
        (aten.sym_size.default, Kind.IGNORED),
        (torch.ops.prim.layout.default, Kind.IGNORED),
        (torch.ops.profiler._record_function_exit._RecordFunction, Kind.RANGE),
        (aten._to_copy.default, Kind.CAST),
        (aten.view.default, Kind.VIEW),
        (aten.split.Tensor, Kind.VIEW),
        (aten.add_.Tensor, Kind.WRITES),
        (aten.add.out, Kind.WRITES),
        (aten._foreach_mul_.Scalar, Kind.WRITES),
        (aten.rrelu_with_noise.default, Kind.WRITES),
        (aten.native_batch_norm.default, Kind.REWRITES),
        (aten.batch_norm_gather_stats_with_counts.default, Kind.REWRITES),
        (aten._unsafe_view.default, Kind.ALIASES),
        (aten.unsafe_split.Tensor, Kind.ALIASES),
        (aten.mm.default, Kind.SAVEABLE),
        (aten.bernoulli.p, Kind.RANDOM),
        (aten._scaled_dot_product_flash_attention.default, Kind.RANDOM),
        (torch.ops.higher_order.cond, Kind.REWRITES),
    ],
    ids=str,
)
def test_kinds(operator, kind):
    assert facts_of(operator).kind is kind


def test_collectives_are_kept_as_they_are():
    """They are complete only when somebody has waited; so no hook gets them, and none copies them to the host."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no collectives")
    assert facts_of(torch.ops._c10d_functional.all_reduce.default).kind is Kind.COLLECTIVE
    assert facts_of(torch.ops.c10d.allreduce_.default).kind is Kind.REWRITES
    packed = []
    for operator in (aten.sin.default, torch.ops._c10d_functional.all_reduce.default):
        selection = Selection()
        selection.attach([], ("region", None), (packed.append, lambda value: value), respect_hooks=True)
        selection.outputs.keep(0, torch.ones(3), (), {}, None, facts_of(operator), offload=True)
        assert len(packed) == 1


def test_what_an_operator_writes_to():
    """The arguments that its schema marks, and no others: what it adds is still what it was."""
    x, y = torch.ones(2), torch.ones(2)
    assert facts_of(aten.add_.Tensor).written_in((x, y), {}) == [x]
    assert facts_of(aten.add.out).written_in((x, y), {"out": y})[0] is y


def test_an_output_that_is_added_in_place_to_something_is_kept():
    """Reading is no writing."""
    x, w = leaf(3, 3), leaf(3, 3)

    def function(x, w):
        return (x.cos().add_(x @ w)).sin()

    with CountOps() as ops:
        region(function, [aten.mm.default])(x, w).sum().backward()
    assert ops.counts["mm"] == 1 + 2  # forward's, and those of backward
    assert_as_plain(function, x, w, policy=[aten.mm.default])


# What stands in for an operator


def test_memory_that_was_freed():
    """As frameworks free what they gathered: the operator runs again."""

    def function(x, w):
        h = x @ w
        y = h + 1
        h.untyped_storage().resize_(0)
        return y.sin()

    assert_as_plain(function, leaf(3, 3), leaf(3, 3), policy=[aten.mm.default])


def test_a_result_in_the_memory_of_an_argument_runs_again():
    """It is not kept, though its schema says that the memory is its own."""
    ran = Log()
    with torch.library._scoped_library("ckpt_hooks_tests", "FRAGMENT") as library:
        library.define("face(Tensor x) -> Tensor")
        library.impl("face", lambda x: (ran.append("face"), x.detach()[:])[1], "CPU")

        def function(x):
            return (x * torch.ops.ckpt_hooks_tests.face(x.detach() * 2)).sin().exp()

        assert_as_plain(function, leaf(4), policy=[torch.ops.ckpt_hooks_tests.face.default])
    assert ran == ["face"] * 3


def test_a_random_operator_that_does_not_say_so():
    """Operators of other libraries are seldom tagged."""

    @torch.library.custom_op("ckpt_hooks_tests::noise", mutates_args=())
    def noise(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x)

    def function(x):
        return (x * noise(x.detach())).sin() * torch.rand_like(x)

    assert facts_of(torch.ops.ckpt_hooks_tests.noise.default).kind is Kind.RANDOM
    assert_as_plain(function, leaf(9), policy=[torch.ops.ckpt_hooks_tests.noise.default])


def test_a_wrapper_that_is_written_to_from_within():
    """What a subclass holds has versions and memory of its own."""
    x, w = (TwoTensor(torch.randn(3, 3), torch.randn(3, 3)).requires_grad_() for _ in range(2))

    def function(x):
        h = x @ w
        with torch.no_grad():
            h.a.mul_(2)
        return (h + 1).sin()

    expected = grad(function(x).sum(), x)[0]
    found = grad(region(function, [aten.mm.default])(x).sum(), x)[0]
    assert torch.equal(found.a, expected.a)
    assert torch.equal(found.b, expected.b)


@pytest.mark.parametrize("outer", [None, [aten.mm.default], [aten.cos.default]])
@pytest.mark.parametrize("inner", [None, [aten.mm.default]])
def test_foreach_writes(outer, inner):
    """Torch counts them without a mode and not under one, so the modes do."""

    def wrapped(function, policy):
        return ckpt_hooks.checkpoint()(function) if policy is None else region(function, policy)

    def deep(x):
        h = x @ x
        return h, (h + 1).sin()

    def build(inner_run, outer_run):
        def function(x):
            h, y = inner_run(deep)(x)
            torch._foreach_mul_([h.detach()], 2)
            z = y.cos()
            torch._foreach_add_([z], 1)
            return z * y

        return outer_run(function)

    x = leaf(3, 3)
    expected = grad(build(lambda f: f, lambda f: f)(x).sum(), x)[0]
    run = build(lambda f: wrapped(f, inner), lambda f: wrapped(f, outer))
    assert torch.equal(grad(run(x).sum(), x)[0], expected)


def test_foreach_writes_in_a_recompute_in_the_middle_of_forward():
    """The region's mode is there, though paused, and torch does not count for that."""

    def function(x):
        h = x.sin()
        torch._foreach_mul_([h], 2)
        y = (h.abs() + 1).sqrt()
        return y * grad(y.sum(), h, create_graph=True)[0]

    assert_as_plain(function, leaf(3), policy=[aten.sqrt.default])
    x = leaf(3)
    (found,) = grad(region(lambda x: ckpt_hooks.checkpoint(function, x), [aten.sqrt.default])(x).sum(), x)
    assert torch.equal(found, grad(function(x).sum(), x)[0])


def test_operators_of_code_that_was_compiled():
    """Its kernels write to buffers that nobody sees them write to: nothing of it is kept."""
    found = []

    def handler():  # as of a mode, which is what asks
        found.append(is_compiled_code_running())

    compiled = {"__name__": "torch._inductor.output_code", "handler": handler}
    exec("def call():\n    handler()\n", compiled)
    compiled["call"]()
    with torch.no_grad():
        compiled["call"]()
        handler()
    assert found == [False, True, False]


def test_modes_that_are_switched_off_inside_a_region():
    """What was switched off stays so, though the runtime itself looks past modes."""

    def function(x):
        with torch._C._DisableTorchDispatch():
            h = x.sin().cos()
        return h.exp()

    assert_as_plain(function, leaf(3), policy=[aten.exp.default])


@pytest.mark.distributed
def test_a_distributed_linear_layer():
    """Three dimensions make it a product and an unsafe view of it."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no process groups")
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, w = (
            DTensor.from_local(torch.randn(*shape), mesh, [Shard(0)], run_check=False).requires_grad_()
            for shape in ((2, 3, 4), (4, 4))
        )

        def function(x):
            return torch.nn.functional.linear(x, w).sin().cos()

        expected = grad(function(x).to_local().sum(), x)[0]
        found = grad(region(function, [aten.mm.default])(x).to_local().sum(), x)[0]
        assert torch.equal(found.to_local(), expected.to_local())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("policy", [policies.everything_saveable, policies.dots_saveable])
def test_nested_tensors(policy):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4))
    parts = [torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)]
    gradients = []
    for impl in (lambda function: function, lambda function: region(function, policy)):
        y = impl(module)(torch.nested.as_nested_tensor(parts)).to_padded_tensor(0.0)
        gradients.append(grad(y.sum(), [*parts, *module.parameters()]))
    assert all(map(torch.equal, *gradients))


def test_jagged_tensors():
    """They keep what they were asked about their layout, so that forward asks and a recompute does not."""
    layer = torch.nn.Linear(4, 4)
    parts = [torch.randn(2, 4), torch.randn(3, 4)]

    def gradient(call):
        n = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        return grad(call(lambda n: layer(n).relu(), n).values().sum(), layer.weight)[0]

    expected = gradient(lambda function, n: function(n))
    assert torch.equal(gradient(lambda function, n: region(function, [aten.mm.default])(n)), expected)


# Whose it is, and for how long


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("policy", [policies.nothing_saveable, policies.everything_saveable, lambda *args, **kwargs: True])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_region_dies_with_its_graph(policy, retain_graph):
    """By reference counting alone, after a recompute too."""
    x, token = leaf(3), Token()
    alive = weakref.ref(token)

    def function(x, token=token):
        return x.sin().exp().cos()

    y = region(function, policy)(x)
    y.sum().backward(retain_graph=retain_graph)
    del function, token
    assert alive() is not None or not retain_graph
    del y
    assert alive() is None


@pytest.mark.usefixtures("no_gc")
def test_what_no_recompute_comes_to_is_not_kept():
    """Outputs after the last tensor that the region saves."""
    x, made = leaf(1000), []

    def function(x):
        h = x.sin().cos()
        y = h + 1
        made.append(weakref.ref(y))
        return y.sum()

    y = region(function, policies.everything_saveable)(x)
    assert made[0]() is None
    assert torch.equal(grad(y, x)[0], -x.sin().sin() * x.cos())


@pytest.mark.parametrize("respect", [None, True, False])
def test_an_inner_region_and_hooks(respect):
    """What it keeps is the outer region's, in forward and in the rerun of that, whatever the user says of hooks."""
    w, m = leaf(3, 3), [leaf(3, 3) for _ in range(4)]

    def inner(h):
        return (h @ w).sin()

    def outer(x, run=lambda f: f):
        y = run(inner)(x) * m[0] * m[1]
        return y, y * m[2] * m[3]

    x = leaf(3, 3)
    run = lambda f: region(f, [aten.mm.default], respect_saved_tensors_hooks=respect)  # noqa: E731
    y, z = ckpt_hooks.checkpoint(lambda x: outer(x, run), x)
    del z
    assert torch.equal(grad(y.sum(), x)[0], grad(outer(x)[0].sum(), x)[0])


def test_contexts_are_for_one_region():
    """Two forwards would share one sequence."""
    contexts = ckpt_hooks.create_selective_checkpoint_contexts([aten.sin.default])
    x = leaf(3)
    y = ckpt_hooks.checkpoint(torch.sin, x, context_fn=lambda: contexts)
    with pytest.raises(ValueError, match="are for one region"):
        ckpt_hooks.checkpoint(torch.sin, y, context_fn=lambda: contexts)


@pytest.mark.parametrize(
    "policy",
    [
        policies.dots_saveable,
        policies.save_compute_and_communication,
        policies.save_ops(aten.mm.default),
        policies.save_every(aten.mm.default, 2),
        policies.save_from_both_policies(policies.dots_saveable, policies.save_every(aten.sin.default, 3)),
    ],
    ids=lambda policy: repr(policy)[:30],
)
def test_policies_travel(policy):
    """Also when regions have run under them."""
    with contextlib.suppress(UserWarning):
        region(lambda x: (x @ x).sin().cos(), policy)(leaf(3, 3))
    again = pickle.loads(pickle.dumps(policy))
    assert repr(again) == repr(policy)
    for op in (aten.mm.default, aten.sin.default, aten.addmm.default):
        assert again.for_op(op) is policy.for_op(op)


def test_a_policy_of_ones_own_that_answers_yes_and_no():
    """By operator, as functions may."""

    class Sines(policies.Policy):
        def for_op(self, op):
            return op is aten.sin.default

        def __repr__(self):
            return "<sines>"

    x = leaf(3)
    with CountOps() as ops:
        y = region(lambda x: x.sin().exp().cos(), Sines())(x)
        ops.counts.clear()
        y.sum().backward()
    assert (ops.counts["exp"], ops.counts["sin"]) == (1, 1)  # the sine is that of backward
    assert Sines()(None, aten.sin.default) is CheckpointPolicy.MUST_SAVE
