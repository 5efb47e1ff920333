"""Parameters of FSDP2 as memory that its owner frees and fills again: finds the unit that gathers a parameter.

FSDP2 gathers the parameters of a unit before the unit's forward and before its backward, and frees them after each. A replay
of the region also reads parameters of units whose backward has not begun.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ckpt_hooks._core.modes import past_modes
from ckpt_hooks._torch.fsdp import addresses_of, gather, num_units, parameters_by_group, shard_of
from ckpt_hooks._torch.tensors import storage_of


class Unit(NamedTuple):
    """A group of parameters that FSDP2 gathers together, an ``FSDPParamGroup`` of torch."""

    group: Any

    def fill(self) -> Callable[[], None] | None:
        free = past_modes(gather, self.group)
        return None if free is None else lambda: past_modes(free)


# The group and the parameter of each storage, by the storage's address. The references are weak, so that models can be freed.
_by_address: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
# The parameters whose storages are in ``_by_address``.
_indexed: weakref.WeakSet[Any] = weakref.WeakSet()
# Parameters that FSDP2 did not make, by ``id``. FSDP2 shards into new parameters, so these stay foreign: one search is enough.
_foreign: dict[int, weakref.ref[torch.Tensor]] = {}


def unit_of(tensor: torch.Tensor) -> tuple[Unit, torch.Tensor] | None:
    """Returns the unit that gathers a tensor, and the tensor's shard in this process; None for memory not freed by FSDP2."""
    if not num_units() or (address := storage_of(tensor)) is None:
        return None
    origin = _origin_at(address)
    if origin is not None:
        return origin
    whole = tensor._base if tensor._is_view() else tensor
    if type(whole) is not torch.nn.Parameter:
        return None
    key = id(whole)
    foreign = _foreign.get(key)
    if foreign is None or foreign() is not whole:
        _index()
        origin = _origin_at(address)
        if origin is None:
            _foreign[key] = weakref.ref(whole, partial(_foreign.pop, key))
    return origin


def _origin_at(address: int) -> tuple[Unit, torch.Tensor] | None:
    references = _by_address.get(address)
    if references is None:
        return None
    group, parameter = references[0](), references[1]()
    if group is None or parameter is None or address not in addresses_of(parameter):
        del _by_address[address]
        return None
    return Unit(group), shard_of(parameter)


def _index() -> None:
    """Indexes the storages of parameters gathered by FSDP2 since the last call."""
    for group, parameter in parameters_by_group():
        if parameter not in _indexed and (addresses := addresses_of(parameter)):
            _indexed.add(parameter)
            _by_address.update(dict.fromkeys(addresses, (weakref.ref(group), weakref.ref(parameter))))
