"""Steps on fake tensors, which take no memory."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ckpt_hooks._operators.temporaries import temporary_of

from .restoring import dry_mode, trainers_of


@contextlib.contextmanager
def dry(model: Module) -> Iterator[None]:
    """Has steps of a model run on fake tensors in a block; what is on the meta device is on the default device there."""
    from ckpt_hooks._torch.dry import DryMode  # with a part of torch's compiler: a second for who asks

    mode = DryMode(temporary_of)
    undo = [mode.end]
    token = dry_mode.set(mode)
    try:
        _exchange(model, mode.like, undo)
        yield
    finally:
        dry_mode.reset(token)
        for one in reversed(undo):
            one()


def _exchange(model: Module, like: Callable[[torch.Tensor], Any], undo: list[Callable[[], Any]]) -> None:
    """Exchanges tensors on the meta device in a model and its optimizers, and appends what puts them back."""
    fakes: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in fakes:
            one = like(tensor)
            one = Parameter(one, tensor.requires_grad) if isinstance(tensor, Parameter) else one
            vars(one).update(vars(tensor))
            fakes[id(tensor)] = one
        return fakes[id(tensor)]

    optimizers = [one for one in trainers_of(model) if isinstance(one, Optimizer)]
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            undo.append(_setter(tensors, {**tensors}))
            tensors.update({name: fake(one) for name, one in tensors.items() if one is not None})
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            undo.append(_setter(group, {**group}))
            group["params"] = [*map(fake, group["params"])]
        undo.append(_setter(vars(optimizer), {"state": optimizer.state}))
        state = {fake(key): tree_map_only(torch.Tensor, fake, one) for key, one in optimizer.state.items()}
        optimizer.state = collections.defaultdict(dict, state)


def _setter(values: Any, before: dict[str, Any]) -> Callable[[], object]:
    return lambda: values.update(before)
