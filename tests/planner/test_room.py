"""The budget "auto", on a host which says that it is an accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_hooks import BudgetTooSmallError, plan_memory

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


def test_a_host_has_no_such_budget():
    model, step = model_and_step()
    with pytest.raises(ValueError, match="'auto' reads an accelerator's free memory, but the model is on the host: pass bytes"):
        plan_memory(model, step, "auto")
    with pytest.raises(ValueError, match=r"a number of bytes, a fraction from 0\.0 to 1\.0, or 'auto'"):
        plan_memory(model, step, "automatic")
