"""Events of operators: what a planner needs to know of each run, in forward and in recomputes, and outside of regions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_hooks import CheckpointPolicy, checkpoint, checkpoint_region, is_recomputing
from ckpt_hooks._core import event_sender
from ckpt_hooks._core.order import Order
from ckpt_hooks._core.tensor_numbers import storage_and_size
from ckpt_hooks._operators.operator_events import OperatorCount, OperatorWatch, observe_all
from ckpt_hooks.policies import save_every, save_ops
from tests.measure import Watch, leaf

pytestmark = pytest.mark.usefixtures("no_gc")


class Notes(Watch):
    """Notes operators with their regions, recomputes, and backwards."""

    wants_operators = True

    def __init__(self):
        self.forward, self.again, self.outside, self.order, self.backwards, self.entries = [], [], [], [], [], []

    def entered(self, region):
        self.entries.append(region)

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

    @property
    def of_forward(self):
        """Names of forward's operators, by region and place."""
        return {(region.id, one.place): one for region, one in self.told if not one.in_recompute}

    @property
    def of_recomputes(self):
        """The operators of recomputes, with their regions."""
        return [(region, one) for region, one in self.told if one.in_recompute]


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
RECORDED = pytest.mark.parametrize("form", [FORMS["recorded"], FORMS["recorded, by value"]], ids=["whole", "by value"])


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
def test_the_index_is_that_of_a_policy(form):
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append((ctx.index, str(op)))
        return CheckpointPolicy.PREFER_RECOMPUTE

    notes = watched(work, leaf(4, 4), leaf(8, 8), form=form, policy=policy)
    assert [(one.policy_index, one.name) for one in notes.forward if one.policy_index is not None] == asked
    assert {name(one) for one in notes.forward if one.policy_index is None} >= {"view", "copy_", "relu_"}


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
def test_the_index_counts_what_policies_are_asked_about(form, program):
    """Neither casts of leaves, nor operators of a backward in the region."""
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append((ctx.index, str(op)))
        return CheckpointPolicy.PREFER_RECOMPUTE

    dtype = torch.float32 if program is under_autocast else torch.float64
    x, w = (torch.ones(4, 4, dtype=dtype, requires_grad=True) for _ in range(2))
    notes = watched(program, x, w, form=form, policy=policy)
    assert [(one.policy_index, one.name) for one in notes.forward if one.policy_index is not None] == asked
    for one in notes.again:
        if one.repeats is not None:
            repeated = notes.forward[one.repeats[1]]
            assert one.policy_index == repeated.policy_index
            assert name(one).replace("empty_strided", "empty_like") == name(repeated)


@ALL
@pytest.mark.parametrize("inner", [FORMS["function"], FORMS["recorded"]], ids=["function", "recorded"])
def test_the_index_in_nested_regions(form, inner):
    """A policy is asked about regions inside too, but for recorded ones in recorded ones, which have a policy of their own."""
    asked = {}

    def policy(whose):
        def ask(ctx, op, *args, **kwargs):
            asked.setdefault(whose, []).append((ctx.index, str(op)))
            return CheckpointPolicy.PREFER_RECOMPUTE

        return ask

    def outer(x):
        return inner(lambda x: x.exp().sin(), policy=policy(1))(x.cos()).tanh()

    notes = Told()
    with notes:
        form(outer, policy=policy(0))(leaf(4))
    told = [[one for region, one in notes.told if len(region.path) == 1 + depth] for depth in (0, 1)]
    assert [(one.policy_index, one.name) for one in told[1]] == asked[1]
    assert {(one.policy_index, one.name) for one in told[0]} <= set(asked[0])
    is_asked_less = form is not FORMS["function"] and inner is FORMS["recorded"]
    assert [one.policy_index for one in told[0]] == ([0, 1] if is_asked_less else [0, 3])


@RECORDED
def test_a_replay_names_the_operators_of_forward(form):
    notes = watched(work, leaf(4, 4), leaf(8, 8), form=form)
    assert notes.again
    (region,) = notes.entries
    for one in notes.again:
        number, place = one.repeats
        assert number == region.id
        assert name(notes.forward[place]).replace("empty_like", "empty_strided") == name(one)
    assert len({one.repeats for one in notes.again}) == len(notes.again)


