"""Regions wait for the device nowhere: the host runs ahead in forward and in backward."""

from __future__ import annotations

import functools

import pytest
from torch import nn
from train_charlm import Block

import ckpt_hooks
from ckpt_hooks import checkpoint
from tests.cuda.device import DEVICE, UNDER_POLICIES, WAYS, each, eager, needs_cuda, tensor
from tests.cuda.test_offload import OFFLOADING

pytestmark = [*needs_cuda, pytest.mark.usefixtures("unchecked")]


class Convolutions(nn.Module):
    """Convolutions, normalisation with running statistics, and dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x):
        return self.layers(x)


MODELS = {
    "block": lambda: (Block(256, heads=4, dropout=0.1), (4, 128, 256)),
    "convolutions": lambda: (Convolutions(), (2, 8, 16, 16)),
    "products": lambda: (nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)), (512, 512)),
}
OTHERS = {
    "eager": eager,
    "without random state": functools.partial(checkpoint, preserve_rng_state=False),
    "sequential": lambda module, x: ckpt_hooks.checkpoint_sequential([module, nn.Identity()], 2, x, use_reentrant=False),
}


@pytest.mark.parametrize("model", MODELS)
@each({**OTHERS, **WAYS, **UNDER_POLICIES, **OFFLOADING})
def test_no_synchronisation(run, model, request):
    """Neither in forward nor in backward, once memory that is pinned has been asked for."""
    module, shape = MODELS[model]()
    module.to(DEVICE)
    x = tensor(*shape)
    for _ in range(3):
        run(module, x).sum().backward()
    request.getfixturevalue("no_synchronisation")
    for _ in range(2):
        run(module, x).sum().backward()


def test_the_mode_sees_synchronisation(no_synchronisation):
    """Else the tests above say nothing."""
    with pytest.raises(RuntimeError, match="synchroniz"):
        tensor(1).item()
