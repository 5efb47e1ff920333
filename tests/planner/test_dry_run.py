"""Plans and estimates from steps on fake tensors."""

from __future__ import annotations

import functools
import json
import resource

import pytest
import torch
from torch import nn

from ckpt_hooks import estimate_memory, memory_ledger, plan_memory
from ckpt_hooks._torch import dry
from tests import golden

from . import models
from .models import as_before, built, same, state_of

F = nn.functional
CHANNELS_LAST = torch.channels_last


def convolve(
    channels, filters, size=3, *, batch=4, side=8, form=torch.contiguous_format, like=torch.contiguous_format, **options
):
    """Returns a convolution of a picture, and the picture and filters as it takes them."""
    transposed, dtype = options.pop("transposed", False), options.pop("dtype", torch.float32)
    function = F.conv_transpose2d if transposed else F.conv2d
    shape = (channels, filters) if transposed else (filters, channels)
    sizes = size if isinstance(size, tuple) else (size, size)
    x, w = (torch.empty(each, dtype=dtype) for each in ((batch, channels, side, side), (*shape, *sizes)))
    return functools.partial(function, **options), x.to(memory_format=form), w.to(memory_format=like)


def resize(*size, form=torch.contiguous_format, mode="nearest"):
    return lambda x: F.interpolate(x, size, mode=mode), torch.empty(2, 3, 8, 8).to(memory_format=form)


def normalize(form):
    return lambda x, w: F.batch_norm(x, None, None, w, w, True), torch.empty(4, 3, 8, 8).to(memory_format=form), torch.ones(3)


#: Calls, and the bytes that kernels take besides results: in forward; in backward with a gradient of the input, and without.
#: 16 channels of float32 take 64 bytes, so 4 pictures of 8 x 8 pixels take 16,384, and 16 filters of 16 channels 9,216.
TEMPORARIES = {
    "3 to 16 channels": (lambda: convolve(3, 16, padding=1), 16_384, 29_696, 16_384),
    "12 to 20": (lambda: convolve(12, 20, padding=1), 32_768, 46_144, 46_144),
    "16 to 16": (lambda: convolve(16, 16, padding=1), 25_600, 32_768, 32_768),
    "8 to 12": (lambda: convolve(8, 12, padding=1), 16_384, 25_728, 25_728),
    "in one dimension": (lambda: convolve(24, 20, (3, 1)), 51_200, 60_800, 60_800),
    "stride 2 in height": (lambda: convolve(16, 24, padding=1, stride=(2, 1)), 38_912, 37_376, 37_376),
    "numbers of 64 bits": (lambda: convolve(24, 20, dtype=torch.float64), 69_120, 103_680, 103_680),
    "24 to 40": (lambda: convolve(24, 40, padding=1), 82_432, 88_832, 88_832),
    "32 to 3": (lambda: convolve(32, 3, padding=1), 64_512, 64_128, 64_128),
    "stride 2": (lambda: convolve(16, 24, padding=1, stride=2), 36_864, 29_184, 29_184),
    "few channels, stride 2": (lambda: convolve(3, 24, padding=1, stride=2), 8_192, 22_368, 9_056),
    "transposed": (lambda: convolve(24, 16, 2, stride=2, transposed=True), 131_072, 100_352, 100_352),
    "products of matrices": (lambda: convolve(24, 20, 1), 0, 0, 0),
    "16 pictures": (lambda: convolve(24, 20, 1, batch=16), 183_296, 263_296, 263_296),
    "one pixel in four": (lambda: convolve(24, 20, 1, stride=2), 38_912, 55_424, 42_112),
    "channels last": (lambda: convolve(24, 20, form=CHANNELS_LAST, like=CHANNELS_LAST), 17_280, 34_560, 34_560),
    "channels last, filters not": (lambda: convolve(24, 20, form=CHANNELS_LAST), 34_560, 51_840, 51_840),
    "larger pictures": (lambda: resize(16, 16), 7_680, 0),
    "the largest that are copied": (lambda: resize(64, 64, mode="bilinear"), 99_840, 0),
    "larger still": (lambda: resize(64, 65), 0, 0),
    "larger pictures, channels last": (lambda: resize(16, 16, form=CHANNELS_LAST), 0, 6_144),
    "batch norm": (lambda: normalize(torch.contiguous_format), 0, 3_072, 3_072),
    "batch norm, channels last": (lambda: normalize(CHANNELS_LAST), 0, 0, 0),
    "a cast": (lambda: (torch.add, torch.empty(4, 3), torch.empty(3, dtype=torch.bfloat16)), 12, 0, 0),
    "of integers": (lambda: (lambda x: x * torch.ones(3, dtype=torch.int64), torch.empty(4, 3)), 0, 0),
    "to booleans": (lambda: (lambda x: x * (x.detach() > torch.ones(3).double()), torch.empty(4, 3)), 0, 0),
}

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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", TEMPORARIES)
def test_memory_that_kernels_take_besides_their_results(name, monkeypatch):
    monkeypatch.setattr(dry, "_LANES", 16)
    make, *expected = TEMPORARIES[name]
    found = []
    for needs_grad in (True, False):
        mode, told = dry.DryMode(), []
        with mode:
            mode.listen(lambda key, nbytes, device, total, told=told: told.append(nbytes) if key == -1 and nbytes > 0 else None)
            function, x, *weights = make()
            y = function(x.requires_grad_(needs_grad), *(weight.requires_grad_() for weight in weights))
            told.append("backward")
            if y.requires_grad:
                y.backward(torch.empty_like(y))
        mode.end()
        place = told.index("backward")
        found += [sum(told[:place])] * needs_grad + [sum(told[place + 1 :])] * y.requires_grad
    assert found == expected


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