@RECORDED
def test_a_replay_of_one_value_names_the_last_operators(form):
    def chain(x):
        for _ in range(4):
            x = x.sin()
        return x

    notes = watched(chain, leaf(4), form=form)
    assert [one.repeats for one in notes.again] == [(notes.entries[0].id, place) for place in range(3)]


def test_a_rerun_names_the_operators_of_forward():
    notes = watched(work, leaf(4, 4), leaf(8, 8), form=FORMS["function"])
    (region,) = notes.entries
    assert [one.repeats for one in notes.again] == [(region.id, place) for place in range(len(notes.again))]
    assert named(notes.again) == named(notes.forward)[: len(notes.again)]
    assert all(one.place == place for place, one in enumerate(notes.again))


def test_a_replay_inside_of_a_custom_function():
    notes = watched(lambda x: Twice.apply(x.exp()).cos().exp().sin(), leaf(4), form=FORMS["recorded"])
    assert named(notes.forward) == ["exp", "sin", "cos", "mul", "cos", "exp", "sin"]
    found = [(name(one), one.repeats and one.repeats[1]) for one in notes.again]
    assert found == [("exp", 0), ("sin", None), ("cos", None), ("mul", None), ("cos", 4), ("exp", 5)]


@RECORDED
def test_nested_replays_name_operators_of_their_own_region(form):
    def outer(x):
        y = x.exp()
        with checkpoint_region():
            z = y.sin().cos()
        return z.exp()

    notes = Notes()
    regions = []
    notes.ran = lambda region, operator: regions.append((region.id, operator))
    with notes:
        form(outer)(leaf(4)).sum().backward()
    forward = {}
    for region, one in regions:
        if not one.in_recompute:
            forward.setdefault(region, []).append(name(one))
    again = [(region, one) for region, one in regions if one.in_recompute]
    assert again
    assert [forward[one.repeats[0]][one.repeats[1]] for _, one in again] == [name(one) for _, one in again]


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


def test_entries_that_a_recompute_repeats():
    def inner(x):
        return checkpoint(torch.sin, checkpoint(torch.exp, x))

    def outer(x):
        return checkpoint(inner, checkpoint(torch.cos, x)).exp()

    notes = watched(outer, leaf(4), form=FORMS["function"])
    forward = [region for region in notes.entries if not region.in_recompute]
    assert all(region.repeats is None for region in forward)
    by_id = {region.id: region for region in forward}
    again = [region for region in notes.entries if region.in_recompute]
    assert [region.path for region in again] == [by_id[region.repeats].path for region in again]
    assert {"inner"} <= {region.path[-1].rpartition(".")[2] for region in again}
    assert len(again) >= 4


@pytest.mark.parametrize("policy", [save_ops(torch.ops.aten.mm.default), save_every(torch.ops.aten.mm.default, 2)])
def test_a_rerun_that_takes_kept_outputs_names_the_operators_of_forward(policy):
    """Operators of one name are told apart, also in regions inside."""

    def block(x, w):
        h = x
        for _ in range(3):
            h = ((h @ w).tanh() @ w).sin()
        return checkpoint(lambda h: (h @ w).sin().exp(), h).cos()

    notes = Told()
    with notes:
        y = checkpoint(policy=policy)(block)(leaf(4, 4), leaf(4, 4)).sum()
        y.backward(retain_graph=True)
        y.backward()
    forward, again = notes.of_forward, notes.of_recomputes
    half = len(again) // 2
    assert half
    assert 2 * sum(name(one) == "mm" for one in forward.values()) > sum(name(one) == "mm" for _, one in again)
    for region, one in again:
        found = forward[one.repeats]
        assert (found.name, found.policy_index, found.site) == (one.name, one.policy_index, one.site)
        assert one.repeats[0] == (region.repeats or region.id)
    assert [one.repeats for _, one in again[:half]] == [one.repeats for _, one in again[half:]]


def test_a_second_rerun_names_the_operators_from_the_first_one_on():
    """The first rerun met another operator than forward, where outputs are kept."""

    def block(x, w):
        y = checkpoint(torch.sin, x).cos()
        if is_recomputing():
            y.detach().abs()
        return (y @ w).exp().tanh()

    notes = watched(block, leaf(4, 4), leaf(4, 4), form=FORMS["function"], policy=save_ops(torch.ops.aten.mm.default))
    assert named(notes.forward) == ["sin", "cos", "mm", "exp", "tanh"]
    outer, inner, *again = notes.entries
    assert [region.repeats for region in again] == [inner.id, inner.id]
    found = [(name(one), one.repeats) for one in notes.again]
    start = [("sin", (inner.id, 0)), ("cos", (outer.id, 0))]
    assert found[:5] == [*start, *start, ("abs", None)]


