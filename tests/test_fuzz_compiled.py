"""Random programs under ``torch.compile`` (``tests/fuzz/compiled.py``)."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.compiled import check, shrunk
from tests.fuzz.compiled_programs import generate

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

pytestmark = [
    pytest.mark.compile,
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(BEFORE_2_13, reason="before 2.13 Dynamo does not trace how options of regions are made"),
]


@pytest.mark.parametrize("seed", range(6))
def test_compiled_programs_are_what_they_are_without_regions(seed):
    verdict = check(generate(seed))
    assert verdict.kind in ("same", "as the compiler", "drawn otherwise", "both raise"), (
        f"{verdict.explanation}\n{shrunk(generate(seed)).source(True)}"
    )


def test_a_seed_makes_one_program():
    """Whatever ran before it."""
    sources = [generate(seed).source(True) for seed in range(20)]
    torch.manual_seed(7)
    assert [generate(seed).source(True) for seed in reversed(range(20))] == sources[::-1]
