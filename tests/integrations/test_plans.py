"""Plans of Transformers models: under the budget, close to the prediction, and bitwise."""

from __future__ import annotations

import contextlib
import gc
import warnings

import pytest
import torch

from ckpt_hooks import enable_in_transformers, memory_ledger, plan_memory
from tests.planner.models import after_a_step, as_before, same, state_of

pytest.importorskip("transformers")

from tests.integrations.test_transformers import FAMILIES

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

STATE = 5056  # bytes of the CPU's generator: parts of a block that draw hold a state each, the profiled block one for several


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
        assert plan.predicted_peak == pytest.approx(plan.measured_peak, rel=0.02, abs=2 * STATE)
        assert same(state_of(model), before)
        with plan.apply():
            assert same(after_a_step(model, step), plain)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_budget_as_an_option(name):
    """Of the model's own loop, whose trainer turns the switch on; bitwise, and no step above the budget."""

    def train(on):
        model, (batch, *_) = FAMILIES[name].build()
        model.train()
        handle = enable_in_transformers(model, memory_budget=0.5) if on else None
        if on:
            getattr(model, "gradient_checkpointing_enable", lambda: None)()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(1)
        for _ in range(5):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model), handle

    (plain, _), (found, handle) = train(False), train(True)
    assert same(found, plain)
    plan = handle.plan
    assert plan.is_measured
    assert plan.measured_peak <= plan.budget
    assert plan.predicted_peak == pytest.approx(plan.measured_peak, rel=1e-3, abs=2 * STATE)
    assert handle.to_json() == plan.to_json()
    assert str(plan.measured_peak) in repr(handle.to_json())
    handle.undo()
    assert not handle.regions


def test_a_mixture_of_experts_with_other_data_and_other_shapes():
    """With a margin twenty batches are within the budget; another shape keeps nothing, until it is added."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, num_local_experts=4, num_experts_per_tok=2, attention_dropout=0.1, output_router_logits=True,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM._from_config(config, experts_implementation="eager").train()

    def stepping(seed, length=64):
        ids = torch.randint(3, 200, (4, length), generator=torch.Generator().manual_seed(seed))
        return lambda model: model(input_ids=ids, labels=ids).loss.backward()

    def over(step):
        """Returns the peak of a step above the budget, which is bitwise that without a plan."""
        plain = after_a_step(model, step)
        with plan.apply():
            assert same(after_a_step(model, step), plain)
            gc.collect()
            with as_before(model):
                return memory_ledger(lambda: step(model)).peak.nbytes - plan.budget

    plan = plan_memory(model, stepping(0), 0.5, blocks=["model.layers.*"], margin=0.03)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert max(over(stepping(seed)) for seed in range(20)) <= 0
    plain = after_a_step(model, stepping(0, 80))
    with plan.apply(), pytest.warns(UserWarning, match="has measured no step in which block 'model.layers.0'") as said:
        found = [after_a_step(model, stepping(0, 80)) for _ in range(2)]
    assert same(found[0], plain)
    assert len([one for one in said if "has measured no step" in str(one.message)]) == 1
    plan.add(stepping(1, 80))
    assert max(over(stepping(seed, length)) for seed in range(3) for length in (64, 80)) <= 0
    plain, step = after_a_step(model, stepping(0)), stepping(0)
    with enable_in_transformers(model, plan=plan) as handle:
        assert handle.regions == tuple(f"model.layers.{number}" for number in range(4))
        assert same(after_a_step(model, step), plain)
        with as_before(model):
            assert memory_ledger(lambda: step(model)).peak.nbytes <= plan.budget
