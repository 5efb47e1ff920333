"""Small models of several kinds, and ways to run their layers."""

from __future__ import annotations

import torch
from torch import nn

from ckpt_hooks import checkpoint, checkpoint_region
from ckpt_hooks.policies import dots_saveable, save_ops

aten = torch.ops.aten


class Block(nn.Module):
    """A transformer's block, with dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)
        self.qkv, self.dropout = nn.Linear(32, 96), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.mlp(x)


class Convolution(nn.Module):
    """A convolution with BatchNorm, and a shortcut."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return nn.functional.relu_(self.norm(self.convolution(x))) + x


class Causal(nn.Module):
    """A block of nanoGPT without fused attention: its mask is a part of a buffer."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1))
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x):
        batch, length, width = x.shape
        heads = (part.view(batch, length, 4, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).split(32, dim=2))
        q, k, v = heads
        scores = (q @ k.transpose(-2, -1)) * 8**-0.5
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf")).softmax(-1)
        mixed = self.dropout(scores) @ v
        x = x + self.dropout(self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width)))
        return x + self.mlp(x)


class Window(nn.Module):
    """A block of Swin: attention in shifted windows, with a table of relative positions and an index in a buffer."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.table = nn.Parameter(torch.zeros(9, 2))
        self.register_buffer("index", torch.arange(16).remainder(9).view(4, 4))
        self.register_buffer("mask", torch.tensor([0.0, -100.0]).repeat(8).view(1, 1, 4, 4).clone())

    def forward(self, x):
        batch, side, _, width = x.shape
        shifted = torch.roll(self.norm(x), (-1, -1), (1, 2))
        windows = shifted.view(batch, side // 2, 2, side // 2, 2, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, width)
        q, k, v = self.qkv(windows).reshape(-1, 4, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.view(-1)].view(4, 4, 2).permute(2, 0, 1).contiguous()
        scores = (q * 8**-0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0) + self.mask
        mixed = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, width))
        mixed = mixed.view(batch, side // 2, side // 2, 2, 2, width).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        x = x + torch.roll(mixed, (1, 1), (1, 2))
        return x + self.mlp(x)


class Layer(nn.Module):
    """A layer of an MLP."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x).tanh()


class Net(nn.Module):
    """Layers in a row, each run by a function of the layer and its input; the result is a sum."""

    def __init__(self, layer, run):
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(3)])
        self.run = run

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return x.sum()


INPUTS = {Layer: (8, 32), Convolution: (2, 4, 6, 6), Block: (2, 8, 32), Causal: (2, 8, 32), Window: (2, 4, 4, 16)}


def in_region(policy=None):
    def run(layer, x):
        with checkpoint_region(policy=policy):
            return layer(x)

    return run


def in_checkpoint(policy=None):
    return lambda layer, x: checkpoint(policy=policy)(layer)(x)


def nested(outer, inner):
    return lambda layer, x: outer(lambda x: inner(layer, x.sin()), x).cos()


SOME = save_ops(aten.addmm.default, aten.convolution.default)

RUNS = {
    "none": lambda layer, x: layer(x),
    "checkpoint": in_checkpoint(),
    "checkpoint, policy": in_checkpoint(SOME),
    "checkpoint, dots": in_checkpoint(dots_saveable),
    "region": in_region(),
    "region, policy": in_region(SOME),
    "region, dots": in_region(dots_saveable),
    "checkpoint in checkpoint": nested(in_checkpoint(), in_checkpoint()),
    "checkpoint in region": nested(in_region(), in_checkpoint()),
    "region in checkpoint": nested(in_checkpoint(), in_region()),
    "region in region": nested(in_region(), in_region()),
    "policy in checkpoint": nested(in_checkpoint(), in_checkpoint(SOME)),
    "policy in region": nested(in_region(SOME), in_region(SOME)),
    "checkpoint alone in checkpoint": lambda layer, x: checkpoint(lambda x: checkpoint(layer, x), x),
}
