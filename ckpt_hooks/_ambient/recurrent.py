"""Recurrent layers with dropout on a device: forward begins as its recompute will, with newly seeded masks.

cuDNN and MIOpen make the masks of ``torch.nn.LSTM``, ``GRU`` and ``RNN`` from a buffer of the device, which advances from layer
to layer. Torch seeds the buffer from its generator, in the first such layer after the generator's state was set. A recompute
sets the state, and plain forward does not, so the recompute would draw once more than forward, and drop other elements. So a
region with such a layer sets the state to itself as forward begins. Its masks differ from the masks of the program without
regions, and are the same in both runs.

The buffer belongs to the process: where several threads run such layers on one device, a recompute may drop other elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.nn import Module, RNNBase

from .streams import default_generator

__all__ = ["recurrent_layers", "seed_masks_anew"]


def recurrent_layers(modules: Iterable[Module]) -> Sequence[weakref.ref[RNNBase]]:
    """Returns the recurrent layers among modules, with dropout or without."""
    return tuple(weakref.ref(module) for module in modules if isinstance(module, RNNBase))


def seed_masks_anew(layers: Iterable[weakref.ref[RNNBase]]) -> None:
    """Makes the next recurrent layer seed masks again, on each device where such a layer has active dropout."""
    devices = dict.fromkeys(
        parameter.device
        for reference in layers
        if (layer := reference()) is not None and layer.training and layer.dropout
        for parameter in layer.parameters(recurse=False)
    )
    for device in devices:
        if getattr(getattr(torch, device.type, None), "default_generators", None):
            generator = default_generator(device)
            generator.set_state(generator.get_state())
