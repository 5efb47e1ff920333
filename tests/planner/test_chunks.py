"""Numbers of chunks as a choice of plans."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ckpt_hooks import checkpoint_chunks, memory_ledger, plan_memory
from ckpt_hooks.planner import Plan, PlannedChunks
from tests.planner.models import GPTBlock, after_a_step, as_before, same

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Loss(nn.Module):
    """A head with its loss, as a sum over rows."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 2048)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(x), labels, reduction="sum")


class ChunkedLoss(Loss):
    """Does so in chunks, of which the number is an attribute."""

    chunks = 1

    def forward(self, x, labels):
        return checkpoint_chunks(super().forward, x, labels, chunked="labels", chunks=self.chunks, reduce="sum")


class Model(nn.Module):
    """Layers, and a loss with a large vocabulary."""

    def __init__(self, loss):
        super().__init__()
        self.layers, self.loss = nn.ModuleList(GPTBlock() for _ in range(3)), loss()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.loss(x.flatten(0, 1), torch.arange(x[..., 0].numel()) % 2048)


#: The bytes of a generator's state. The first region that is a call notes one, in this step or in an earlier one.
STATE = 5056

CHOICES = {
    ChunkedLoss: {"loss": (1, 4, 16)},
    Loss: {"loss": {"chunks": (1, 4, 16), "reduce": "sum", "chunked": "labels"}},
}


@pytest.fixture(params=CHOICES, ids=lambda kind: kind.__name__)
def prepared(request):
    """Returns a model, a step, and the numbers of chunks to choose from."""
    torch.manual_seed(0)
    # Without dropout: how much of a generator's state is noted depends on where its numbers are.
    model, x = Model(request.param).eval(), torch.randn(4, 64, 64)
    return model, lambda model: model(x).backward(), CHOICES[request.param]


def peak_of(model, step):
    with as_before(model):
        return memory_ledger(lambda: step(model)).peak.nbytes


def test_a_plan_sets_the_number_that_is_cheapest_within_the_budget(prepared):
    model, step, chunks = prepared
    before = [dict(vars(module)) for module in model.modules()]
    whole = plan_memory(model, step, 0.0)
    assert whole.chunks == ()
    tight = plan_memory(model, step, 0.1, chunks=chunks)
    loose = tight.replan(0.95, step)
    assert tight.least_peak < tight.measured_peak < whole.least_peak
    assert (tight.chunks[0].name, tight.chunks[0].chunks > 1) == ("loss", True)
    assert f"; loss in {tight.chunks[0].chunks} chunks; from" in str(tight)
    assert loose.chunks[0].chunks == 1
    assert "; loss as a whole; from" in str(loose)
    assert tight.pareto().plans[0].plan.chunks[0].chunks == 16
    for plan in (tight, loose):
        assert plan.measured_peak <= plan.budget
        assert plan.predicted_peak == pytest.approx(plan.measured_peak, abs=STATE)
    for plan in (tight, Plan.from_json(json.loads(json.dumps(tight.to_json())))):
        outer = nn.Sequential(model)
        with plan.apply(outer) as applied:
            assert sum(region.name == "0.loss" for region in applied) == (type(model.loss) is Loss)
            assert peak_of(model, step) == pytest.approx(tight.measured_peak, abs=STATE)
        assert [dict(vars(module)) for module in model.modules()] == before


def test_chunks_of_a_plan_are_the_loop_without_regions(prepared):
    model, step, chunks = prepared
    plan = plan_memory(model, step, 0.1, chunks=chunks)
    number = plan.chunks[0].chunks
    with plan.apply():
        found = after_a_step(model, step)
    loss, forward = model.loss, Loss.forward

    def loop(x, labels):
        total = 0
        for one, of in zip(x.split(-(-len(x) // number)), labels.split(-(-len(x) // number)), strict=True):
            part = forward(loss, one, of)
            total = part if isinstance(total, int) else total + part
        return total

    loss.forward = loop
    assert same(found, after_a_step(model, step))


def test_another_shape_has_the_same_chunks():
    torch.manual_seed(0)
    model, x = Model(ChunkedLoss), torch.randn(8, 64, 64)
    plan = plan_memory(model, lambda model: model(x[:4]).backward(), 0.1, chunks={"loss": (1, 8)})
    assert plan.chunks == (PlannedChunks("loss", 8, True),)
    found = plan.replan(0.9).add(lambda model: model(x[:2]).backward())
    assert [one.chunks for one in found.chunks] == [plan.replan(0.9).chunks[0].chunks]
    assert model.loss.chunks == 1


def test_a_plan_says_what_is_outside_of_all_blocks():
    torch.manual_seed(0)
    model, x = Model(Loss), torch.randn(4, 64, 64)
    plan = plan_memory(model, lambda model: model(x).backward(), 0.0, blocks=GPTBlock)
    assert "of the peak are outside of all blocks, mostly in loss" in str(plan)
    assert "`plan_memory(..., chunks={'head': (1, 4, 8)})` chooses their number" in str(plan)
