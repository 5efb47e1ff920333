"""Plans and estimates from steps on fake tensors."""

from __future__ import annotations

import json
import resource

import pytest
import torch
from torch import nn

from ckpt_hooks import estimate_memory, memory_ledger, plan_memory
from tests import golden

from . import models
from .models import as_before, built, same, state_of

F = nn.functional


NAMES = ["mlp", "gpt", "resnet", "unet"]


def measured(model, step):
    with as_before(model):
        return memory_ledger(lambda: step(model)).peak.nbytes


def identities_of(model):
    return [(id(one), one._version, id(one.grad)) for one in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("name", NAMES)
def test_dry_plans_have_the_peak_of_a_real_step(name):
    model, step, blocks = built(name)
    plain, before, versions = measured(model, step), state_of(model), identities_of(model)
    plan = plan_memory(model, step, 0.5, blocks=blocks, dry_run=True)
    assert identities_of(model) == versions
    assert same(before, state_of(model))
    assert not plan.is_measured
    assert plan.predicted_peak == plan.measured_peak <= plan.budget
    assert plan.plain_peak == pytest.approx(plain, rel=0.005)
    with plan.apply():
        assert measured(model, step) == pytest.approx(plan.predicted_peak, rel=0.005)
    assert "predicted, not measured" in str(plan)
    assert " ms" not in str(plan)


def on_meta(name):
    with torch.device("meta"):
        return models.MODELS[name][0]()


@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_models_on_the_meta_device_have_the_plans_of_real_ones(name):
    real, _, blocks = built(name)
    model, data = on_meta(name), models.MODELS[name][1]
    before = identities_of(model)
    plan, other = (
        plan_memory(one, lambda one: one(data()).backward(), 0.5, blocks=blocks, dry_run=True) for one in (model, real)
    )
    assert plan.blocks == other.blocks
    assert plan.plain_peak == pytest.approx(other.plain_peak, abs=100)  # numbers whose values stay known take memory
    assert identities_of(model) == before
    assert all(one.is_meta for one in model.parameters())


def test_a_step_that_fails_leaves_all_as_it_was():
    model, _, blocks = built("resnet", "adamw")
    before, versions = state_of(model), identities_of(model)

    def step(model):
        model(torch.randn(4, 3, 24, 24)).backward()
        raise KeyboardInterrupt

    for run in (lambda: plan_memory(model, step, 0.5, blocks=blocks, dry_run=True), lambda: estimate_memory(model, step)):
        with pytest.raises(KeyboardInterrupt):
            run()
        assert identities_of(model) == versions
        assert same(before, state_of(model))


def test_meta_parameters_of_an_optimizer_are_put_back():
    model = on_meta("mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    group, state = optimizer.param_groups[0], optimizer.state
    parameters = group["params"]

    def step(model):
        optimizer.zero_grad()
        model(torch.randn(256, 64)).backward()
        optimizer.step()

    found = estimate_memory(model, step)
    number = len([*model.parameters()])
    assert found.optimizer_state == 2 * found.parameters + 4 * number  # with a counter of steps each
    assert optimizer.param_groups[0] is group
    assert group["params"] is parameters
    assert optimizer.state is state
    assert not state
    assert [*map(id, parameters)] == [*map(id, model.parameters())]
    assert all(one.grad is None for one in parameters)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", ["adamw", "microbatches"])
def test_estimates_are_what_a_later_step_takes(name, variant):
    model, step, _ = built(name, variant)
    before, versions = state_of(model), identities_of(model)
    found = estimate_memory(model, step)
    assert identities_of(model) == versions
    assert same(before, state_of(model))
    step(model)
    parameters = sum(one.nbytes for one in model.parameters())
    own = found.optimizer_state + sum(
        one.nbytes
        for one in (*model.parameters(), *model.buffers(), *(one.grad for one in model.parameters()))
        if one is not None
    )
    states = 2 * parameters + 4 * len([*model.parameters()])  # with a counter of steps each
    assert (found.parameters, found.gradients) == (parameters, parameters)
    assert found.optimizer_state == (states if variant == "adamw" else 0)
    assert found.peak == pytest.approx(own + measured(model, step), rel=0.005)
    assert found.peak_phase == "backward"
    assert len([one for one in found.activations if one.name.startswith(("blocks.", "down.", "up."))]) > 2
    assert ("optimizer state" in str(found)) is (variant == "adamw")
    assert json.loads(json.dumps(found.to_json()))["peak"] == found.peak


def test_all_estimates_say():
    """Tables and values of models, without optimizer and with, and of microbatches."""
    lines = []
    for name, variant in [*((name, "plain") for name in models.MODELS), ("mlp", "adamw"), ("gpt", "microbatches")]:
        model, step, _ = built(name, variant)
        model.unused = torch.nn.BatchNorm1d(3)
        estimate = estimate_memory(model, step)
        lines += [f"== {name}, {variant}", str(estimate), str(estimate.to_json())]
    golden.check("estimates", "\n".join(lines))


def test_estimates_are_of_the_shapes_of_the_step():
    model = on_meta("gpt")

    def estimated(batches):
        def step(model):
            for batch in batches:
                model(torch.randint(0, 50, batch)).backward()

        found = estimate_memory(model, step)
        return found, sum(one.nbytes for one in found.activations)

    (_, whole), (_, half), (_, micro) = map(estimated, ([(4, 64)], [(2, 64)], [(2, 64), (2, 64)]))
    assert micro == half
    assert 1.9 < whole / half < 2.1
    assert {(one.kind, one.nbytes) for one in estimated([(4, 64)])[0].activations if "blocks" in one.name} == {
        ("GPTBlock", one.nbytes) for one in estimated([(4, 64)])[0].activations if one.name == "blocks.0"
    }


def test_gradients_that_meet_are_added_in_place():
    model = nn.Linear(256, 256)
    x = torch.ones(256, 256)

    def step(model):
        y = model(x)
        (y.sin() + y.cos() + y.exp()).sum().backward()

    plain = measured(model, step)
    found = estimate_memory(model, step)
    assert found.peak == plain + 2 * sum(one.nbytes for one in model.parameters())


class Branching(nn.Module):
    """Blocks with an operator whose result depends on data."""

    def __init__(self, function):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.function = function

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.function(x).sum()


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x * x.sum().item(), "aten._local_scalar_dense"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: nn.LSTM(8, 8)(x)[0], "aten.mkldnn_rnn_layer"),
    ],
)
def test_operators_that_depend_on_data_are_named(function, operator):
    model = Branching(function)
    for call in (
        lambda step: plan_memory(model, step, 0.5, dry_run=True),
        lambda step: estimate_memory(model, step),
    ):
        with pytest.raises(ValueError, match=f"{operator}.*Leave the call out of the step"):
            call(lambda model: model(torch.ones(4, 8)).backward())
    assert all(one.grad is None for one in model.parameters())


def test_programs_are_not_told_that_tensors_are_fake():
    fake = torch._subclasses.FakeTensor
    asked = []

    def step(model):
        x = torch.ones(4, 8)
        asked.append(isinstance(x, torch._subclasses.FakeTensor))
        model(x).sum().backward()

    estimate_memory(nn.Linear(8, 8), step)
    assert asked == [False, False]
    assert torch._subclasses.FakeTensor is fake


def test_no_memory_is_taken():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(4)))
    estimate_memory(nn.Linear(2, 2), lambda model: model(torch.ones(2, 2)).sum().backward())  # with what is imported once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = estimate_memory(model, lambda model: model(torch.ones(1 << 16, 4096)).sum().backward())
    assert found.peak > 8 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB
