"""Models of timm and torchvision with regions by ``apply_checkpointing``: bitwise equal to themselves, buffers included."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ckpt_hooks import apply_checkpointing, every, policies
from tests.behaviours.runs import same
from tests.measure import Frames

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]

# Each: the model's name and options, what to select, and the size of images.
TIMM = [
    ("resnet10t", {}, "layer*.*", 32),
    ("vit_tiny_patch16_224", {"img_size": 32, "depth": 3}, "blocks.*", 32),
    ("convnext_atto", {"depths": (1, 1, 2, 1)}, "stages.*", 64),
    ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (1, 1, 1, 1), "embed_dim": 24}, "layers.*", 56),
    ("efficientnet_b0", {}, "blocks.*", 32),
    ("densenet121", {"block_config": (1, 2, 2, 1)}, "features.denseblock*", 32),
    ("mixer_s32_224", {"img_size": 32}, "blocks.*", 32),
    ("regnetx_002", {}, "s*", 32),
    ("mobilenetv3_small_050", {}, "blocks.*", 32),
    ("beit_base_patch16_224", {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}, "blocks.*", 32),
    ("maxvit_rmlp_pico_rw_256", {"img_size": 64}, "stages.*", 64),
    ("xcit_nano_12_p16_224", {"img_size": 32}, "blocks.*", 32),
]
TORCHVISION = [
    ("resnet18", {}, nn.Sequential, 32),
    ("densenet121", {}, "features.denseblock*", 32),
    ("mobilenet_v2", {}, "features.*", 32),
    ("efficientnet_b0", {}, "features.*", 32),
    ("vit_b_16", {"image_size": 32}, "encoder.layers.*", 32),
    ("swin_t", {}, "features.*", 32),
    ("convnext_tiny", {}, "features.*", 32),
    ("shufflenet_v2_x0_5", {}, "stage*", 32),
    ("googlenet", {"aux_logits": False, "init_weights": False}, "inception*", 32),
    ("squeezenet1_1", {}, every(2, of="features.*"), 64),
    ("vgg11_bn", {}, "features", 32),
    ("regnet_y_400mf", {}, "trunk_output.*", 32),
]
KINDS = {
    "checkpoint": {},
    "policy": {"policy": policies.save_compute_and_communication},
    "recorded": {"recorded": True},
}


def trained(model, size):
    """Returns losses, gradients, buffers and parameters of two steps, and where they left the random numbers."""
    torch.manual_seed(1)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    found = []
    for _ in range(2):
        loss = model(torch.randn(2, 3, size, size)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]


def check(model, select, size):
    expected = trained(copy.deepcopy(model), size)
    for options in KINDS.values():
        twin, regions = copy.deepcopy(model), Frames()
        applied = apply_checkpointing(twin, select, **options)
        with regions:
            found = trained(twin, size)
        assert len(regions.frames) >= 2 * len(applied) > 0
        assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize(("name", "options", "select", "size"), TIMM, ids=[case[0] for case in TIMM])
def test_timm(name, options, select, size):
    timm = pytest.importorskip("timm", exc_type=Exception)
    rates = {"drop_rate": 0.1} if "maxvit" in name else {"drop_rate": 0.1, "drop_path_rate": 0.1}
    if name == "densenet121":
        rates = {"drop_rate": 0.1}
    check(timm.create_model(name, num_classes=5, **rates, **options), select, size)


@pytest.mark.parametrize(("name", "options", "select", "size"), TORCHVISION, ids=[case[0] for case in TORCHVISION])
def test_torchvision(name, options, select, size):
    torchvision = pytest.importorskip("torchvision", exc_type=Exception)
    check(getattr(torchvision.models, name)(num_classes=5, **options), select, size)
