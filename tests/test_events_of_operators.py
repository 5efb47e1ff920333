"""Events of operators: what a planner needs to know of each run, in forward and in recomputes, and outside of regions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_hooks import CheckpointPolicy, checkpoint, checkpoint_region
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.observers import observe
from ckpt_hooks._operators.watched import observe_all
from tests.measure import leaf

pytestmark = pytest.mark.usefixtures("no_gc")


class Notes(Observer):
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
    with observe(notes):
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
    assert {key: one.writes for key, one in ran.items() if one.writes} == {"copy_": (0,), "relu_": (0,)}
    assert ran["mm"].writes == ()
    assert ran["sin"].inputs[0].address == x.untyped_storage().data_ptr()
    assert ran["view"].outputs[0].address == ran["sin"].outputs[0].address != 0
    assert all(one.seconds is None for one in ran.values())


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
    assert [one.repeats for one in watched(chain, leaf(4), form=FORMS["function"]).again] == [None] * 3


def test_a_replay_inside_of_a_custom_function():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.sin().cos()
            ctx.save_for_backward(y)
            return y * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    notes = watched(lambda x: Twice.apply(x.exp()).exp().sin(), leaf(4), form=FORMS["recorded"])
    repeated = {name(one): one.repeats for one in notes.again}
    assert repeated["cos"] is None
    for one in notes.again:
        assert one.repeats is None or name(notes.forward[one.repeats[1]]) == name(one)


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
    with observe(notes):
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


def test_two_recomputes_repeat_the_same_entries():
    def outer(x):
        return checkpoint(torch.sin, checkpoint(torch.exp, x)).cos()

    notes = Notes()
    x = leaf(4)
    with observe(notes):
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
