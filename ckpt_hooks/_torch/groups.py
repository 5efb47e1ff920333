"""Process groups: the store that connects processes beside their collectives, and an end to collectives that wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

# The store of the default group, which has no public getter.
default_store: Callable[[], Any] = c10d._get_default_store


def store_in(prefix: str, store: Any) -> Any:
    return c10d.PrefixStore(prefix, store)


def patience_of(group: Any) -> float:
    # The timeout has a public setter, and no public getter.
    patience: timedelta = c10d.default_pg_timeout
    for device in group._device_types:
        # A backend may have no options, as under TORCH_DISTRIBUTED_DEBUG=DETAIL.
        with contextlib.suppress(AttributeError, RuntimeError):
            patience = group._get_backend(device).options._timeout
    return patience.total_seconds()


def close_groups() -> None:
    """Ends all collectives of this process that wait, with an error; the groups are of no use afterwards."""
    for group in [group for group in c10d._world.pg_map if isinstance(group, c10d.ProcessGroup) and group.size() > 1]:
        # gloo has no ``abort`` (https://github.com/pytorch/pytorch/issues/130345). A receive that times out closes the
        # connections of a group, which ends every collective that waits on them.
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), 0).wait(timedelta(milliseconds=1))
        with contextlib.suppress(RuntimeError):
            group.abort()
