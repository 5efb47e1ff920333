"""Models whose parameters a framework shards: a region around a unit of it, hooks included, as Transformers makes them."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import ckpt_hooks
from ckpt_hooks import checkpoint, policies
from tests.measure import Log, Watch

if not torch.distributed.is_available():
    pytest.skip("this torch has no process groups", allow_module_level=True)


from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

pytestmark = pytest.mark.distributed


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def sharded(block, mesh):
    return fully_shard(block, mesh=mesh)


def sharded_twice(block, mesh):
    fully_shard(block[1], mesh=mesh)
    return fully_shard(block, mesh=mesh)


def flat(block, mesh):
    return FullyShardedDataParallel(block, use_orig_params=False, device_id=torch.device("cpu"))


def flat_with_original_parameters(block, mesh):
    return FullyShardedDataParallel(block, use_orig_params=True, device_id=torch.device("cpu"))


def nested(block, x):
    return checkpoint(lambda x: checkpoint(block, x) * 1, x)


REGIONS = {
    "plain": checkpoint,
    "values": lambda block, x: checkpoint(determinism_check="values")(block)(x),
    "debug": lambda block, x: checkpoint(block, x, debug=True),
    "list": lambda block, x: checkpoint(policy=[torch.ops.aten.addmm.default])(block)(x),
    "policy": lambda block, x: checkpoint(policy=policies.dots_saveable)(block)(x),
    "nested": nested,
}


def losses(region, shard, mesh):
    torch.manual_seed(0)
    block = shard(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()), mesh)
    optimizer = torch.optim.AdamW(block.parameters(), 0.01)
    found = []
    for _ in range(4):
        loss = region(block, torch.randn(3, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", [sharded, sharded_twice, flat, flat_with_original_parameters])
@pytest.mark.parametrize("region", list(REGIONS))
def test_a_region_around_a_unit(one_rank, shard, region):
    """Modules hold shards when forward begins and whole parameters in the rerun; what gathers them runs in forward alone."""
    expected = losses(lambda block, x: block(x), shard, one_rank)
    assert losses(REGIONS[region], shard, one_rank) == expected


#: To go where operators that only one of two runs has are passed over.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 1e-4}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str
)
@pytest.mark.parametrize(
    "region",
    [
        "plain",
        "values",
        "debug",
        "list",
        "policy",
        "nested",
        "recorded",
        "recorded, with a policy",
    ],
)
def test_a_region_around_a_replica(one_rank, options, region):
    """Its second forward makes the buckets anew by which gradients are reduced; a recompute finds them made."""

    def replica(block, mesh):
        return nn.parallel.DistributedDataParallel(block, **options)

    recorded = {
        "recorded": lambda block, x: ckpt_hooks.checkpoint_region()(block)(x),
        "recorded, with a policy": lambda block, x: ckpt_hooks.checkpoint_region(policy=policies.dots_saveable)(block)(x),
    }
    expected = losses(lambda block, x: block(x), replica, one_rank)
    assert losses({**REGIONS, **recorded}[region], replica, one_rank) == expected


def test_values_of_distributed_tensors(one_rank):
    """Fingerprints are those of the shard that is here."""
    from torch.distributed.tensor import DTensor, Shard

    x, w = (DTensor.from_local(torch.randn(2, 2), one_rank, [Shard(0)], run_check=False).requires_grad_() for _ in range(2))
    factor = Log([1.0])
    region = checkpoint(determinism_check="values")(lambda x: ((x @ w) * factor[0]).sin().exp())
    region(x).sum().backward()
    y = region(x)
    factor[0] += 1
    with pytest.raises(ckpt_hooks.DeterminismError, match="Recomputed values differ"):
        y.sum().backward()


def wrapped(block, mesh):
    """As Accelerate does, which gives up the random numbers."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return fully_shard(checkpoint_wrapper(block, preserve_rng_state=False), mesh=mesh)


def composed(block, mesh):
    from torch.distributed._composable import checkpoint as composable_checkpoint

    return fully_shard(composable_checkpoint(block, preserve_rng_state=False), mesh=mesh)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", [wrapped, composed])
def test_torchs_regions_around_a_unit_run_here(one_rank, shard):
    class Count(Watch):
        entries = recomputes = 0

        def entered(self, region):
            self.entries += 1

        def recomputing(self, region, *, in_order):
            self.recomputes += 1

    def call(block, x):
        return block(x)

    count = Count()
    expected = losses(call, sharded, one_rank)
    with count, ckpt_hooks.patch_torch(preserve_rng_state=True):
        assert losses(call, shard, one_rank) == expected
    assert (count.entries, count.recomputes) == (4, 4)
    assert losses(call, shard, one_rank) != expected  # with torch's engine
