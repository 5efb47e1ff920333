"""Plans of flat and of deep models, whose blocks are spans, or have spans around."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from ckpt_hooks import memory_ledger, plan_memory, span
from ckpt_hooks.planner import Plan
from tests import golden
from tests.planner.models import after_a_step, as_before, same

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def flat(pairs=16, width=32):
    torch.manual_seed(0)
    layers = [layer for _ in range(pairs) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(1024, width)


class Deep(nn.Module):
    """Calls the layers of a list; what a layer returns besides the first is dropped."""

    def __init__(self, make, count):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            found = layer(x)
            x = x + (found[0] if isinstance(found, tuple) else found)
        return x


def stepping(x):
    return lambda model: model(x).square().mean().backward()


def peak_of(model, step):
    with as_before(model):
        return memory_ledger(lambda: step(model)).peak.nbytes


def check(model, step, plan, error=1e-3):
    """Compares a plan with its prediction and its budget, and the step under it with the plain one."""
    assert plan.measured_peak <= plan.budget
    assert plan.predicted_peak == pytest.approx(plan.measured_peak, rel=error)
    plain = after_a_step(model, step)
    for one in (plan, Plan.from_json(json.loads(json.dumps(plan.to_json())))):
        with one.apply(model):
            assert same(after_a_step(model, step), plain)
            assert peak_of(model, step) == plan.measured_peak
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_flat_chain():
    model, x = flat()
    step = stepping(x)
    least, middle = (plan_memory(model, step, part) for part in (0.0, 0.5))
    assert least.measured_peak <= 0.3 * least.plain_peak
    assert "nothing, blocks inside are regions" in str(least)
    assert least.recomputed > 1 > middle.recomputed > 0
    assert all(" to " in block.name for plan in (least, middle) for block in plan.blocks)
    assert not any(block.around for block in middle.blocks)
    for plan in (least, middle):
        check(model, step, plan)
    golden.check("plan_flat", f"{least}\n{middle}")


def test_a_deep_model_has_spans_around_blocks_where_these_lower_the_least_peak():
    torch.manual_seed(0)
    model = Deep(lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)), 24)
    step = stepping(torch.randn(1024, 32))
    plan = plan_memory(model, step, 0.0)
    assert plan.measured_peak < 0.135 * plan.plain_peak
    around = {block.around for block in plan.blocks if block.around}
    assert len(around) == 6
    check(model, step, plan)
    # Blocks alone are cheaper where these fit.
    middle = plan.replan(0.3, step)
    assert [block.name for block in middle.blocks] == [f"layers.{number}" for number in range(24)]
    check(model, step, middle)
    front = plan.pareto().plans
    assert front[0].peak == plan.least_peak
    assert front[0].plan.blocks == plan.blocks
    golden.check("plan_deep", "\n".join([str(plan), *(f"{point.peak}, {point.recomputed:.6f}" for point in front)]))
    check(model, step, plan.replan(plan.budget, step))


def test_layers_of_a_recurrent_model():
    torch.manual_seed(0)
    model, step = Deep(lambda: nn.GRU(16, 16, batch_first=True), 9), stepping(torch.randn(64, 8, 16))
    plan = plan_memory(model, step, 0.2)
    assert {block.kind for block in plan.blocks} == {"GRU"}
    check(model, step, plan, error=0.03)  # views into states of all times live on in a replay as a whole


def test_spans_that_are_selected():
    model, x = flat(6)
    step = stepping(x)
    blocks = [span("0", "5"), span("0", "2"), span("3", "5"), span("6", "11")]
    plan = plan_memory(model, step, 0.0, blocks=blocks)
    assert {block.name for block in plan.blocks} == {*map(str, blocks)}
    check(model, step, plan)
    added = plan.add(stepping(x[:512]))
    golden.check("plan_spans", f"{plan}\n{added}")
    assert [block.name for block in added.blocks] == [block.name for block in plan.blocks]
    with plan.apply():
        assert peak_of(model, stepping(x[:512])) == added.measured_peak
        assert peak_of(model, step) == plan.measured_peak
    wrapped = nn.Sequential(model)
    with plan.apply(wrapped) as applied:
        assert {region.name for region in applied} >= {"0.0 to 0.5", "0.3 to 0.5"}
        assert peak_of(wrapped, step) == plan.measured_peak
