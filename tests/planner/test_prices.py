"""What regions cost is in plans: blocks that are called again, where recording them would take longer than what it spares."""

from __future__ import annotations

import collections
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from ckpt_hooks import plan_memory
from ckpt_hooks.planner import Plan
from tests.measure import Log
from tests.planner.models import MODELS, after_a_step, built, same, state_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

PRICED = True
STATE = 5056  # bytes of a generator's state, of which a call notes one, shared with the call before where nothing was drawn

VARIANTS = [*((name, "plain") for name in MODELS), ("gpt", "autocast"), ("resnet", "microbatches"), ("gpt", "adamw")]


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_plans_with_blocks_called_again_fit_are_predicted_and_bitwise(name, variant):
    model, step, blocks = built(name, variant)
    before, plain = state_of(model), after_a_step(model, step)
    called_again = 0
    for part in (0.05, 0.3, 0.6, 0.9):
        plan = plan_memory(model, step, part, blocks=blocks)
        called_again += sum(not block.recorded for block in plan.blocks)
        assert same(state_of(model), before)
        assert plan.measured_peak <= plan.budget
        assert plan.predicted_peak == pytest.approx(plan.measured_peak, rel=1e-3, abs=STATE * len(plan.blocks))
        with plan.apply():
            assert same(after_a_step(model, step), plain)
        with Plan.from_json(plan.to_json()).apply(model):
            assert same(after_a_step(model, step), plain)
    assert called_again


def test_a_block_called_again_runs_twice_and_the_plan_says_so():
    model, step, blocks = built("gpt")
    plan = plan_memory(model, step, 0.5, blocks=blocks)
    again = {block.name for block in plan.blocks if not block.recorded}
    assert again
    assert "nothing, called again" in str(plan)
    calls = Log()
    for name, module in model.named_modules():
        if name.endswith(".qkv"):
            module.register_forward_hook(lambda module, args, result, name=name[:-4]: calls.put(name))
    with plan.apply():
        step(model)
    assert collections.Counter(iter(calls)) == {block.name: 2 - block.recorded for block in plan.blocks}


def test_modules_inside_of_a_block_are_regions_in_place_of_it():
    model, step, blocks = built("layers")
    plain = after_a_step(model, step)
    plan = plan_memory(model, step, 0.3, blocks=blocks)
    assert {part for block in plan.blocks for part in block.parts} == {"attention.0", "mlp"}
    called = [block for block in plan.blocks if not block.recorded]
    again = [f"{block.name}.{part}".strip(".") for block in called for part in block.parts or ("",)]
    assert "all but in attention.0, mlp, called again" in str(plan)
    calls = Log()
    for name, module in model.named_modules():
        if name.endswith((".qkv", ".mlp.0", ".norm")):  # hooks of a region's own module run once
            module.register_forward_hook(lambda module, args, result, name=name: calls.put(name))
    for applied in (plan, Plan.from_json(plan.to_json())):
        with applied.apply(model):
            assert same(after_a_step(model, step), plain)
        counts = collections.Counter(iter(calls))
        assert counts == {name: 1 + any(f"{name}.".startswith(f"{one}.") for one in again) for name in counts}
        calls.clear()


class FromAnIterator(nn.Module):
    """Takes masks from an iterator, which no rerun turns back."""

    def __init__(self):
        super().__init__()
        self.linear, self.masks = nn.Linear(64, 64), itertools.count(1)

    def forward(self, x):
        return torch.tanh(self.linear(x) * (1.0 / next(self.masks))).relu()


def test_a_block_that_gives_something_else_when_called_again_is_recorded():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(FromAnIterator() for _ in range(4))), torch.randn(64, 64)

    def step(model):
        for layer in model:
            layer.masks = itertools.count(1)
        model(x).sum().backward()

    plain = after_a_step(model, step)
    for part in (0.0, 0.5):
        plan = plan_memory(model, step, part, blocks=["*"])
        assert all(block.recorded for block in plan.blocks)
        assert plan.measured_peak <= plan.budget
        with plan.apply():
            assert same(after_a_step(model, step), plain)
    # Nor does another budget of the same profile call it again.
    loose = plan_memory(model, step, 1.0, blocks=["*"])
    assert all(block.kept is None for block in loose.blocks)
    for plan in (loose.replan(0.3), *(point.plan for point in loose.pareto().plans)):
        assert all(block.recorded for block in plan.blocks)


class Remembering(nn.Module):
    """Hands keys to a cache, which a region that calls the block again holds."""

    def __init__(self):
        super().__init__()
        self.key, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, cache):
        cache.append(self.key(x).tanh())
        return self.out((x * cache[-1]).sin()).cos()


class WithCache(nn.Module):
    """Layers with one cache, which goes with forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Remembering() for _ in range(6))

    def forward(self, x):
        cache = []
        for layer in self.layers:
            x = layer(x, cache)
        return x.sum()


def test_blocks_which_would_hold_more_than_is_predicted_are_recorded():
    torch.manual_seed(0)
    model, x = WithCache(), torch.randn(256, 64)

    def step(model):
        model(x).backward()

    plain = after_a_step(model, step)
    for part in (0.0, 0.3, 0.6):
        plan = plan_memory(model, step, part)
        assert all(block.recorded for block in plan.blocks)
        assert plan.budget * 0.9 <= plan.measured_peak <= plan.budget
        assert plan.predicted_peak == pytest.approx(plan.measured_peak, rel=1e-3)
        with plan.apply():
            assert same(after_a_step(model, step), plain)


def chosen_by_operations():
    """Returns plans, but for the figures that were measured: seconds, and random states that calls may share."""
    torch.set_num_threads(1)
    found = []
    for name in ("mlp", "gpt", "layers"):
        model, step, blocks = built(name)
        values = plan_memory(model, step, 0.5, blocks=blocks, cost="operations").to_json()
        found += [*values.pop("blocks"), values]
    return json.dumps([{key: row[key] for key in row if key not in ("measured_peak", "recomputed_seconds")} for row in found])


def test_plans_by_operations_are_the_same_in_each_run():
    program = "from tests.planner.test_prices import chosen_by_operations; print(chosen_by_operations())"
    command = [sys.executable, "-W", "ignore", "-c", program]
    other = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert chosen_by_operations() == chosen_by_operations() == other.stdout.splitlines()[-1]
