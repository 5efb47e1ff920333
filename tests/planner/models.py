"""Small models of several kinds, with a step of each, for plans."""

from __future__ import annotations

import contextlib
import itertools

import torch
from torch import nn

from ckpt_hooks.planner import restoring

F = nn.functional

#: A block after which a model, its optimizers and generators are as before.
as_before = restoring.as_before


class GPTBlock(nn.Module):
    """A transformer's block, with dropout."""

    def __init__(self, width=64):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Attention(nn.Module):
    """Attention of four heads."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer's block, of an attention and an MLP, with dropout in each."""

    def __init__(self, width=64):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Sequential(Attention(width), nn.Dropout(0.1))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model."""

    def __init__(self, blocks=4, block=GPTBlock):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


class Basic(nn.Module):
    """A block of a ResNet, with ReLU in place."""

    def __init__(self, channels=16):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.relu = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))) + x)


class ResNet(nn.Module):
    """Blocks of a ResNet."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Basic() for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).logsumexp(1).sum()


class MLP(nn.Module):
    """Layers of unequal widths."""

    def __init__(self):
        super().__init__()
        widths = [64, 256, 128, 512, 64, 256]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, b), nn.Tanh()) for a, b in itertools.pairwise(widths)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _double(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.SiLU())


class UNet(nn.Module):
    """Three levels, with skips."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([_double(3, 8), _double(8, 16), _double(16, 32)])
        self.middle = _double(32, 32)
        self.up = nn.ModuleList([_double(64, 16), _double(32, 8), _double(16, 8)])

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return x.square().mean()


class Shared(nn.Module):
    """Two blocks, each called four times."""

    def __init__(self):
        super().__init__()
        self.embed, self.one, self.other = nn.Embedding(50, 64), GPTBlock(), GPTBlock()

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(4):
            x = self.other(self.one(x))
        return x.square().mean()


#: A model, an input, and its blocks.
MODELS = {
    "mlp": (MLP, lambda: torch.randn(256, 64), ["blocks.*"]),
    "gpt": (GPT, lambda: torch.randint(0, 50, (4, 64)), ["blocks.*"]),
    "layers": (lambda: GPT(4, Layer), lambda: torch.randint(0, 50, (4, 64)), ["blocks.*"]),
    "resnet": (ResNet, lambda: torch.randn(4, 3, 24, 24), ["blocks.*"]),
    "unet": (UNet, lambda: torch.randn(2, 3, 32, 32), ["down.*", "middle", "up.*"]),
    "shared": (Shared, lambda: torch.randint(0, 50, (2, 32)), ["one", "other"]),
}

VARIANTS = ("plain", "autocast", "gradients", "microbatches", "adamw", "zeroed")


def built(name, variant="plain"):
    """Returns a model, a step, and the selection of blocks."""
    torch.manual_seed(0)
    make, data, blocks = MODELS[name]
    model, x = make(), data()
    optimizer = torch.optim.AdamW(model.parameters()) if variant == "adamw" else None

    def step(model):
        if variant == "zeroed":
            model.zero_grad()
        for _ in range(2 if variant == "microbatches" else 1):
            with torch.autocast("cpu", torch.bfloat16) if variant == "autocast" else contextlib.nullcontext():
                loss = model(x)
            loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    if variant in ("gradients", "adamw", "zeroed"):
        step(model)
    return model, step, blocks


def state_of(model, optimizer=None):
    """Returns everything a step may change, copied."""
    own = {f"parameter {name}": one.detach().clone() for name, one in model.named_parameters()}
    own |= {f"buffer {name}": one.clone() for name, one in model.named_buffers()}
    own |= {
        f"gradient {name}": torch.zeros(0) if one.grad is None else one.grad.clone() for name, one in model.named_parameters()
    }
    own["random"] = torch.get_rng_state()
    return own


def same(one, other):
    """Whether two states are bitwise the same."""
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and torch.equal(one[name], other[name]) for name in one
    )


def after_a_step(model, step, seed=7):
    """Returns what a step leaves; the model is as before."""
    with as_before(model):
        torch.manual_seed(seed)
        step(model)
        return state_of(model)
