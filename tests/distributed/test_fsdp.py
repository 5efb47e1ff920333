"""Recorded regions and calls around several units of FSDP2, whose parameters are freed between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp")

from tests.distributed.sharding import OF_FOUR, SHARDINGS, counted
from tests.distributed.training import FORMS, WIDTH, Model, assert_equal, trained


def sharded(sharding: str, form: str, extent: str = "blocks") -> Model:
    torch.manual_seed(0)
    model = Model(FORMS[form], extent)
    {**SHARDINGS, **OF_FOUR}[sharding](model)
    return model


def as_plain(sharding: str, extent: str, forms: list[str]) -> None:
    """Every form comes to what the program without regions does, and leaves the same units whole."""
    with counted() as gathers:
        expected = trained(sharded(sharding, "plain", extent))
    whole = set(gathers.whole)
    failures = {}
    for form in forms:
        try:
            with counted() as gathers:
                found = trained(sharded(sharding, form, extent))
            assert_equal(found, expected, form)
            assert gathers.whole == whole
        except Exception as error:  # in all processes alike, so that they go on together
            failures[form] = f"{type(error).__name__}: {error}"
    assert not failures, failures


#: A call is not to have a region inside around units: the operators that gather are not the same in its rerun.
AROUND_UNITS = sorted(FORMS.keys() - {"plain", "region in a call"})


@pytest.mark.parametrize("sharding", list(SHARDINGS))
def test_regions_over_units(ranks, sharding):
    ranks.run(as_plain, sharding, "blocks", AROUND_UNITS)


@pytest.mark.parametrize("extent", ["all", "half"])
@pytest.mark.parametrize("sharding", ["units", "units alone", "nested", "bfloat16", "frozen", "not in backward"])
def test_regions_over_a_unit_and_what_is_around(ranks, sharding, extent):
    ranks.run(as_plain, sharding, extent, ["call", "kept products", "whole", "with"])


@pytest.mark.parametrize("sharding", list(OF_FOUR))
def test_regions_over_units_of_four_processes(four_ranks, sharding):
    four_ranks.run(as_plain, sharding, "blocks", ["call", "kept products", "part by part", "whole"])


def backwards(sharding: str, form: str) -> list[str]:
    """Returns what becomes of each unit in the backward of a second step, and the largest number of whole units, in words."""
    model = sharded(sharding, form)
    trained(model, 1)
    with counted() as gathers:
        loss = model(torch.randn(6, WIDTH)).sum()
        gathers.events.clear()
        loss.backward()
    return [" ".join(gathers.events), f"{gathers.most} at once"]


#: Without regions a block is gathered for its backward, the last layers stay whole since forward.
USUAL = ["+2 -2 +1 -1 +0 -0 -", "2 at once"]
#: The replay meets the last block whole, and the middle one, which FSDP2 gathers ahead; the first it gathers by itself.
REPLAYED = ["+2 +0 -0 +1 -2 -1 +0 -0 -", "3 at once"]
#: A rerun calls the blocks, which stay whole until their backward.
RERUN = ["+2 +0 +1 -2 -1 -0 -", "4 at once"]
#: FSDP2 gathers ahead what is in the last block. The middle one is gathered by the replay, with what is in it.
OF_NESTED = "+ +2 +0 +0.up -0.up -0 +1 +1.up -1.up -1 +2.up -2.up -2 +1 +1.up -1.up -1 +0 +0.up -0.up -0 -"


@pytest.mark.parametrize(
    ("sharding", "form", "expected"),
    [
        ("units", "plain", USUAL),
        ("units", "with", REPLAYED),
        ("units", "whole", REPLAYED),
        ("units", "part by part", REPLAYED),
        ("units", "two regions", REPLAYED),
        ("units", "kept products", USUAL),
        ("units", "call", RERUN),
        ("none resharded", "with", ["-2 -1 -0 -", "4 at once"]),
        ("nested", "with", [OF_NESTED, "4 at once"]),
        ("prefetched", "plain", USUAL),
        ("prefetched", "with", ["+2 +0 +1 -2 -1 -0 -", "4 at once"]),
    ],
)
def test_gathers(ranks, sharding, form, expected):
    """A replay gathers a unit once, unless it is there, and gives it back after the last operator that reads it."""
    for found in ranks.run(backwards, sharding, form):
        assert found == expected
