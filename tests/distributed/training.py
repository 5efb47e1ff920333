"""A model whose regions are put in by name, trained for two steps, and all that comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ckpt_hooks import checkpoint, checkpoint_region, policies

__all__ = ["EXTENTS", "FEW", "FORMS", "WIDTH", "Block", "Model", "assert_equal", "block_of_code", "local", "results", "trained"]

WIDTH = 8

Function = Callable[..., torch.Tensor]


def block_of_code(**options: Any) -> Callable[[Function], Function]:
    """Returns what makes a function run in a ``with`` block."""

    def wrap(function: Function) -> Function:
        def call(*args: Any) -> torch.Tensor:
            with checkpoint_region(**options):
                return function(*args)

        return call

    return wrap


#: What makes a function a region.
FORMS: dict[str, Callable[[Function], Function]] = {
    "plain": lambda function: function,
    "with": block_of_code(),
    "decorator": checkpoint_region(),
    "whole": block_of_code(replay_whole=True),
    "part by part": block_of_code(replay_whole=False),
    "kept products": block_of_code(policy=policies.dots_saveable),
    "two regions": lambda function: block_of_code()(FORMS["with"](function)),
    "call": lambda function: lambda *args: checkpoint(function, *args),
    "call with a policy": checkpoint(policy=policies.dots_saveable),
    "kept modules": checkpoint(policy=policies.save_modules("up", "blocks.1.down", nn.Dropout)),
    "call with values": checkpoint(determinism_check="values"),
    "region in a call": lambda function: checkpoint()(block_of_code()(function)),
    "call in a region": lambda function: block_of_code()(checkpoint()(function)),
}

#: Some that differ most.
FEW = ("with", "whole", "kept products", "call")

#: What is in the region: some blocks, all of the model, or its first half, which ends in the middle of the blocks.
EXTENTS = ("blocks", "all", "half")


class Block(nn.Module):
    """Has a buffer, draws numbers, and multiplies by parameters twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input and more."""
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Three blocks between two linear layers.

    Attributes:
        form: Makes a region; see :data:`FORMS`.
        extent: The part of the model in the region; see :data:`EXTENTS`.
    """

    def __init__(self, form: Callable[[Function], Function] = FORMS["plain"], extent: str = "blocks") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.form, self.extent = form, extent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the result of all layers."""
        if self.extent == "all":
            return self.form(lambda x: self.last(self.through(self.first(x), 0, 3)))(x)
        if self.extent == "half":
            return self.last(self.through(self.form(lambda x: self.through(self.first(x), 0, 2))(x), 2, 3))
        return self.last(self.form(lambda x: self.through(x, 0, 3))(self.first(x)))

    def through(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Returns the result of some blocks."""
        for block in self.blocks[start:end]:
            x = block(x)
        return x


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the part of a tensor which this process has."""
    part: torch.Tensor = tensor.detach()
    return getattr(part, "_local_tensor", part).clone()


def results(model: nn.Module) -> list[torch.Tensor]:
    """Returns gradients, parameters and buffers."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [local(tensor) for tensor in (*gradients, *model.parameters(), *model.buffers())]


def trained(model: nn.Module, steps: int = 2, call: Function | None = None, *, fused: bool = False) -> list[torch.Tensor]:
    """Trains a model for some steps on data of this process; returns losses, gradients, parameters and buffers of each step."""
    torch.manual_seed(1 + torch.distributed.get_rank())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01, fused=fused)
    found = []
    for _ in range(steps):
        loss = (call or model)(torch.randn(6, WIDTH)).float().pow(2).mean()
        loss.backward()
        found += [loss.detach(), *results(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *results(model), torch.rand(1)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    """Asserts that tensors are equal bit for bit."""
    same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    assert all(same), f"{what}: {same.count(False)} of {len(same)} tensors differ, the first is number {same.index(False)}"
    assert all(tensor.isfinite().all() for tensor in found)
