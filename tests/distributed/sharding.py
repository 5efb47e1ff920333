"""Ways to shard a model by FSDP2, and a count of its gathers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.distributed.training import WIDTH, Model

__all__ = ["OF_FOUR", "SHARDINGS", "Gathers", "counted", "mesh_of", "units"]


def mesh_of(*shape: int) -> Any:
    """Returns the mesh of all processes; with two sizes, of groups of replicas by shards."""
    sizes = shape or (torch.distributed.get_world_size(),)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[2 - len(sizes) :])


def units(model: Model, **options: Any) -> None:
    """Makes each block a unit, and the model."""
    mesh = options.pop("mesh", None) or mesh_of()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def units_alone(model: Model) -> None:
    """Makes each block a unit; the layers around have whole parameters."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of())


def nested_units(model: Model) -> None:
    """Makes units of parts of blocks, of blocks, and of the model, all resharded."""
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh_of())
        fully_shard(block, mesh=mesh_of())
    fully_shard(model, mesh=mesh_of(), reshard_after_forward=True)


def of_two_blocks(model: Model) -> None:
    """Makes one unit of two blocks."""
    fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh_of())
    fully_shard(model, mesh=mesh_of())


def prefetched(model: Model) -> None:
    """Names the units to gather ahead."""
    units(model)
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([first])


def not_in_backward(model: Model) -> None:
    """Has a first layer whose parameters FSDP does not gather for backward."""
    fully_shard(model.first, mesh=mesh_of())
    model.first.set_unshard_in_backward(False)
    units(model)


def in_bfloat16(model: Model) -> None:
    """Gathers parameters in another dtype than that of the shards, and reduces gradients in the latter."""
    for block in model.blocks:
        block.norm = torch.nn.LayerNorm(WIDTH)
    units(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def frozen(model: Model) -> None:
    """Has units of which some parameters, or all, are not trained."""
    model.first.requires_grad_(False)
    model.blocks[0].up.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    units(model)


SHARDINGS: dict[str, Callable[[Model], None]] = {
    "units": units,
    "units alone": units_alone,
    "nested": nested_units,
    "one unit of two blocks": of_two_blocks,
    "all resharded": lambda model: units(model, reshard_after_forward=True),
    "none resharded": lambda model: units(model, reshard_after_forward=False),
    "bfloat16": in_bfloat16,
    "prefetched": prefetched,
    "not in backward": not_in_backward,
    "frozen": frozen,
    "on the host": lambda model: units(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "1 x 2": lambda model: units(model, mesh=mesh_of(1, 2)),
    "2 x 1": lambda model: units(model, mesh=mesh_of(2, 1)),
}

#: Ways for four processes: groups of replicas by shards, and parameters that stay in halves after forward.
OF_FOUR: dict[str, Callable[[Model], None]] = {
    "2 x 2": lambda model: units(model, mesh=mesh_of(2, 2)),
    "halves after forward": lambda model: units(model, reshard_after_forward=2),
}


class Gathers:
    """What FSDP2 does with whole parameters.

    Attributes:
        events: The units gathered (``+``) and freed (``-``), by name.
        whole: The units whose parameters are whole.
        most: The largest number of those.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.whole: set[str] = set()
        self.most = 0

    def gathered(self, name: str) -> None:
        """Notes a unit gathered."""
        name = name.removeprefix("blocks.")
        self.events.append(f"+{name}")
        self.whole.add(name)
        self.most = max(self.most, len(self.whole))

    def freed(self, name: str) -> None:
        """Notes a unit freed."""
        name = name.removeprefix("blocks.")
        self.events.append(f"-{name}")
        self.whole.discard(name)


@contextlib.contextmanager
def counted() -> Iterator[Gathers]:
    """Counts gathers, meanwhile."""
    found = Gathers()
    gather, free, free_in_part = (
        FSDPParamGroup._to_unsharded,
        FSDPParamGroup._to_sharded,
        FSDPParamGroup._to_sharded_post_forward,
    )

    def gathered(group: Any) -> None:
        gather(group)
        found.gathered(group._module_fqn)

    def freed(group: Any) -> None:
        if group.is_unsharded:
            found.freed(group._module_fqn)
        free(group)

    def freed_in_part(group: Any) -> None:
        if group.is_unsharded:
            found.freed(group._module_fqn)
        free_in_part(group)

    with (
        mock.patch.object(FSDPParamGroup, "_to_unsharded", gathered),
        mock.patch.object(FSDPParamGroup, "_to_sharded", freed),
        mock.patch.object(FSDPParamGroup, "_to_sharded_post_forward", freed_in_part),
    ):
        yield found
