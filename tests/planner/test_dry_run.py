"""Plans and estimates from fake tensors: near what is measured, with no memory taken, and all as before."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from ckpt_hooks import BudgetTooSmallError, estimate_memory, memory_ledger, plan_memory
from tests.planner.llama import Llama
from tests.planner.models import MODELS, as_before, built, same, state_of

F = nn.functional

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Downward(nn.Module):
    """A block of a ResNet which halves the picture."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 2 * channels, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * channels)
        self.conv2, self.norm2 = nn.Conv2d(2 * channels, 2 * channels, 3, 1, 1, bias=False), nn.BatchNorm2d(2 * channels)
        self.short = nn.Sequential(nn.Conv2d(channels, 2 * channels, 1, 2, bias=False), nn.BatchNorm2d(2 * channels))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.norm2(self.conv2(self.relu(self.norm(self.conv(x))))) + self.short(x))


class Deep(nn.Module):
    """A ResNet with a stem, strides and a pool."""

    def __init__(self):
        super().__init__()
        stem = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.stem, self.blocks = nn.Sequential(*stem), nn.Sequential(Downward(16), Downward(32))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3))).logsumexp(1).sum()


def made(name, variant="plain"):
    """Returns a model and a step."""
    torch.manual_seed(0)
    if name not in ("llama", "deep"):
        return built(name, variant)
    model = Llama() if name == "llama" else Deep()
    x = torch.randint(0, 100, (4, 64)) if name == "llama" else torch.randn(4, 3, 64, 64)
    return model, lambda model: model(x).backward(), ["blocks.*"]


def measured(model, step):
    with as_before(model):
        return memory_ledger(lambda: step(model)).peak.nbytes


CASES = [*((name, "plain") for name in (*MODELS, "llama", "deep"))]
CASES += [("gpt", variant) for variant in ("microbatches", "adamw")]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_dry_plans_are_near_what_is_measured(name, variant):
    model, step, blocks = made(name, variant)
    plain = measured(model, step)
    before, versions = state_of(model), [one._version for one in (*model.parameters(), *model.buffers())]
    assert estimate_memory(model, step).step_peak == pytest.approx(plain, rel=0.005)
    plan = plan_memory(model, step, 0.3, blocks=blocks, dry_run=True)
    assert same(state_of(model), before)
    assert [one._version for one in (*model.parameters(), *model.buffers())] == versions
    assert plan.plain_peak == pytest.approx(plain, rel=0.005)
    assert not plan.is_measured
    assert "predicted, not measured" in str(plan)
    assert plan.predicted_peak == plan.measured_peak <= plan.budget
    with plan.apply():
        assert plan.predicted_peak == pytest.approx(measured(model, step), rel=0.005)


def test_a_meta_model_is_planned_like_a_real_one():
    with torch.device("meta"):
        meta = Llama()
    real, ids = Llama(), torch.randint(0, 100, (4, 64))

    def step(model):
        model(ids).backward()
        torch.optim.AdamW(model.parameters()).step()

    found, expected = estimate_memory(meta, step), estimate_memory(real, step)
    assert found == expected
    assert all(one.is_meta and one.grad is None for one in meta.parameters())
    plan, other = (plan_memory(model, step, 0.5, dry_run=True) for model in (meta, real))
    assert (plan.predicted_peak, plan.least_peak) == (other.predicted_peak, other.least_peak)


def test_an_optimizer_of_a_meta_model_is_as_before():
    with torch.device("meta"):
        model = nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()

    found = estimate_memory(model, step)
    assert (found.parameters, found.gradients) == (8320, 8320)
    assert found.optimizer == 2 * 8320 + 2 * 4  # two moments, and a number of steps for each parameter
    assert not optimizer.state
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def test_an_estimate_prints_and_goes_to_json():
    model, step, _ = made("llama")
    found = estimate_memory(model, step)
    assert found.activations == sum(block.nbytes for block in found.blocks)
    assert "x4  blocks.0-3" in str(found)
    assert json.loads(json.dumps(found.to_json()))["peak"] == found.peak == found.parameters + found.step_peak


def test_longer_sequences_take_more():
    model, ids = Llama(), torch.zeros(1, 128, dtype=torch.long)
    short, long = (
        estimate_memory(model, lambda model: model(ids[:, :64]).backward()),
        estimate_memory(model, lambda model: model(ids).backward()),
    )
    assert short.parameters == long.parameters
    assert 1.9 * short.activations < long.activations < 2.1 * short.activations


@pytest.mark.parametrize(
    ("ask", "operator"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
    ],
)
def test_what_depends_on_values_is_an_error_with_its_operator(ask, operator):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    before = state_of(model)

    def step(model):
        y = model(torch.ones(4, 8))
        y.sum().backward()
        ask(y.detach())

    with pytest.raises(ValueError, match=rf"calls aten\.{operator}.*shapes alone"):
        estimate_memory(model, step)
    assert same(state_of(model), before)
    assert all(type(one) is nn.Parameter for one in model.parameters())


def test_arguments_of_dry_runs_are_checked():
    model, step, blocks = made("mlp")
    with pytest.raises(ValueError, match="'operations' with dry_run"):
        plan_memory(model, step, 0.5, dry_run=True, cost="seconds")
    with pytest.raises(TypeError, match="dry_run"):
        plan_memory(model, step, 0.5, dry_run="yes")
    with pytest.raises(TypeError, match="model"):
        estimate_memory(step, model)
    with pytest.raises(BudgetTooSmallError):
        plan_memory(model, step, 1000, blocks=blocks, dry_run=True)


def in_a_process(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


_GROWTH = """
    import sys, torch
    from ckpt_hooks import estimate_memory
    from tests.planner.llama import Llama
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096
    with torch.device("meta"):
        small, model = Llama(), Llama({shape})
    step = lambda model, length=64: model(torch.zeros(1, length, dtype=torch.long)).backward()
    estimate_memory(small, step)  # what torch imports
    before = resident()
    found = estimate_memory(model, lambda model: step(model, 2048))
    print(found.parameters, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1024, 8, 32000, 16, 16", "4096, 32, 32000, 32, 32"])
def test_no_memory_is_taken(shape):
    parameters, growth = map(int, in_a_process(_GROWTH.format(shape=shape)))
    assert parameters > 5e8
    assert growth < 50e6
