"""Functions on slices in models that DDP replicates and FSDP2 shards: as the loop without regions, with as many gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp")

from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt_hooks import apply_checkpointing, checkpoint, checkpoint_chunks, checkpoint_region, enable_in_transformers, policies
from ckpt_hooks.losses import chunked_cross_entropy
from tests import test_losses
from tests.chunked import PROGRAMS, loop
from tests.distributed.sharding import SHARDINGS, counted, mesh_of
from tests.distributed.test_ddp import OPTIONS
from tests.distributed.training import WIDTH, Model, assert_equal, local, trained
from tests.fake_transformers import CausalModel


def in_a_region(function: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    with checkpoint_region():
        return checkpoint_chunks(function, x, **options)


def of_a_policy(function: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return checkpoint_chunks(checkpoint(policy=policies.dots_saveable)(function), x, **options)


def in_a_call(function: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return checkpoint(checkpoint_chunks, function, x, **options)


RUNS = {"loop": loop, "chunks": checkpoint_chunks, "policy": of_a_policy, "region": in_a_region, "call": in_a_call}


def model_of(form: str) -> Model:
    """Returns a model whose blocks, and whose last layer with the loss, work on slices."""
    torch.manual_seed(0)
    model = Model()
    if form == "option":
        apply_checkpointing(model, {"blocks.*": {"chunks": 3}, "last": {"chunks": 2}})
        return model
    run = RUNS[form]
    for block in model.blocks:
        block.forward = lambda x, forward=block.forward: run(forward, x, chunks=3)
    model.last.forward = lambda x, forward=model.last.forward: run(forward, x, chunks=2)
    return model


FORMS = [*RUNS, "option"]


class Runs(torch.nn.Module):
    """A program of tests/chunked.py as a module."""

    def __init__(self, name: str, run: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model, self.call, self.run = PROGRAMS[name].make(), PROGRAMS[name].call, run

    def forward(self, x: torch.Tensor) -> Any:
        """Returns what the program returns."""
        return self.call(self.run, self.model, x)


def programs(kind: str) -> None:
    """Outputs, gradients, and how often hooks of parameters are called."""
    for name in PROGRAMS:
        found = []
        for run in (loop, checkpoint_chunks):
            model: torch.nn.Module = Runs(name, run)
            if kind == "DDP":
                model = DistributedDataParallel(model)
            else:
                fully_shard(model, mesh=mesh_of())
            called: list[torch.Tensor] = []
            for one in model.parameters():
                one.register_post_accumulate_grad_hook(lambda one, called=called: called.append(local(one.grad)))
            torch.manual_seed(2 + torch.distributed.get_rank())
            x = torch.randn(3, 10, 6, requires_grad=True)
            results = model(x)
            results = results if isinstance(results, tuple) else (results,)
            torch.stack([one.square().sum() for one in results]).sum().backward()
            gradients = [local(one.grad) for one in model.parameters()]
            found.append([*map(local, results), x.grad, *gradients, *called, *map(local, model.buffers()), torch.rand(1)])
        assert_equal(found[1], found[0], name)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_programs(ranks, kind):
    ranks.run(programs, kind)


def replicated(options: dict[str, Any]) -> None:
    expected = None
    for form in FORMS:
        model = model_of(form)
        if options.get("find_unused_parameters"):
            model.unused = torch.nn.Linear(WIDTH, WIDTH)
        found = trained(DistributedDataParallel(model, **options), 3)
        expected = expected or found
        assert_equal(found, expected, form)


@pytest.mark.parametrize("options", list(OPTIONS))
def test_in_a_replica(ranks, options):
    ranks.run(replicated, OPTIONS[options])


def sharded(sharding: str) -> list[str]:
    """Returns how often each unit is gathered."""
    expected, gathered = None, []
    for form in FORMS:
        model = model_of(form)
        SHARDINGS[sharding](model)
        with counted() as gathers:
            found = trained(model)
        expected = expected or found
        assert_equal(found, expected, form)
        gathered.append(" ".join(sorted(one for one in gathers.events if one[0] == "+")))
    return gathered


@pytest.mark.parametrize("sharding", [name for name in SHARDINGS if name != "nested"])
def test_in_a_sharded_model(ranks, sharding):
    """The loop stands inside of the units' forward: they are gathered as without it, not for each slice."""
    for found in ranks.run(sharded, sharding):
        assert found == [found[0]] * len(FORMS)


def test_around_units(ranks):
    """Each slice gathers what is in it; a recompute finds it, or gathers it as well."""
    for found in ranks.run(sharded, "nested"):
        assert len(found) == len(FORMS)


def losses(options: dict[str, Any]) -> None:
    """A head whose weight is the embedding's: losses, gradients, and hooks once for both uses."""
    found = []
    for loss in (test_losses.loop, chunked_cross_entropy):
        model = DistributedDataParallel(test_losses.Tied(loss), **options)
        called: list[torch.Tensor] = []
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda one, called=called: called.append(local(one.grad)))
        words = torch.arange(30).view(3, 10).roll(torch.distributed.get_rank())
        for _ in range(2):
            total = model(words)
            total.backward()
            called.append(local(total))
        found.append([*called, *(local(one.grad) for one in model.parameters())])
    assert len(found[0]) == 2 * 4 + 3
    assert_equal(found[1], found[0], "loss")


@pytest.mark.parametrize("options", list(OPTIONS))
def test_a_loss_in_a_replica(ranks, options):
    ranks.run(losses, OPTIONS[options])


def losses_of(kind: str, chunks: int) -> list[torch.Tensor]:
    """Returns the loss of a causal model, logits of its output, and gradients."""
    model = CausalModel(lambda logits: logits * 2.0).eval()
    for layer in model.modules():
        layer.training = not isinstance(layer, type(model.layers[0]))  # whose dropout draws other numbers in each process
    if chunks:
        enable_in_transformers(model, chunked_loss=chunks)
    if kind == "DDP":
        called: torch.nn.Module = DistributedDataParallel(model)
    else:
        if kind == "a unit of the head":
            fully_shard(model.lm_head, mesh=mesh_of())
        called = fully_shard(model, mesh=mesh_of())
    torch.manual_seed(torch.distributed.get_rank())
    ids = torch.randint(6, (2, 9))
    loss, logits = called(ids, labels=ids)
    found = logits[:, -1].detach()
    loss.backward()
    return [loss.detach(), found, *(local(p.grad) for p in model.parameters())]


def in_slices(kind: str) -> None:
    torch.testing.assert_close(losses_of(kind, 3), losses_of(kind, 0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "a unit of the head"])
def test_losses_of_causal_models(ranks, kind):
    """Computed in slices, by the gathered parameters of the head."""
    ranks.run(in_slices, kind)
