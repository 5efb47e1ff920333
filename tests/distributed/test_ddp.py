"""Regions in a model that DDP replicates, and around it."""

from __future__ import annotations

import contextlib
import json
import pathlib
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks")

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ckpt_hooks import memory_ledger, plan_memory
from ckpt_hooks.planner import Plan
from tests.distributed.training import FEW, FORMS, WIDTH, Model, assert_equal, results, trained

#: Small buckets, so that there are several, which are made anew after the first step.
SMALL = {"bucket_cap_mb": 1e-4}

OPTIONS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "small buckets": SMALL,
    "static graph": {"static_graph": True, **SMALL},
    "views of buckets": {"gradient_as_bucket_view": True, **SMALL},
    "unused parameters": {"find_unused_parameters": True, **SMALL},
    "buffers of each": {"broadcast_buffers": False, **SMALL},
}


def of_the_user(state, bucket):
    """Adds up a bucket in another dtype, and halves the sum when it is there."""
    work = torch.distributed.all_reduce(bucket.buffer().double(), async_op=True)
    return work.get_future().then(lambda future: (future.value()[0] / 2).float())


HOOKS: dict[str, Any] = {
    "all_reduce": default_hooks.allreduce_hook,
    "float16": default_hooks.fp16_compress_hook,
    "of the user": of_the_user,
}


def replicated(form: str, options: dict[str, Any]) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = Model(FORMS[form])
    if options.get("find_unused_parameters"):
        model.unused = torch.nn.Linear(WIDTH, WIDTH)
    return DistributedDataParallel(model, **options)


def as_plain(options: dict[str, Any], forms: Iterable[str], hook: str | None = None) -> None:
    found = []
    for form in ("plain", *forms):
        model = replicated(form, options)
        if hook is not None:
            model.register_comm_hook(None, HOOKS[hook])
        found.append(trained(model, 3))
        assert_equal(found[-1], found[0], form)


@pytest.mark.parametrize("options", list(OPTIONS))
def test_regions_in_a_replica(ranks, options):
    ranks.run(as_plain, OPTIONS[options], tuple(FORMS) if options == "static graph" else FEW)


@pytest.mark.parametrize("hook", list(HOOKS))
def test_hooks_on_buckets(ranks, hook):
    ranks.run(as_plain, SMALL, FEW, hook)


def around(options: dict[str, Any]) -> None:
    expected = trained(replicated("plain", options), 3)
    for form in ("with", "part by part", "kept products", "call", "call with values"):
        model = replicated("plain", options)
        assert_equal(trained(model, 3, FORMS[form](model)), expected, form)


@pytest.mark.parametrize("options", ["one bucket", "views of buckets", "buffers of each"])
def test_regions_around_a_replica(ranks, options):
    ranks.run(around, OPTIONS[options])


def accumulated() -> None:
    """Gradients of three batches are reduced with the last."""
    found = []
    for form in ("plain", *FEW):
        model = replicated(form, SMALL)
        torch.manual_seed(1 + torch.distributed.get_rank())
        for last in (False, False, True, False, True):
            with contextlib.nullcontext() if last else model.no_sync():
                model(torch.randn(6, WIDTH)).pow(2).mean().backward()
        found.append(results(model))
        assert_equal(found[-1], found[0], form)


def test_gradients_accumulated_without_reduction(ranks):
    ranks.run(accumulated)


def planned(path: str) -> None:
    """The first process makes a plan, and writes it to a file; both read it, with steps of a shape that has no plan between."""

    def step_of(rows: int) -> Any:
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        return lambda model: model(x).pow(2).mean().backward()

    rank, file = torch.distributed.get_rank(), pathlib.Path(path)
    model, alone = Model(), torch.distributed.new_group([0])
    if rank == 0:
        plan = plan_memory(model, step_of(512), 0.4, blocks=["blocks.*"], group=alone)
        plan.add(step_of(256))
        file.write_text(json.dumps(plan.to_json()))
    torch.distributed.barrier()
    found = []
    for applies in (False, True):
        replica = replicated("plain", SMALL)
        if applies:
            plan = Plan.from_json(json.loads(file.read_text()))
            assert len(plan.apply(replica)) == 3
            assert any(block.kept is not None for block in plan.blocks), str(plan)
            peak = memory_ledger(lambda: step_of(512)(model)).peak.nbytes
            with plan.apply(model):
                assert memory_ledger(lambda: step_of(512)(model)).peak.nbytes < peak
        torch.manual_seed(1 + rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for rows in (512, 256, 16, 512):
                step_of(rows)(replica)
        found.append(results(replica))
    assert_equal(found[1], found[0], "plan")


def test_the_plan_of_one_process_in_both(ranks, tmp_path):
    ranks.run(planned, str(tmp_path / "plan.json"))
