"""Steps under a guard: whole or not at all, and again under a tighter plan."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_hooks import memory_ledger, plan_memory
from tests import golden
from tests.planner.models import GPT, same, state_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Net(nn.Module):
    """Layers with dropout and batch norm, which counts its calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 32)) for _ in range(4)
        )
        self.norm, self.calls = nn.BatchNorm1d(32), []

    def forward(self, x):
        self.calls.append(len(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x).square().mean()


KINDS = (torch.Tensor, int, float)
LARGEST = torch.ones(512, 32)


class Training:
    """A model with an optimizer, and a step of both."""

    def __init__(self, make=Net, kind=torch.optim.AdamW, is_warm=True):
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        if is_warm:
            self.step(LARGEST)

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def state(self):
        own = state_of(self.model)
        for number, state in enumerate(self.optimizer.state.values()):
            own |= {f"{name} {number}": torch.as_tensor(value).clone() for name, value in state.items() if type(value) in KINDS}
        counts = self.optimizer.param_groups[0]["lr"], self.schedule.last_epoch, len(getattr(self.model, "calls", ()))
        return own | {"counts": torch.tensor(counts)}


@functools.cache
def planned(part=1.0):
    """Returns a plan of another such model."""
    training = Training()
    return plan_memory(training.model, lambda model: training.step(LARGEST), part, blocks=["layers.*"])


class Limited(TorchDispatchMode):
    """A device with little memory, or a user's key: raises at one operator, as often as told."""

    def __init__(self, at, error, times=1):
        super().__init__()
        self.at, self.error, self.times, self.seen = at, error, times, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        if self.seen >= self.at and self.times:
            self.times, self.seen = self.times - 1, 0
            raise self.error
        return func(*args, **(kwargs or {}))

    def runs(self, step):
        """Returns the step on this device."""

        def limited(*args):
            self.seen = 0
            with self:
                return step(*args)

        return limited


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_steps_of_any_length_finish_under_a_limit_that_half_of_them_break(count, caplog):
    lengths = torch.randint(16, 513, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    plain, guarded, peaks, losses = Training(), Training(), [], []
    torch.manual_seed(7)
    for length in lengths:
        with memory_ledger() as found:
            losses.append(plain.step(torch.ones(length, 32)))
        peaks.append(found.peak.nbytes)
    limit, plan = sorted(peaks)[count // 2], planned()
    torch.manual_seed(7)
    with plan.guard(guarded.model, limit=limit) as guard, caplog.at_level(logging.WARNING, "ckpt_hooks"):
        assert [guard(guarded.step, torch.ones(length, 32)) for length in lengths] == losses
    assert same(plain.state(), guarded.state())
    assert [record.message for record in caplog.records] == guard.log
    if count == 30:
        golden.check("guard", "\n".join(guard.log))
    assert all("the step runs once more, under a plan of" in line for line in guard.log)
    assert guard.plan.predicted_peak < plan.predicted_peak


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a user's")], ids=["interrupt", "error"])
def test_a_step_that_fails_anywhere_leaves_all_as_it_was(kind, is_warm, error):
    if kind is torch.optim.LBFGS:
        kind = lambda parameters, lr: ClosedLBFGS(parameters, lr)  # noqa: E731
    training = Training(kind=kind, is_warm=is_warm)
    plan = planned(0.5)
    with plan.guard(training.model) as guard:
        counted = Limited(10**9, error)
        guard(counted.runs(training.step), LARGEST)
        for at in range(1, counted.seen, counted.seen // 12):
            before = training.state()
            with pytest.raises(type(error)):
                guard(Limited(at, error).runs(training.step), LARGEST)
            assert same(training.state(), before)
        assert not guard.log


class ClosedLBFGS(torch.optim.LBFGS):
    """Evaluates the gradients as they are."""

    def step(self):
        return super().step(lambda: torch.ones(()))


@pytest.mark.parametrize("times", [1, 3])
def test_a_step_that_runs_out_of_memory_runs_again(times):
    plain, guarded = Training(), Training()
    plan = planned()
    torch.manual_seed(7)
    expected = plain.step(LARGEST)
    torch.manual_seed(7)
    with plan.guard(guarded.model) as guard:
        assert guard(Limited(60, torch.OutOfMemoryError("no memory"), times).runs(guarded.step), LARGEST) == expected
    assert same(plain.state(), guarded.state())
    assert len(guard.log) == times
    assert all(line.startswith("memory ran out: ") for line in guard.log)


def test_gradients_that_accumulate_are_put_back():
    plain, guarded = Training(GPT, is_warm=False), Training(GPT, is_warm=False)
    ids = torch.arange(512).remainder(50).reshape(8, 64)

    def step(training):
        training.model(ids).backward()

    plan = plan_memory(guarded.model, lambda model: step(guarded), 1.0, blocks=["blocks.*"])
    torch.manual_seed(7)
    for _ in range(3):
        step(plain)
    torch.manual_seed(7)
    with plan.guard() as guard:
        guard(step, guarded)
        guard(Limited(100, torch.OutOfMemoryError("no memory")).runs(step), guarded)
        guard(step, guarded)
    assert len(guard.log) == 1
    assert same(plain.state(), guarded.state())


def test_the_error_goes_on_at_the_least_plan_with_a_note():
    training = Training()
    plan = planned(0.0)
    before = training.state()
    device = Limited(60, torch.OutOfMemoryError("no memory"), 100)
    with plan.guard(training.model) as guard, pytest.raises(torch.OutOfMemoryError) as raised:
        guard(device.runs(training.step), LARGEST)
    assert device.times == 98  # under the least plan once, and once more in a ledger
    assert "most was held by" in str(getattr(raised.value, "__notes__", raised.value))
    assert same(training.state(), before)


def overwriting(training, error):
    with torch.no_grad():
        training.model.layers[0][0].weight.mul_(2)
    raise error


def test_an_optimizer_made_in_the_block_is_put_back():
    training = Training()
    with planned().guard(training.model) as guard:
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
        guard(training.step, LARGEST)
        before = training.state()
        with pytest.raises(KeyboardInterrupt):
            guard(lambda: (training.step(LARGEST), _interrupt()))
        assert same(training.state(), before)


def _interrupt():
    raise KeyboardInterrupt


def test_plans_of_other_shapes_give_way_too():
    training = Training()
    plan = planned().replan(1.0)
    other = plan.add(lambda model: training.step(torch.ones(64, 32)), training.model)
    with plan.guard(training.model) as guard:
        guard(Limited(60, torch.OutOfMemoryError("no memory"), 2).runs(training.step), torch.ones(64, 32))
    assert len(guard.log) == 2
    assert guard.plan.predicted_peak < plan.predicted_peak
    assert guard.plan.others[0].predicted_peak < other.predicted_peak
    assert plan.others == [other]


def test_the_model_is_under_the_plan_within_the_block_alone():
    training = Training()
    plan, forwards = planned(0.0), [vars(layer).get("forward") for layer in training.model.layers]
    with plan.guard(training.model) as guard:
        assert all("forward" in vars(layer) for layer in training.model.layers)
    assert [vars(layer).get("forward") for layer in training.model.layers] == forwards
    with pytest.raises(RuntimeError, match="not entered"):
        guard(training.step, LARGEST)


class ByData(torch.optim.SGD):
    """Writes to its state past versions."""

    def step(self):
        for state in self.state.values():
            state["momentum_buffer"].data.mul_(0.5)
        super().step()


@pytest.mark.parametrize("kind", ["state by data", "rate as a tensor"])
def test_what_optimizers_write_to_in_their_own_ways_is_put_back(kind):
    training = Training()
    parameters = training.model.parameters()
    if kind == "state by data":
        training.optimizer = ByData(parameters, lr=0.1, momentum=0.9)
        training.step(LARGEST)
    else:
        training.optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False)
        training.schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    before = training.state()

    def step():
        training.schedule.step()
        training.step(LARGEST)
        _interrupt()

    with planned().guard(training.model) as guard, pytest.raises(KeyboardInterrupt):
        guard(step)
    assert same(training.state(), before)


def test_an_interrupt_stays_one_where_something_is_lost():
    training = Training()

    lost = pytest.warns(UserWarning, match="cannot be undone")
    with planned().guard(training.model) as guard, lost, pytest.raises(KeyboardInterrupt):
        guard(overwriting, training, KeyboardInterrupt())
