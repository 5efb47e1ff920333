"""Private parts of FSDP2 (``torch.distributed.fsdp.fully_shard``): its parameters' memory, gathered and freed unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import _composable_state
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from ckpt_hooks._torch.tensors import storage_of

# ``FSDPModule.unshard`` and ``reshard``, which are public, do not tell whether the parameters were gathered before, nor which
# of two kinds of shards the group had. Remove once torch has a public way to ask for both.


def num_units() -> int:
    """Returns the number of modules given to FSDP2, or to another composable function of torch."""
    return len(_composable_state._module_state_mapping)


def parameters_by_group() -> Iterator[tuple[Any, Any]]:
    for reference in list(_composable_state._module_state_mapping.values()):
        state: Any = reference()
        # Since 2.12 a state has several groups.
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                yield group, parameter


def addresses_of(parameter: Any) -> set[int]:
    """Returns the addresses of the storages that a gather fills for a parameter; none before the first gather."""
    whole = getattr(parameter, "_unsharded_param", None)
    tensors = [
        whole,
        getattr(whole, "_local_tensor", None),
        *getattr(parameter, "all_gather_outputs", ()),
        *getattr(parameter, "_unsharded_inner_tensors", ()),
    ]
    addresses = {storage_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return {address for address in addresses if address}


def shard_of(parameter: Any) -> torch.Tensor:
    """Returns the parameter of this process, to which the optimizer writes."""
    shard: torch.Tensor = parameter.sharded_param
    return shard


def gather(group: Any) -> Callable[[], None] | None:
    """Gathers the parameters of a group; returns a function that frees them, or None if FSDP frees them itself."""
    if group.is_unsharded:
        return None
    state = group._training_state
    # Whether FSDP has begun a prefetch, and will use and free the parameters; after the group's backward it will not.
    is_begun = group._all_gather_result is not None and state != TrainingState.POST_BACKWARD
    between = TrainingState.FORWARD if group.is_sharded_post_forward else TrainingState.IDLE
    with group.use_training_state(TrainingState.IDLE):  # the state in which FSDP skips no step, and uses the current stream
        group.lazy_init()
        group.unshard(async_op=False)
        group.wait_for_unshard()
    if is_begun:
        return None

    def free() -> None:
        if group._training_state == state:  # else FSDP uses the parameters by now
            with group.use_training_state(between):
                group.reshard()

    return free
