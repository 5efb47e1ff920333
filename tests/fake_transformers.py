"""Models with the checkpointing switch of Transformers' models, for tests without that package."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint


class GradientCheckpointingLayer(nn.Module):
    """A layer which calls the function of the switch, as since 4.52."""

    gradient_checkpointing = False

    def __call__(self, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)


class Layer(GradientCheckpointingLayer):
    """A layer with dropout."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return nn.functional.dropout(self.linear(x).sin() * scale, 0.2, self.training)


class LateLayer(Layer):
    """A layer as since 5.24, which has the function call its forward, inside of its own call."""

    __call__ = nn.Module.__call__

    def forward(self, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(functools.partial(Layer.forward, self, **kwargs), *args)
        return Layer.forward(self, *args, **kwargs)


class PlainLayer(nn.Module):
    """A layer of a stack which calls the function itself, as before 4.52."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    forward = Layer.forward


class PreTrainedModel(nn.Module):
    """The base of all models."""

    supports_gradient_checkpointing = True

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=torch_checkpoint.checkpoint):
        for module in self.modules():
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = gradient_checkpointing_func
                module.gradient_checkpointing = enable

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        function = functools.partial(torch_checkpoint.checkpoint, **(gradient_checkpointing_kwargs or {"use_reentrant": False}))
        self._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)

    def gradient_checkpointing_disable(self):
        self._set_gradient_checkpointing(enable=False)

    @property
    def is_gradient_checkpointing(self):
        return any(getattr(module, "gradient_checkpointing", False) for module in self.modules())

    def save_pretrained(self):
        """Marks the base of all models."""


class Model(PreTrainedModel):
    """A model as of 5.18."""

    def _set_gradient_checkpointing(
        self, enable=True, gradient_checkpointing_func=torch_checkpoint.checkpoint, every_n_layers=1
    ):
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
        layers = [module for module in self.modules() if isinstance(module, GradientCheckpointingLayer)]
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = enable and index % every_n_layers == 0

    def __init__(self, layers=5, kind=Layer):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, scale=2.0)
        return x


def ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    """The loss of causal models: in float32, of the next word."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits, targets = logits.float().view(-1, vocab_size), shift_labels.reshape(-1)
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(logits, targets, ignore_index=ignore_index)
    return nn.functional.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


class CausalModel(Model):
    """A model with a head of words, and a loss that can be set."""

    def __init__(self, edit=lambda logits: logits):
        super().__init__(2)
        self.lm_head, self.edit = nn.Linear(4, 6, bias=False), edit

    @property
    def loss_function(self):
        return getattr(self, "_loss_function", ForCausalLMLoss)

    @loss_function.setter
    def loss_function(self, value):
        self._loss_function = value

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids, labels=None, **options):
        logits = self.edit(self.lm_head(super().forward(ids)))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **options)
        return loss, logits


class StackModel(Model):
    """A model as of 4.35 to 4.51: the stack of layers has the flag."""

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=torch_checkpoint.checkpoint):
        PreTrainedModel._set_gradient_checkpointing(self, enable, gradient_checkpointing_func)

    def __init__(self, layers=5):
        super().__init__(layers)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(layers))
        self.gradient_checkpointing = False

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(layer.__call__, x, 2.0)
            else:
                x = layer(x, scale=2.0)
        return x


class TorchCaller(StackModel):
    """A model which calls torch's checkpoint, with a switch of before 4.35."""

    def _set_gradient_checkpointing(self, module, value=False):
        raise AssertionError("the switch which takes a function is above")

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            on = self.gradient_checkpointing and self.training
            x = torch_checkpoint.checkpoint(layer, x, 2.0) if on else layer(x, scale=2.0)
        return x


class Unsupported(Model):
    """A model that is said not to have the switch."""

    supports_gradient_checkpointing = False


class NothingToSwitch(StackModel):
    """A model with a flag that nothing heeds."""

    def forward(self, ids):
        return self.embedding(ids)


class OldModel(nn.Module):
    """A model of before 4.35, whose switch takes no function."""

    gradient_checkpointing = False

    def _set_gradient_checkpointing(self, module, value=False):
        module.gradient_checkpointing = value


class OfPeft(nn.Module):
    """A model of PEFT: hands on what the model inside has."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)
