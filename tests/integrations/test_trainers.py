"""Accelerate and Lightning, end to end: the recipes of the README."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ckpt_hooks import apply_checkpointing
from tests.behaviours.runs import same
from tests.measure import Frames

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]


class Block(nn.Module):
    """A layer with dropout and running statistics."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return torch.dropout(self.norm(self.linear(x)).relu(), 0.2, self.training)


def network():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1))


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator))


def assert_same(found, expected):
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


# Accelerate


def accelerated(model, prepare_first, apply):
    """Trains with gradient accumulation; returns losses, the state, and where the random numbers are."""
    accelerate = pytest.importorskip("accelerate", exc_type=Exception)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    if not prepare_first:
        apply(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if prepare_first:
        apply(prepared)
    torch.manual_seed(1)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(prepared):
            loss = nn.functional.mse_loss(prepared(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [
        *losses,
        *(value.clone() for value in accelerator.unwrap_model(prepared).state_dict().values()),
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("prepare_first", [False, True])
def test_accelerate(prepare_first, recorded):
    """Regions before or after ``prepare``, which sets ``forward`` too; with mixed precision and accumulation."""
    expected = accelerated(network(), prepare_first, lambda model: None)
    regions = Frames()
    with regions:
        found = accelerated(network(), prepare_first, lambda model: apply_checkpointing(model, Block, recorded=recorded))
    assert len(regions.frames) == 8
    assert_same(found, expected)


def test_accelerate_unwraps_the_model():
    """``unwrap_model`` takes off what ``prepare`` put around forward, and leaves the regions."""
    accelerate = pytest.importorskip("accelerate", exc_type=Exception)
    model = network()
    applied = apply_checkpointing(model, Block)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    unwrapped = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
    regions = Frames()
    with regions:
        unwrapped(torch.randn(4, 8)).sum().backward()
    assert len(regions.frames) == 2
    applied.undo()
    assert "forward" not in vars(model[0])
    copy.deepcopy(unwrapped)


# Lightning


def lit(apply, **trainer_options):
    """Trains a LightningModule; returns losses, the state, and where the random numbers are."""
    lightning = pytest.importorskip("lightning", exc_type=Exception)

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()
            self.losses = []
            apply(self.model)

        def training_step(self, batch, _):
            x, y = batch
            loss = nn.functional.mse_loss(self.model(x), y)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Lit()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options,
    )
    torch.manual_seed(1)
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=4))
    return [*module.losses, *(value.clone() for value in module.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}, {"gradient_clip_val": 0.1, "precision": "64-true"}],
)
def test_lightning(options, recorded):
    expected = lit(lambda model: None, **options)
    regions = Frames()
    with regions:
        found = lit(lambda model: apply_checkpointing(model, Block, recorded=recorded), **options)
    assert len(regions.frames) == 8
    assert_same(found, expected)
