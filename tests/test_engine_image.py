"""The fast way through capture and enter gives what the slow one gives, and sees every kind of draw."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks import _ambient, checkpoint
from ckpt_hooks._ambient.streams import CPU
from tests.measure import Log

DRAWS = {
    "one uniform": lambda: torch.rand(1),
    "623": lambda: torch.rand(623),
    "624": lambda: torch.rand(624),
    "625": lambda: torch.rand(625),
    "one normal": lambda: torch.randn(1),
    "two normal": lambda: torch.randn(2),
    "many normal": lambda: torch.randn(64),
    "one normal in double precision": lambda: torch.randn(1, dtype=torch.float64),
    "integers": lambda: torch.randint(10, (3,)),
    "permutation": lambda: torch.randperm(5),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(8)),
    "seed": lambda: torch.manual_seed(7),
}


def leaf(size):
    """Returns a leaf with the same elements each time, for which nothing is drawn."""
    return torch.linspace(-1, 1, size, dtype=torch.float64).requires_grad_()


@pytest.fixture
def slow(monkeypatch):
    """Where no image of the generator is to be had."""
    monkeypatch.setattr(CPU, "look", None)
    monkeypatch.setattr(CPU, "seen", (None, None))
    monkeypatch.setattr(_ambient, "_latest", None)


def test_there_is_an_image_on_this_platform():
    assert CPU.look is not None
    assert CPU.look() == CPU.look()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_draw_is_seen(draw):
    torch.manual_seed(3)
    torch.rand(5)
    image, state = CPU.look(), torch.get_rng_state()
    draw()
    assert image != CPU.look()
    assert not torch.equal(state, torch.get_rng_state())


def test_a_left_over_normal_number_is_seen():
    torch.manual_seed(3)
    torch.randn(1)
    image = CPU.look()
    torch.randn(1)
    assert image != CPU.look()


def test_regions_share_what_they_saw_until_something_moves():
    first, second = (_ambient.capture(preserve_rng_state=True) for _ in range(2))
    assert first is second
    torch.rand(1)
    third = _ambient.capture(preserve_rng_state=True)
    assert third is not first
    assert torch.equal(third.streams[0], torch.get_rng_state())


def test_what_is_not_simple_goes_the_long_way():
    with torch.autocast("cpu"):
        assert not _ambient.capture(preserve_rng_state=True).is_simple
    with torch.device("cpu"):
        assert not _ambient.capture(preserve_rng_state=True).is_simple
    assert not _ambient.capture(preserve_rng_state=False).is_simple
    assert not _ambient.capture(preserve_rng_state=True, generators=[torch.Generator()]).is_simple


def test_a_draw_inside_of_a_recompute_that_found_everything_in_place_leaves_no_trace():
    x, drawn = leaf(3), Log()

    def function(x):
        drawn.append(torch.rand(1).item())
        return x.sin().exp()

    torch.manual_seed(1)
    state = torch.get_rng_state()
    y = checkpoint(function, x).sum()
    torch.set_rng_state(state)  # as forward found it, so that nothing has to be set back
    y.backward()
    assert torch.equal(state, torch.get_rng_state())
    assert drawn[0] == drawn[1]
