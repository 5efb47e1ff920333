"""Programs that work on slices of a tensor, and the loop that ``checkpoint_chunks`` is to be equal to, bit for bit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ckpt_hooks import checkpoint, checkpoint_region
from tests.fuzz.prelude import Square

__all__ = ["PROGRAMS", "Program", "loop"]

WIDTH = 6


def loop(
    function: Callable[..., Any],
    x: torch.Tensor,
    *args: Any,
    chunks: int = 8,
    dim: int = 0,
    reduce: str | None = None,
    chunked: str | tuple[str, ...] = (),
    **kwargs: Any,
) -> Any:
    """Stands for ``checkpoint_chunks`` without a region; arguments to cut are given by name."""
    size = max(-(-x.shape[dim] // chunks), 1)
    dim = dim % x.dim()
    names = (chunked,) if isinstance(chunked, str) else chunked
    cut = {name: kwargs.pop(name).split(size, dim) for name in names}
    parts = enumerate(x.split(size, dim))
    found = [function(part, *args, **{name: slices[i] for name, slices in cut.items()}, **kwargs) for i, part in parts]
    if reduce == "mean":
        return functools.reduce(operator.add, [one for one, _ in found]) / functools.reduce(
            operator.add, [count for _, count in found]
        )
    if reduce == "sum":
        return functools.reduce(operator.add, found)
    return (
        tuple(torch.cat(one, dim) for one in zip(*found, strict=True)) if isinstance(found[0], tuple) else torch.cat(found, dim)
    )


class Gated(nn.Module):
    """The MLP of Llama."""

    def __init__(self, width: int = WIDTH, inner: int = 2 * WIDTH) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((width, inner),) * 2 + ((inner, width),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns an update of the input."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Program:
    """A program: modules, made anew for each run from one seed, and a function that calls ``run`` on an input of 3 x 10 x 6."""

    def __init__(self, make: Callable[[], Any], call: Callable[[Any, Any, torch.Tensor], Any]) -> None:
        self.make, self.call = make, call


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


def counted(head: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
    loss = F.cross_entropy(head(x).flatten(0, -2), labels.flatten(), ignore_index=-1, reduction="sum")
    return loss, (labels != -1).sum()


def labels_of(x: torch.Tensor) -> torch.Tensor:
    found = torch.arange(x[..., 0].numel()).reshape(x.shape[:-1]) % 5
    found[..., ::3] = -1
    return found


def with_regions(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = checkpoint(model[0], x)
    with checkpoint_region():
        h = model[1](h).sin()
    return model[2](h)


def in_place(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = model(x * 1)
    h[..., 0] *= 2
    return h.tanh_()


PROGRAMS = {
    "mlp": Program(mlp, lambda run, m, x: run(m, x, chunks=4, dim=1)),
    "gated": Program(Gated, lambda run, m, x: run(m, x, chunks=3, dim=-2)),
    "dropout": Program(
        lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.5), nn.ReLU(), nn.Linear(12, WIDTH), nn.Dropout(0.1)),
        lambda run, m, x: run(m, x.flatten(0, 1), chunks=7),
    ),
    "batch norm": Program(
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Tanh()),
        lambda run, m, x: run(m, x.flatten(0, 1), chunks=4),
    ),
    "mean of a loss": Program(
        lambda: nn.Linear(WIDTH, 5),
        lambda run, m, x: run(
            functools.partial(counted, m), x, labels=labels_of(x), chunked="labels", dim=1, chunks=4, reduce="mean"
        ),
    ),
    "sum": Program(mlp, lambda run, m, x: run(lambda x: m(x).square().sum((0, 1)), x, dim=1, chunks=3, reduce="sum")),
    "tuples": Program(mlp, lambda run, m, x: run(lambda x: (m(x), x.sin(), m(x).detach()), x, chunks=2)),
    "queries": Program(
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda run, m, x: run(lambda q, kv: F.softmax(m(q) @ kv.mT, -1) @ kv, x, x.cos(), dim=1, chunks=5),
    ),
    "regions inside": Program(mlp, lambda run, m, x: run(functools.partial(with_regions, m), x, dim=1, chunks=3)),
    "in place": Program(mlp, lambda run, m, x: run(functools.partial(in_place, m), x, dim=1, chunks=3)),
    "custom function": Program(
        mlp, lambda run, m, x: run(lambda x, *, more: Square.apply(m(x)) * more, x, more=x.mean(), dim=1)
    ),
    "one after the other": Program(
        lambda: nn.ModuleList([mlp(), nn.LayerNorm(WIDTH), Gated()]),
        lambda run, m, x: run(m[2], m[1](x + run(m[0], x, dim=1, chunks=2)), dim=1, chunks=8),
    ),
}
