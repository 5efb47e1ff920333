"""Events of operators: what a planner needs to know of each run, in forward and in recomputes, and outside of regions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_hooks import CheckpointPolicy, checkpoint, checkpoint_region
from ckpt_hooks._core import events
from ckpt_hooks._operators.operator_events import OperatorWatch, observe_all
from ckpt_hooks.policies import save_ops
from tests.measure import Watch, leaf

pytestmark = pytest.mark.usefixtures("no_gc")


class Notes(Watch):
    """Notes operators with their regions, recomputes, and backwards."""

    wants_operators = True

    def __init__(self):
        self.forward, self.again, self.outside, self.order, self.backwards = [], [], [], [], []

    def ran(self, region, operator):
        (self.outside if region is None else self.again if operator.in_recompute else self.forward).append(operator)

    def recomputing(self, region, *, in_order):
        self.order.append(in_order)

    def backward_began(self):
        self.backwards.append("began")

    def backward_ended(self):
        self.backwards.append("ended")


class Told(Notes):
    """Notes operators with their regions in one list."""

    def __init__(self):
        super().__init__()
        self.told = []

    def ran(self, region, operator):
        self.told.append((region, operator))


class Timed(Notes):
    """Wants durations too."""

    wants_durations = True


def name(operator):
    return operator.name.removeprefix("aten.").partition(".")[0]


def named(operators):
    return [name(operator) for operator in operators]


FORMS = {
    "function": lambda function, **options: checkpoint(**options)(function),
    "recorded": lambda function, **options: checkpoint_region(**options)(function),
    "recorded, by value": lambda function, **options: checkpoint_region(replay_whole=False, **options)(function),
}
ALL = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def watched(function, *inputs, form, notes=None, **options):
    notes = Notes() if notes is None else notes
    with notes:
        form(function, **options)(*inputs).sum().backward()
    return notes


def work(x, w):
    y = x.sin().view(2, 8)
    z = torch.empty_like(y).copy_(y)
    return (z @ w).relu_().exp() * z


@ALL
def test_facts_of_operators(form):
    x, w = leaf(4, 4), leaf(8, 8)
    ran = {name(one): one for one in watched(work, x, w, form=form).forward}
    assert [key for key, one in ran.items() if one.is_view] == ["view"]
    assert [key for key, one in ran.items() if one.reads_shape_only] == ["empty_like"]
    assert {one.in_recompute for one in ran.values()} == {False}
    assert {key: one.writes for key, one in ran.items() if one.writes} == {"copy_": (0,), "relu_": (0,)}
    assert ran["mm"].writes == ()
    assert ran["sin"].inputs[0].address == x.untyped_storage().data_ptr()
    assert ran["view"].outputs[0].address == ran["sin"].outputs[0].address != 0
    assert all(one.seconds is None for one in ran.values())


@ALL
def test_views_writes_and_shapes(form):
    def many(x, w):
        a, b = x.split(2)
        c = x.new_empty(3).fill_(1)
        torch._foreach_mul_([c, w2 := torch.zeros_like(w)], 2.0)
        with torch.no_grad():
            d = torch.add(w, w2, out=torch.empty(4, 4, dtype=torch.float64))
        e = torch.empty(4, 4, dtype=torch.float64).zero_().t_()
        return (x.view(1, 4, 4) @ w).sum() + a.sum() * b.sum() + c.sum() + x.new_zeros(2).sum() + d.sum() + e.sum()

    notes = watched(many, leaf(4, 4), leaf(4, 4), form=form)
    ran = {name(one): one for one in notes.forward}
    assert {key for key, one in ran.items() if one.is_view} == {"split", "view", "_unsafe_view"}
    assert {key for key, one in ran.items() if one.reads_shape_only} == {"new_empty", "zeros_like", "new_zeros"}
    writes = {one.name.split(".")[1]: one.writes for one in notes.forward if one.writes}
    assert writes == {"fill_": (0,), "_foreach_mul_": (0, 1), "zero_": (0,), "t_": (0,), "add": (2,)}
    (written,) = (one for one in notes.forward if one.name == "aten.add.out")
    assert written.writes == (2,)
    assert written.inputs[2].id == written.outputs[0].id


def test_tensors_without_memory_have_no_address():
    notes = Notes()
    with notes:
        checkpoint(torch.sin, torch.empty(3, device="meta", requires_grad=True))
    (one,) = notes.forward
    assert [each.address for each in one.inputs + one.outputs] == [0, 0]


@ALL
def test_durations_on_request(form):
    notes = watched(work, leaf(4, 4), leaf(8, 8), form=form, notes=Timed())
    assert all(0 < one.seconds < 60 for one in notes.forward + notes.again)


@ALL
def test_operators_that_a_policy_is_asked_about(form):
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(str(op))
        return CheckpointPolicy.PREFER_RECOMPUTE

    notes = watched(work, leaf(4, 4), leaf(8, 8), form=form, policy=policy)
    assert [one.name for one in notes.forward if one.is_asked_about] == asked
    assert {name(one) for one in notes.forward if not one.is_asked_about} >= {"view", "copy_", "relu_"}
    assert not any(one.is_asked_about for one in notes.again)


class Twice(torch.autograd.Function):
    """Saves a tensor which it has computed itself."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin().cos()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def under_autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x.float() @ w).sin().float() + (x.float() @ w).float().exp()


