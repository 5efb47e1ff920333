"""Collectives inside regions: in place, asynchronous, functional, and in the user's own autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no process groups", allow_module_level=True)

import torch.distributed as dist
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    all_to_all_single_autograd,
    reduce_scatter_tensor_autograd,
)

from tests.distributed.training import FORMS, WIDTH, assert_equal


def group() -> Any:
    return dist.group.WORLD


class Summed(torch.autograd.Function):
    """Adds up over all processes; the gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_async: bool) -> torch.Tensor:
        x = x.clone()
        work = dist.all_reduce(x, async_op=is_async)
        if is_async:
            work.wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Gathered(torch.autograd.Function):
    """Puts rows of all processes together; the gradient is added up and cut."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        out = grad.new_empty(grad.shape[0] // dist.get_world_size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Divides by the largest number of all processes."""
    with torch.no_grad():
        largest = x.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return x / largest


def scaled_later(x: torch.Tensor) -> torch.Tensor:
    """Computes while a collective runs."""
    largest = x.detach().abs().max()
    work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
    h = x.sin().exp()
    work.wait()
    return h / largest


def of_a_list(x: torch.Tensor) -> torch.Tensor:
    """Gathers into tensors of a list."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    return x * torch.stack(parts).mean(0).cos()


def sent_and_received(x: torch.Tensor) -> torch.Tensor:
    """Exchanges with the other process."""
    rank, other = dist.get_rank(), torch.empty_like(x)
    partner = 1 - rank
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x.detach().contiguous(), partner), dist.P2POp(dist.irecv, other, partner)]
    ):
        work.wait()
    return x * other.sin()


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in place": scaled,
    "asynchronous": scaled_later,
    "of a list": of_a_list,
    "sent": sent_and_received,
    "own function": lambda x: Summed.apply(x, False),
    "own function, asynchronous": lambda x: Summed.apply(x, True),
    "own function that gathers": lambda x: Gathered.apply(x).view(2, *x.shape).sum(0),
    "functional": lambda x: x * all_reduce(x.detach().sin(), "sum", group()),
    "functional, gathered": lambda x: x * all_gather_tensor(x.detach(), 0, group()).view(2, *x.shape).sum(0),
    "functional, with gradients": lambda x: reduce_scatter_tensor_autograd(
        all_gather_tensor_autograd(x, 0, group()).sin(), "sum", 0, group()
    ).wait(),
    "functional, exchanged": lambda x: all_to_all_single_autograd(x, None, None, group()).wait().sin(),
}


def every_form(name: str) -> None:
    function = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, w = (torch.rand(4, WIDTH, generator=generator) for _ in range(2))
    found = []
    for form in FORMS:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = FORMS[form](lambda a: (function((a * b).sin()).exp() * b).cos())(a)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), (a, b))])
        assert_equal(found[-1], found[0], form)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_collectives(ranks, name):
    ranks.run(every_form, name)
