"""Plans of Transformers models: under the budget, close to the prediction, and bitwise."""

from __future__ import annotations

import contextlib

import pytest
import torch

from ckpt_hooks import plan_memory
from tests.planner.models import same, state_of
from tests.planner.test_plans import after_a_step

pytest.importorskip("transformers")

from tests.integrations.test_transformers import FAMILIES

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "bert"])
def test_a_plan_of_transformers(name, autocast):
    model, (batch, *_) = FAMILIES[name].build()
    model.train()

    def step(model):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(**batch).loss
        loss.backward()

    before, plain = state_of(model), after_a_step(model, step)
    layers = ["**.layers.*", "**.layer.*", "**.h.*"]
    names = [name for name, _ in model.named_modules()]
    blocks = [one for one in layers if any(name.rpartition(".")[0].endswith(one.split(".")[1]) for name in names)]
    for part in (0.25, 0.5):
        plan = plan_memory(model, step, part, blocks=blocks)
        assert plan.measured_peak <= plan.budget
        assert plan.predicted_peak == pytest.approx(plan.measured_peak, rel=0.02)
        assert same(state_of(model), before)
        with plan.apply():
            assert same(after_a_step(model, step), plain)
