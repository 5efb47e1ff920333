"""Running a step and leaving everything as it was: tensors, gradients, optimizers, attributes, random streams."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ckpt_hooks.device_states import get_device_states, set_device_states

__all__ = ["as_before"]

_CONTAINERS = (list, dict, set)


@contextlib.contextmanager
def as_before(model: Module) -> Iterator[None]:
    """Restores a model at the end of a block, an exception included.

    Restored are the contents of parameters and buffers, gradients, the attributes of all modules (with the entries of lists,
    dicts and sets there, such as hooks), the state of optimizers which have a parameter of the model, and random streams.
    Optimizer state that was made in the block is removed.

    Copies lie on the host: as much as the model's parameters, buffers, gradients and optimizer states take.

    Args:
        model: The model.
    """
    tensors = [_Copy(tensor) for tensor in {id(one): one for one in (*model.parameters(), *model.buffers())}.values()]
    gradients = [(one, one.grad, None if one.grad is None else _Copy(one.grad)) for one in model.parameters()]
    attributes = [(vars(module), _shallow(vars(module))) for module in model.modules()]
    optimizers = [_OptimizerState(optimizer) for optimizer in _optimizers_of(model)]
    streams = _Streams(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for own, noted in attributes:
                _put_back(own, noted)
            for copy in tensors:
                copy.put_back()
            for parameter, gradient, copied in gradients:
                parameter.grad = gradient
                if copied is not None:
                    copied.put_back()
            for state in optimizers:
                state.put_back()
        streams.put_back()


class _Copy:
    """The content of a tensor, on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._data = tensor, tensor.detach().to("cpu", copy=True)

    def put_back(self) -> None:
        """Writes the content to the tensor, unless it is there."""
        self._tensor.detach().copy_(self._data)


def _shallow(own: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns each value of a dict, with a copy of its entries if it is a plain container."""
    return {name: (value, value.copy() if isinstance(value, _CONTAINERS) else None) for name, value in own.items()}


def _put_back(own: dict[str, Any], noted: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in own if name not in noted]:
        del own[name]
    for name, (value, entries) in noted.items():
        if own.get(name, own) is not value:
            own[name] = value
        if entries is not None and not _is_same(value, entries):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(entries)


def _is_same(value: Any, entries: Any) -> bool:
    if len(value) != len(entries):
        return False
    if isinstance(value, set):
        return {*map(id, value)} == {*map(id, entries)}
    if isinstance(value, dict):
        return all(key == other and value[key] is entries[other] for key, other in zip(value, entries, strict=True))
    return all(one is other for one, other in zip(value, entries, strict=True))


def _optimizers_of(model: Module) -> list[Optimizer]:
    """Returns the optimizers in the process which have a parameter of a model."""
    own = {id(parameter) for parameter in model.parameters()}
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), Optimizer) and any(
            id(parameter) in own for group in getattr(one, "param_groups", ()) for parameter in group["params"]
        ):
            found.append(one)
    return found


class _OptimizerState:
    """The state of an optimizer: tensors by content, other values as they are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        self._copies = [
            _Copy(value) for state in self._state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]
        self._copies += [_Copy(value) for group in self._groups for value in group.values() if isinstance(value, torch.Tensor)]

    def put_back(self) -> None:
        """Restores the state."""
        for group, noted in zip(self._optimizer.param_groups, self._groups, strict=False):
            group.clear()
            group.update(noted)
        self._optimizer.state.clear()
        self._optimizer.state.update({parameter: dict(state) for parameter, state in self._state.items()})
        for copy in self._copies:
            copy.put_back()


class _Streams:
    """Random streams: of the host, of the devices of a model, of Python, and of NumPy if it is there."""

    def __init__(self, model: Module) -> None:
        self._host = torch.get_rng_state()
        devices = [one for one in (*model.parameters(), *model.buffers()) if one.device.type not in ("cpu", "meta")]
        self._device_type = devices[0].device.type if devices else None
        self._devices = get_device_states(*devices) if devices else ([], [])
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def put_back(self) -> None:
        """Restores the streams."""
        torch.set_rng_state(self._host)
        if self._device_type is not None:
            set_device_states(*self._devices, device_type=self._device_type)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