def with_a_backward_inside(x, w):
    y = x.sin()
    (leaf(4).exp() * 2).sum().backward()
    return y.cos() @ w


def with_a_custom_function(x, w):
    return Twice.apply(x.exp()).exp() @ w


def with_draws_and_buffers(x, w):
    y = torch.nn.functional.dropout(x @ w, 0.5).sin()
    return torch.nn.functional.batch_norm(y, torch.zeros(4).double(), torch.ones(4).double(), training=True).exp()


PROGRAMS = (under_autocast, with_a_backward_inside, with_a_custom_function, with_draws_and_buffers)


@ALL
@pytest.mark.parametrize("program", PROGRAMS)
def test_operators_that_no_policy_is_asked_about(form, program):
    """Neither casts of leaves, nor operators of a backward in the region."""
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(str(op))
        return CheckpointPolicy.PREFER_RECOMPUTE

    dtype = torch.float32 if program is under_autocast else torch.float64
    x, w = (torch.ones(4, 4, dtype=dtype, requires_grad=True) for _ in range(2))
    notes = watched(program, x, w, form=form, policy=policy)
    assert [one.name for one in notes.forward if one.is_asked_about] == asked


@ALL
@pytest.mark.parametrize("inner", [FORMS["function"], FORMS["recorded"]], ids=["function", "recorded"])
def test_operators_that_policies_of_nested_regions_are_asked_about(form, inner):
    """A policy is asked about regions inside too, but for recorded ones in recorded ones, which have a policy of their own."""
    asked = {}

    def policy(whose):
        def ask(ctx, op, *args, **kwargs):
            asked.setdefault(whose, []).append(str(op))
            return CheckpointPolicy.PREFER_RECOMPUTE

        return ask

    def outer(x):
        return inner(lambda x: x.exp().sin(), policy=policy(1))(x.cos()).tanh()

    notes = Told()
    with notes:
        form(outer, policy=policy(0))(leaf(4))
    told = [[one for region, one in notes.told if len(region.path) == 1 + depth] for depth in (0, 1)]
    assert [one.name for one in told[1] if one.is_asked_about] == asked[1]
    assert {one.name for one in told[0] if one.is_asked_about} <= set(asked[0])
    assert all(one.is_asked_about for one in told[0])


def test_whether_a_recompute_runs_in_order():
    def overwrites(x):
        y = x.sin()
        z = y.exp()
        y.mul_(2)
        return z * y

    for form, expected in zip(FORMS.values(), ([True], [True], [True]), strict=True):
        assert watched(overwrites, leaf(4), form=form).order == expected

    def plain(x):
        return x.sin().exp().cos()

    assert watched(plain, leaf(4), form=FORMS["function"]).order == [True]
    assert watched(plain, leaf(4), form=FORMS["recorded"]).order == [False]
    assert set(watched(plain, leaf(4), form=FORMS["recorded, by value"]).order) == {False}


def test_operators_outside_of_regions():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    notes, x = Notes(), leaf(2, 4)
    with observe_all(notes):
        y = x * 2
        y = checkpoint(net, y)
        y.sum().backward()
    outside = named(notes.outside)
    assert outside[:2] == ["mul", "sum"]
    assert "tanh_backward" in outside
    assert "addmm" not in outside
    assert named(notes.forward) == ["t", "addmm", "tanh"]
    assert notes.outside[0].site.startswith("test_events_of_operators.py:")
    assert notes.backwards == ["began", "ended"]
    assert not any(one.is_asked_about for one in notes.outside)


def test_backwards_inside_a_backward_are_one():
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                leaf(3).sin().sum().backward()
            return grad * 2

    notes, x = Notes(), leaf(4)
    with observe_all(notes):
        Inner.apply(x.sin()).exp().sum().backward()
        x.sin().sum().backward()
    assert notes.backwards == ["began", "ended"] * 2


def test_a_backward_that_fails_has_no_end():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad * 2
            raise ValueError("no")

    notes, x = Notes(), leaf(4)
    with observe_all(notes):
        y = Fails.apply(x).sum()
        with pytest.raises(ValueError, match="no"):
            y.backward()
        x.sin().sum().backward()
    assert notes.backwards == ["began", "began", "ended"]


