"""Random programs about memory (``tests/fuzz/aliasing.py``), and whether they find what they should."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ckpt_hooks import checkpoint_region
from tests.fuzz.aliasing import check, recorded, script, shrunk
from tests.fuzz.aliasing_programs import generate
from tests.fuzz.implementations import IMPLEMENTATIONS, Implementation

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def first_difference(implementation, seeds):
    """Returns the first program that differs, or None."""
    return next((program for program in map(generate, seeds) if check(program, implementation).kind == "differs"), None)


@pytest.mark.parametrize("name", ["ours-region", "ours-mixed"])
def test_memory_is_what_it_is_without_regions(name):
    """150 programs; on a difference the failure is a script that shows it."""
    implementation = IMPLEMENTATIONS[name]
    found = first_difference(implementation, range(150))
    assert found is None, script(shrunk(found, implementation), implementation)


def test_most_programs_are_valid():
    """Few of them raise under plain autograd, and all do the same twice."""
    kinds = Counter(check(generate(seed), IMPLEMENTATIONS["plain"]).kind for seed in range(150))
    assert set(kinds) <= {"same", "both raise"}
    assert kinds["both raise"] < 0.15 * 150


def test_a_seed_makes_one_program():
    """Whatever ran before it."""
    sources = [generate(seed).source() for seed in range(20)]
    torch.manual_seed(7)
    assert [generate(seed).source() for seed in reversed(range(20))] == sources[::-1]


def test_reruns_are_found():
    """A function that writes to what is around it does so again when it is run again."""
    found = first_difference(IMPLEMENTATIONS["torch"], range(20))
    assert found is not None
    assert "record(" in found.source()


def test_a_difference_shrinks_to_a_script():
    """A short one that fails when it is run."""

    def noisy(function):
        with checkpoint_region():
            torch.rand(())
            return function()

    source = "import ckpt_hooks\n\n\ndef run(function):\n    torch.rand(())\n    return function()"
    implementation = Implementation("noisy", lambda: noisy, source)
    found = first_difference(implementation, range(20))
    smaller = shrunk(found, implementation)
    assert len(smaller.source().splitlines()) < 12
    assert recorded(noisy) is noisy
    with pytest.raises(AssertionError):
        exec(compile(script(smaller, implementation), "<script>", "exec"), {})
