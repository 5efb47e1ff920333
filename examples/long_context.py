"""Train a small Llama on long contexts in the memory of short ones: MLPs and the loss on slices, attention kept.

    python examples/long_context.py
    python examples/long_context.py --context 4096 --mode torch,chunks --loss-chunks 32

Of a long context two things are large: what an MLP computes on the way, some eleven times its input, and the logits, which
have 32,000 numbers for each word, three times over with their softmax and its gradient. Neither needs more than one word at a
time. So both run on slices, each a region: backward computes one again, uses it and drops it. Attention needs all words, and
takes most of the time: what costs much in it is kept, and does not run again. The modes are

- `none`: without regions;
- `torch`: each layer by the checkpoint that comes with torch;
- `loop`: slices without regions, as `chunks` computes them: it shows that regions change nothing, and saves nothing;
- `chunks`: slices as regions.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Torch says on import that NumPy is absent, and its profiler that memory was allocated before: neither matters here.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from ckpt_hooks import apply_checkpointing, checkpoint_chunks, memory_ledger, policies

MODES = ("none", "torch", "loop", "chunks")

#: What is kept in the regions of attention: its linear layers, and what `scaled_dot_product_attention` returns.
KEPT = policies.save_from_both_policies(policies.save_modules("qkv", "out"), policies.attention_saveable)


@dataclass
class Options:
    """Sizes of the model and of its slices."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 1024
    vocabulary: int = 32_000
    chunks: int = 8
    loss_chunks: int = 16


# ---- the model, which knows nothing of regions ----


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.heads = options.heads
        self.norm = nn.RMSNorm(options.width)
        self.qkv = nn.Linear(options.width, 3 * options.width, bias=False)
        self.out = nn.Linear(options.width, options.width, bias=False)
        self.turns: Tensor
        half = options.width // options.heads // 2
        angles = torch.outer(torch.arange(options.context), 10_000.0 ** -(torch.arange(half) / half))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        """Turns pairs of numbers by angles that grow with the position."""
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what is to be added to the input."""
        qkv = self.qkv(self.norm(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.turned(qkv[0]), self.turned(qkv[1]), qkv[2], is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class Gated(nn.Module):
    """The MLP of Llama."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        inner = 4 * options.width
        self.norm = nn.RMSNorm(options.width)
        self.gate, self.up = (nn.Linear(options.width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, options.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what is to be added to the input."""
        h = self.norm(x)
        result: Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class Layer(nn.Module):
    """Attention and MLP."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(options), Gated(options)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input and more."""
        x = x + self.attention(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Predicts the next word."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.words = nn.Embedding(options.vocabulary, options.width)
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Returns what the head takes, for each word."""
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)  # type: ignore[no-any-return]

    def loss(self, x: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """Returns the sum of losses, and of how many words."""
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


# ---- modes: ways to run it ----


def in_a_loop(function: Callable[..., Any], x: Tensor, *others: Tensor, chunks: int) -> list[Any]:
    """Returns what a function returns for slices of its arguments."""
    return [function(*part) for part in zip(*(one.chunk(chunks, 1) for one in (x, *others)), strict=True)]


def as_mode(model: Llama, mode: str, options: Options) -> Callable[[Tensor, Tensor], Tensor]:
    """Prepares a model for a mode; returns its loss as a function of words and labels."""
    layers: list[Any] = list(model.layers)
    for layer in layers if mode == "torch" else ():
        layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    for layer in layers if mode == "loop" else ():
        forward = functools.partial(in_a_loop, layer.mlp.forward, chunks=options.chunks)
        layer.mlp.forward = lambda x, forward=forward: torch.cat(forward(x), 1)
    if mode == "chunks":
        slices = {"chunks": options.chunks, "dim": 1}
        apply_checkpointing(model, {"layers.*.attention": {"policy": KEPT}, "layers.*.mlp": slices})

    def loss(words: Tensor, labels: Tensor) -> Tensor:
        x = model(words)
        if mode == "chunks":
            found: Tensor = checkpoint_chunks(
                model.loss, x, labels, chunked="labels", dim=1, chunks=options.loss_chunks, reduce="mean"
            )
            return found
        if mode == "loop":
            parts = in_a_loop(model.loss, x, labels, chunks=options.loss_chunks)
            total = parts[0][0]
            for part, _ in parts[1:]:
                total = total + part
            return total / labels.numel()  # type: ignore[no-any-return]
        total, count = model.loss(x, labels)
        return total / count

    return loss


@dataclass
class Result:
    """What a step of one mode came to."""

    mode: str
    peak_bytes: int
    seconds: float
    loss: Tensor
    gradients: list[Tensor]


def measured(mode: str, options: Options) -> Result:
    """Runs two steps on a new model: one for the time, one for the peak of memory."""
    torch.manual_seed(0)
    model = Llama(options)
    words = torch.randint(options.vocabulary, (1, options.context + 1))
    loss_of = as_mode(model, mode, options)
    losses: list[Tensor] = []

    def step() -> None:
        model.zero_grad()
        loss = loss_of(words[:, :-1], words[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())

    step()
    begin = time.perf_counter()
    step()
    seconds = time.perf_counter() - begin
    model.zero_grad()
    peak = memory_ledger(step).peak.nbytes
    return Result(mode, peak, seconds, losses[-1], [one.grad for one in model.parameters() if one.grad is not None])


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Prints a row for each mode; returns what they came to."""
    parser = argparse.ArgumentParser(description="Train a small Llama on long contexts in the memory of short ones.")
    parser.add_argument("--mode", default=",".join(MODES), help=f"modes, with commas between: {', '.join(MODES)}")
    for name, value in vars(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    values = vars(parser.parse_args(arguments))
    modes = values.pop("mode").split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"there is no mode {unknown[0]!r}; choose from {', '.join(MODES)}")
    print(f"{'mode':8}{'peak MiB':>10}{'seconds':>10}{'loss':>12}")
    results = []
    for mode in modes:
        found = measured(mode, Options(**values))
        results.append(found)
        print(f"{mode:8}{found.peak_bytes / 2**20:>10.1f}{found.seconds:>10.2f}{found.loss.item():>12.6f}")
    by_mode = {found.mode: found for found in results}
    if {"loop", "chunks"} <= by_mode.keys():
        one, other = by_mode["loop"], by_mode["chunks"]
        is_same = torch.equal(one.loss, other.loss) and all(map(torch.equal, one.gradients, other.gradients))
        print(f"loss and gradients of chunks bitwise those of the loop: {'yes' if is_same else 'no'}")
    return results


if __name__ == "__main__":
    main()