def test_an_observer_of_everything_wants_operators():
    class Plain(Notes):
        wants_operators = False

    notes = Plain()
    with observe_all(notes):
        checkpoint(torch.exp, leaf(4)).sum().backward()
    assert named(notes.forward) == named(notes.again) == ["exp"]


class Steps(Notes):
    """Notes events in one list."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def ran(self, region, operator):
        self.steps.append(name(operator))

    def recomputing(self, region, *, in_order):
        self.steps.append("recomputing")

    def restored(self, region, position, tensor):
        self.steps.append("restored")

    def backward_began(self):
        self.steps.append("began")

    def backward_ended(self):
        self.steps.append("ended")


@ALL
def test_a_backward_begins_before_its_first_recompute(form):
    notes, x, ones = Steps(), leaf(4), torch.ones(4, dtype=torch.float64)
    with observe_all(notes):
        y = form(lambda x: x.sin().exp())(x)
        y.backward(ones)
    assert notes.steps[:4] == ["sin", "exp", "began", "recomputing"]
    begun = notes.steps[4:]
    assert [step for step in begun if step != "exp"] == ["sin", "restored", "mul", "cos", "mul", "ended"]


@ALL
def test_a_backward_behind_the_block_is_told_for_its_regions(form):
    notes, x, ones = Steps(), leaf(4), torch.ones(4, dtype=torch.float64)
    with observe_all(notes):
        y = form(lambda x: x.sin().exp())(x)
    del notes.steps[:]
    y.backward(ones)
    assert (notes.steps[0], notes.steps[-1]) == ("began", "ended")
    assert "mul" not in notes.steps


def test_two_backwards_of_one_graph():
    notes, ones = Notes(), torch.ones(4, dtype=torch.float64)
    with observe_all(notes):
        y = checkpoint(lambda x: x.sin().exp(), leaf(4))
        y.backward(ones, retain_graph=True)
        y.backward(ones)
    assert notes.backwards == ["began", "ended"] * 2


def test_a_backward_after_one_that_failed_begins_without_an_operator_between():
    def fail(grad):
        raise ValueError("no")

    notes, x, ones = Notes(), leaf(4), torch.ones(4, dtype=torch.float64)
    with observe_all(notes):
        y, other = x.sin().exp(), x.cos()
        y.register_hook(lambda grad: grad * 2)
        y.register_hook(fail)
        with pytest.raises(ValueError, match="no"):
            y.backward(ones)
        other.backward(ones)
    assert notes.backwards == ["began", "began", "ended"]


def test_a_backward_in_the_first_hook_tells_nothing_of_its_own():
    notes, x, ones = Steps(), leaf(4), torch.ones(4, dtype=torch.float64)
    with observe_all(notes):
        y, other = x.sin(), leaf(4).exp()
        y.register_hook(lambda grad: other.backward(ones))
        y.backward(ones)
    assert notes.steps == ["sin", "randn", "exp", "mul", "began", "cos", "mul", "ended"]


def test_a_backward_in_a_rerun_tells_nothing_of_its_own():
    def block(x):
        y = x.sin()
        z = leaf(4)
        z.exp().sum().backward()
        return y.exp().cos()

    notes, ones = Notes(), torch.ones(4, dtype=torch.float64)
    with observe_all(notes):
        y = checkpoint(block, leaf(4))
        assert notes.backwards == ["began", "ended"]  # that of forward
        y.backward(ones)
    assert notes.backwards == ["began", "ended"] * 2


def test_callbacks_after_the_end_begin_nothing():
    notes, x = Notes(), leaf(4)
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def hook(grad):
        grad * 2
        queue(lambda: torch.ones(3).exp())

    with observe_all(notes):
        y = x.sin()
        y.register_hook(hook)
        y.backward(torch.ones(4, dtype=torch.float64))
    assert notes.backwards == ["began", "ended"]


def test_nothing_of_it_runs_without_observers(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError

    for owner, method in (OperatorWatch, "__init__"), (events.Watch, "__init__"), (OperatorWatch, "__torch_dispatch__"):
        monkeypatch.setattr(owner, method, fails)
    x, w = leaf(4, 4), leaf(8, 8)
    for form in FORMS.values():
        for policy in (None, save_ops(torch.ops.aten.mm.default)):
            form(work, policy=policy)(x, w).sum().backward()
    with pytest.raises(AssertionError), Notes():
        checkpoint(torch.sin, x)


def test_regions_are_the_same_under_a_watch_of_everything():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 8)).double()
    x = leaf(4, 8)

    def gradients():
        torch.manual_seed(1)
        net.zero_grad()
        checkpoint(net, checkpoint_region()(net)(x)).sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters()], torch.get_rng_state()

    plain, state = gradients()
    with observe_all(Notes()):
        found, after = gradients()
    assert all(map(torch.equal, found, plain))
    assert torch.equal(after, state)
