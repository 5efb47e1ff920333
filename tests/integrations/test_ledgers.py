"""Ledgers of Transformers models: byte for byte the allocator's, and nothing of a step outside of modules and regions."""

from __future__ import annotations

import contextlib

import pytest
import torch

from ckpt_hooks import memory_ledger
from tests.report.test_ledger import assert_is_the_allocators, assert_nothing_outside, counted

pytest.importorskip("transformers")

from tests.integrations.test_transformers import FAMILIES, FORMS

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

__all__ = ["counted"]


@pytest.mark.parametrize("form", [None, "plain", "recorded", "policy", "recorded policy"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_a_step_of_transformers(name, form, counted):
    model, (batch, *_) = FAMILIES[name].build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with FORMS[form](model) if form else contextlib.nullcontext():
        step()
        found = memory_ledger(step)
    assert_is_the_allocators(found, counted)
    assert_nothing_outside(found)
    assert [phase.name for phase in found.phases if phase.name != "rest"] == ["forward", "backward", "optimizer"]
