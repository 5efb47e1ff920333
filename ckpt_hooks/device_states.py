"""Random state of devices, under the names of ``torch.utils.checkpoint``.

The engine captures every generator, whatever the arguments (:mod:`ckpt_hooks._ambient.random`), and needs none of these
functions. They serve code which manages device state by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ckpt_hooks._torch.pytree import tree_leaves

from ._core.misuse import integer_in, wrong

__all__ = ["DefaultDeviceType", "get_device_states", "set_device_states"]


class DefaultDeviceType:
    """The device type :func:`set_device_states` assumes if none is given.

    Example:
        >>> from ckpt_hooks import DefaultDeviceType
        >>> DefaultDeviceType.set_device_type("cuda")
        >>> DefaultDeviceType.get_device_type()
        'cuda'
    """

    _default_device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        """Sets the default device type of the process.

        Args:
            device: A device type, without an index.

        Raises:
            ValueError: If torch knows no such type.
        """
        DefaultDeviceType._default_device_type = _checked_type(device, "device")

    @staticmethod
    def get_device_type() -> str:
        """Returns the default device type: as set, else the machine's accelerator, else ``"cpu"``."""
        if DefaultDeviceType._default_device_type is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            DefaultDeviceType._default_device_type = "cpu" if accelerator is None else accelerator.type
        return DefaultDeviceType._default_device_type


def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Returns the random states of the accelerators that hold tensors among the arguments.

    Args:
        *args: Anything. Tensors are found in nested lists, tuples and dicts.

    Returns:
        Device indices, an entry for each tensor as in torch, and their states. Tensors of several accelerator types: CUDA's
        count, otherwise those of the first type, since an index does not say its type.
    """
    devices = [
        leaf.device for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta")
    ]
    if not devices:
        return [], []
    device_type = "cuda" if any(device.type == "cuda" for device in devices) else devices[0].type
    module = getattr(torch, device_type)
    indices = [0 if device.index is None else device.index for device in devices if device.type == device_type]
    states = []
    for index in indices:
        with module.device(index):
            states.append(module.get_rng_state())
    return indices, states


def set_device_states(devices: Sequence[int], states: Iterable[torch.Tensor], *, device_type: str | None = None) -> None:
    """Sets the random states of devices.

    Args:
        devices: Device indices.
        states: A state for each index, as :func:`get_device_states` returns them.
        device_type: The type of the devices. None means that of :class:`DefaultDeviceType`.

    Raises:
        TypeError: If ``devices`` or ``states`` has something else in it. No state is set then.
        ValueError: If there is no such device type, or it has no random states.
    """
    kind = DefaultDeviceType.get_device_type() if device_type is None else _checked_type(device_type, "device_type")
    indices, tensors = ([*values] if isinstance(values, Iterable) else [None] for values in (devices, states))
    if None in map(integer_in, indices) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        wanted, advice = "indices of devices, and a state for each", "Pass both as get_device_states gives them."
        raise wrong((devices, states), "devices and states", wanted, advice)
    if kind == "meta" or not indices:
        return
    module: Any = getattr(torch, kind, None)
    if not hasattr(module, "set_rng_state"):
        wanted, advice = "a device type with random states", "Pass device_type=, or use torch.set_rng_state for the CPU."
        raise wrong(kind, "device_type", wanted, advice, ValueError)
    for index, state in zip(indices, tensors, strict=False):
        with module.device(index):
            module.set_rng_state(state)


def _checked_type(device: Any, name: str) -> str:
    try:
        known = torch.device(device).type if isinstance(device, str) else None
    except RuntimeError:
        known = None
    if known is None or known != device:
        raise wrong(device, name, "a device type without an index", "Pass a name for torch.device, such as 'cuda'.", ValueError)
    return known
