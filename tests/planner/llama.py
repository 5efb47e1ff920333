"""A model like Llama: root mean squares, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

import torch
from torch import nn

F = nn.functional


class Norm(nn.Module):
    """A norm by root mean square."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def turned(x, cosines, sines):
    """Returns queries or keys with their positions."""
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class LlamaBlock(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.size, self.repeats = width // heads, heads // groups
        self.norm, self.norm2 = Norm(width), Norm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        frequencies = 10000 ** -(torch.arange(0, self.size, 2) / self.size)
        angles = (torch.arange(x.shape[1])[:, None] * frequencies).repeat(1, 2)
        q, k, v = (one(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.query, self.key, self.value))
        q, k = (turned(one, angles.cos(), angles.sin()) for one in (q, k))
        k, v = (one.repeat_interleave(self.repeats, 1) for one in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A language model."""

    def __init__(self, width=64, blocks=4, tokens=100, heads=4, groups=2):
        super().__init__()
        self.embed, self.norm = nn.Embedding(tokens, width), Norm(width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups) for _ in range(blocks))
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())