def test_a_rerun_that_makes_other_views():
    """A cast which autocast keeps, and a view, are passed by."""

    def block(x, w):
        if is_recomputing():
            x = x.view(16).view(4, 4)
        y = x.sin()
        if not is_recomputing():
            y = y.view(4, 4)
        return (y @ w).exp().sin()

    notes = watched(block, leaf(4, 4), leaf(4, 4), form=FORMS["function"])
    assert named(notes.forward) == ["sin", "view", "mm", "exp", "sin"]
    found = [(name(one), None if one.repeats is None else one.repeats[1]) for one in notes.again]
    assert found == [("view", None), ("view", None), ("sin", 0), ("mm", 2), ("exp", 3)]


@RECORDED
def test_a_recorded_region_inside_of_a_rerun(form):
    """Its replay names the operators of forward too, not those of the rerun."""

    def outer(x):
        return form(lambda y: y.sin().exp().cos(), name="inner")(x.exp()).tanh()

    notes = Told()
    with notes:
        checkpoint(outer, leaf(4)).sum().backward()
    forward, again = notes.of_forward, notes.of_recomputes
    assert [name(one) for _, one in again] == ["exp", "sin", "exp", "cos", "tanh", "sin", "exp"]
    assert [name(forward[one.repeats]) for _, one in again] == [name(one) for _, one in again]
    entered = [region for region in notes.entries if region.path[-1] == "inner"]
    assert [region.repeats for region in entered] == [None, entered[0].id]


def test_a_rerun_that_casts_a_parameter_again():
    """Autocast had its cast when the region began."""
    x, w = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
    notes = Notes()
    with notes, torch.autocast("cpu", dtype=torch.bfloat16):
        torch.mm(x, w)
        y = checkpoint(lambda x: torch.stack([x.sin() @ w, w @ x.cos()]).exp().tanh(), x)
    y.sum().backward()
    assert named(notes.forward) == ["sin", "_to_copy", "mm", "cos", "_to_copy", "mm", "stack", "exp", "tanh"]
    of_parameter = storage_and_size(w)[0]
    found = [(name(one), one.repeats and one.repeats[1]) for one in notes.again if one.inputs[0].storage != of_parameter]
    assert found == [(name(one), place) for place, one in enumerate(notes.forward)][: len(found)]
    assert len(found) >= 7
    (cast,) = (one for one in notes.again if one.inputs[0].storage == of_parameter)
    assert (name(cast), cast.policy_index, cast.repeats) == ("_to_copy", None, None)


@ALL
def test_a_backward_in_the_middle_of_a_region_does_not_disturb_its_count(form):
    def block(x):
        y = x.sin().exp().cos()
        y.sum().backward(retain_graph=True)
        return y.tanh().cosh()

    notes = watched(block, leaf(4), form=form)
    assert [one.place for one in notes.forward] == list(range(len(notes.forward)))
    policy_indices = {name(one): one.policy_index for one in notes.forward if one.policy_index is not None}
    assert (policy_indices["tanh"], policy_indices["cosh"]) == (4, 5)


def test_two_recomputes_repeat_the_same_entries():
    def outer(x):
        return checkpoint(torch.sin, checkpoint(torch.exp, x)).cos()

    notes = Notes()
    x = leaf(4)
    with notes:
        y = checkpoint(outer, x).sum()
        y.backward(retain_graph=True)
        y.backward()
    again = [region.repeats for region in notes.entries if region.in_recompute and region.parent is not None]
    half = len(again) // 2
    assert half
    assert again[:half] == again[half:]


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
    assert [one.place for one in notes.outside] == list(range(len(notes.outside)))
    assert notes.outside[0].site.startswith("test_events_of_operators.py:")
    assert notes.backwards == ["began", "ended"]
    assert all(one.policy_index is None and one.repeats is None for one in notes.outside)


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

    for owner, method in (
        *((each, "__init__") for each in (OperatorCount, OperatorWatch, Order, event_sender.Watch)),
        *((each, "__torch_dispatch__") for each in (OperatorCount, OperatorWatch)),
        (Order, "note"),
    ):
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
