"""The budget "auto", on a host which says that it is an accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_hooks import BudgetTooSmallError, apply_checkpointing, plan_memory

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

LAYERS = 4


@pytest.fixture
def device(monkeypatch):
    """What an allocator says of itself: bytes free, reserved, allocated, and the most that were reserved in a step."""
    said = {"free": 0, "reserved": 3000, "allocated": 1000, "most": 0, "emptied": 0}

    def emptied():
        said["emptied"] += 1

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (said["free"], 1 << 40))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: said["reserved"])
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: said["allocated"])
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: said["allocated"] + said["most"])
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", emptied)
    return said


def model_and_step():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(LAYERS)]
    model, x = nn.Sequential(*layers), torch.ones(256, 32)
    return model, lambda model: model(x).sum().backward()


def test_the_budget_is_what_is_free_and_what_is_reserved_without_use_but_for_a_twentieth(device):
    model, step = model_and_step()
    device["free"], device["most"] = 400_000, 320_000
    plan = plan_memory(model, step, "auto", blocks=["*"])
    assert plan.budget == int((400_000 + 2000) * 0.95)
    assert plan.measured_peak == 320_000
    assert device["emptied"] > 0


def test_fragments_that_the_allocator_holds_count(device):
    model, step = model_and_step()
    device["free"] = 400_000
    plain = plan_memory(model, step, 381_900, blocks=["*"])
    device["most"] = 381_901
    with pytest.raises(BudgetTooSmallError, match="the least peak is 381901 bytes"):
        plan_memory(model, step, "auto", blocks=["*"])
    assert plain.measured_peak <= 381_900


def test_a_plan_is_replanned_for_the_room_of_the_moment(device):
    model, step = model_and_step()
    device["free"], device["most"] = 400_000, 380_000
    plan = plan_memory(model, step, "auto", blocks=["*"])
    device["free"] = 300_000
    assert plan.replan("auto").budget == int(302_000 * 0.95)


@pytest.mark.parametrize(
    ("budget", "says", "expected"),
    [
        ("auto", [{"free": 400_000}, {"free": 300_000}, {}], [402_000 * 0.95, 302_000 * 0.95]),
        ("auto", [{"free": 300_000}, {"free": 400_000}, {}], [302_000 * 0.95, 402_000 * 0.95]),
        ("auto", [{"free": 400_000}, {"free": 0}, *7 * [{}]], [402_000 * 0.95, 2_000 * 0.95]),  # corrected three times
        (401_000, [{}, {"allocated": 101_000}, {}], [400_000, 300_000]),
        (301_000, [{}, {"allocated": 0}, {}], [300_000, 301_000]),
        ("100 KiB", [{"allocated": 10**6}], BudgetTooSmallError),
        (0.5, [{"allocated": 0}, {"allocated": 10**6}, {}], None),
    ],
)
def test_plans_of_a_loop_fit_in_the_room_before_each_of_their_steps(device, budget, says, expected):
    """A measured step begins with less room if the profiled step has made the state of an optimizer."""
    model, step = model_and_step()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    applied, budgets, plans = apply_checkpointing(model, memory_budget=budget, margin=0.1), [], []

    def train():
        for said in says:
            device.update(said)
            step(model)
            optimizer.step()
            optimizer.zero_grad()
            budgets.append(applied.budget)
            plans.append(applied.plan)

    if expected is BudgetTooSmallError:
        with pytest.raises(BudgetTooSmallError, match="No plan fits 0 bytes"):
            train()
        return
    train()
    assert len(applied.peaks) == (5 if len(says) > 3 else 2)
    assert budgets == ([budgets[0]] * 3 if expected is None else [int(expected[0]), *[int(expected[1])] * (len(says) - 1)])
    least = plans[0].least_peak
    assert all(least <= plan.predicted_peak <= max(least, 0.9 * fits) for plan, fits in zip(plans, budgets, strict=True))
    is_less = budgets[1] < budgets[0]
    first, *after = (plan.predicted_peak for plan in plans)
    assert [(peak != first) for peak in after] == [is_less] * (len(says) - 1)


def test_a_host_has_no_such_budget():
    model, step = model_and_step()
    with pytest.raises(ValueError, match="'auto' reads an accelerator's free memory, but the model is on the host: pass bytes"):
        plan_memory(model, step, "auto")
    with pytest.raises(ValueError, match=r"a number of bytes, a fraction from 0\.0 to 1\.0, or 'auto'"):
        plan_memory(model, step, "automatic")
