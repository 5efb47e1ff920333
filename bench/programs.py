"""What is measured: programs made of regions, and the implementations that can run a region.

A program is written once, as a forward that is handed a way to run a region, `region(function, x)`. An implementation
is one such way, except for the floor, which is no checkpointing at all but what any checkpointing has to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from train_charlm import Block

import ckpt_hooks

Region = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def plain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Runs a region without checkpointing."""
    return function(x)


def recorded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Runs a region as a block of code that is recorded, and whose operators are replayed."""
    with ckpt_hooks.checkpoint_region():
        return function(x)


REGIONS: dict[str, Region] = {
    "ours": ckpt_hooks.checkpoint,
    "region": recorded,
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "torch_reentrant": partial(torch_checkpoint, use_reentrant=True),
    "none": plain,
}

IMPLEMENTATIONS = (*REGIONS, "floor")


@dataclass(frozen=True)
class Program:
    """A forward over regions, and the leaves that its backward gives gradients to."""

    forward: Callable[[Region], Tensor]
    leaves: tuple[Tensor, ...]

    def step(self, implementation: str) -> Callable[[], None]:
        """Makes a step of forward and backward; gradients add up in the leaves.

        The floor runs the forward twice, without a graph and with one, then backward: a checkpoint that costs nothing
        of its own and never stops a recompute early would do just that.
        """
        if implementation == "floor":

            def floor() -> None:
                with torch.no_grad():
                    self.forward(plain)
                self.forward(plain).sum().backward()  # type: ignore[no-untyped-call]

            return floor
        return self.step_in(REGIONS[implementation])

    def step_in(self, region: Region) -> Callable[[], None]:
        """Makes a step in which that is the way to run a region."""

        def step() -> None:
            self.forward(region).sum().backward()  # type: ignore[no-untyped-call]

        return step

    def gradients(self, step: Callable[[], None]) -> list[Tensor]:
        """Runs a step of this program and returns the gradients it gives."""
        for leaf in self.leaves:
            leaf.grad = None
        step()
        return [leaf.grad.clone() for leaf in self.leaves if leaf.grad is not None]


def in_a_row(ops: int) -> Callable[[Tensor], Tensor]:
    """Makes a function of so many sines and cosines in turn."""

    def run(x: Tensor) -> Tensor:
        for i in range(ops):
            x = x.cos() if i % 2 else x.sin()
        return x

    return run


def chain(ops: int) -> Program:
    """One region of sines and cosines in turn on a 4 by 4 tensor: all that is measured is what is around the ops."""
    x = torch.randn(4, 4, requires_grad=True)
    run = in_a_row(ops)
    return Program(lambda region: region(run, x), (x,))


def chain_saving_one(ops: int) -> Program:
    """The same of operators of which backward needs no tensor, and one sine that it does need the input of."""
    x = torch.randn(4, 4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        for _ in range(ops):
            x = x.neg()
        return x.sin()

    return Program(lambda region: region(run, x), (x,))


def each_a_region(modules: nn.ModuleList, x: Tensor) -> Program:
    """Modules in a row, each a region."""

    def forward(region: Region) -> Tensor:
        y = x
        for module in modules:
            y = region(module, y)
        return y

    return Program(forward, (x, *modules.parameters()))


def blocks(count: int, width: int, batch: int, context: int) -> Program:
    """Transformer blocks in a row, each a region, dropout off: what users checkpoint."""
    stack = nn.ModuleList(Block(width, heads=4, dropout=0.0) for _ in range(count))
    return each_a_region(stack, torch.randn(batch, context, width, requires_grad=True))


def row_of_regions(count: int) -> Program:
    """Many regions of one op each in one graph: cost a region, and whether it grows with their number."""
    x = torch.randn(4, 4, requires_grad=True)

    def forward(region: Region) -> Tensor:
        y = x
        for _ in range(count):
            y = region(torch.sin, y)
        return y

    return Program(forward, (x,))


def batch_norms(count: int, width: int, batch: int) -> Program:
    """Layers with running statistics, each a region: state of a module that a recompute must find as it was."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(count))
    return each_a_region(layers, torch.randn(batch, width, requires_grad=True))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "one op": partial(chain, 1),
    "chain of 10 ops": partial(chain, 10),
    "chain of 200 ops": partial(chain, 200),
    "block of width 32": partial(blocks, 1, width=32, batch=2, context=16),
    "block of width 256": partial(blocks, 1, width=256, batch=4, context=128),
    "4 blocks of width 256": partial(blocks, 4, width=256, batch=2, context=128),
    "20 layers with BatchNorm": partial(batch_norms, 20, width=32, batch=16),
    "2000 regions in a row": partial(row_of_regions, 2000),
}


@cache
def build(name: str) -> Program:
    """Builds a program of the table, once, with the same elements in every run."""
    torch.manual_seed(0)
    return PROGRAMS[name]()
