"""Transformers models under ``torch.compile``, whole and by layer: as eager, with no more graph breaks than with torch."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.integrations.test_transformers import FAMILIES, FORMS, by_torch

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.compile,
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

NAMES = ["llama", "gemma3", "mixtral", "t5", "vit", "swin", "mamba", "bert"]
CASES = [("whole, plain", "layer, recorded"), ("whole, recorded policy", "layer, policy")]
PAIRS = [(name, case) for index, name in enumerate(NAMES) for case in CASES[index % 2]]
PAIRS += [("mixtral", case) for case in CASES[1]]  # the one with graph breaks of its own
SWITCHES = {"torch": by_torch, **FORMS}


def built(name):
    """Returns a model without dropout, and a batch."""
    family = FAMILIES[name]
    options = {key: 0.0 if "drop" in key else value for key, value in family.options.items()}
    if name == "t5":
        options["dropout_rate"] = 0.0
    model, batches = family._replace(options=options).build()
    return model, batches[0]


def step(model, call, batch):
    """Returns the loss and the gradients."""
    loss = call(**batch).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@functools.cache
def eager(name):
    model, batch = built(name)
    return step(model, model, batch)


@functools.cache
def compiled(name, way, form):
    """Returns the loss and the gradients of a compiled step, and the number of graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batch = built(name)
    with SWITCHES[form](model):
        call = model
        if way == "whole":
            call = torch.compile(model, backend="aot_eager")
        else:
            for module in model.modules():
                if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer):
                    module.compile(backend="aot_eager")
        result = step(model, call, batch)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    return result, breaks


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_compiled_as_eager(name, case):
    way, form = case.split(", ")
    found, breaks = compiled(name, way, form)
    torch.testing.assert_close(found, eager(name))
    _, breaks_of_torch = compiled(name, way, "torch")
    assert breaks <= breaks_of_torch
