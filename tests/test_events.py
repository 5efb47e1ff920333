"""What observers are told of saved tensors, from saving to the end of the graph."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks import checkpoint, checkpoint_name, checkpoint_region
from ckpt_hooks.policies import save_only_these_names
from tests.measure import Watch, leaf

pytestmark = pytest.mark.usefixtures("no_gc")


class Told(Watch):
    """Notes events of saved tensors, by position."""

    def __init__(self):
        self.told = []

    def saved(self, region, saved, tensor):
        assert saved.nbytes in (None, tensor.nbytes)
        self.told.append(("saved", saved.position, saved.fate.value, tensor.nbytes))

    def settled(self, region, position, fate):
        self.told.append(("settled", position, fate.value))

    def held(self, region, holdings):
        reasons = (holding.reason.value for holding in holdings)
        self.told.append(("held", *(reason for reason in reasons if reason != "random state")))  # which regions share

    def restored(self, region, position, tensor):
        self.told.append(("restored", position, tensor.nbytes))

    def let_go(self, region, position):
        self.told.append(("let go", position))


def block(x, w):
    h = checkpoint_name((x * w).exp(), "h")
    return (checkpoint_name(h.sin(), "other").tan() * torch.ones(4).double()).cos()


def called(x, w):
    return checkpoint(block, x, w)


def recorded(x, w):
    with checkpoint_region(policy=save_only_these_names("h")):
        return block(x, w)


#: What is told before backward, and the order in which backward gets tensors. What a leaf or the caller has is no handle of a
#: recorded region; the name comes after ``exp`` has saved its result.
TOLD = {
    called: (
        [
            ("saved", 0, "parameter", 32),
            *(("saved", position, "dropped", 32) for position in range(1, 7)),
            ("held", "region input"),
        ],
        [6, 5, 4, 3, 2, 1],
    ),
    recorded: (
        [
            *(("saved", -1, "parameter", 32), ("saved", -2, "region input", 32)),
            *(("saved", 0, "dropped", 32), ("saved", 1, "name", 32)),
            *(("saved", position, "dropped", 32) for position in (2, 3, 4)),
            *(("settled", 0, "name"), ("held", "region input", "name")),
        ],
        [4, 3, 2, 1, 0],
    ),
}


@pytest.mark.parametrize("form", TOLD)
def test_saved_tensors(form):
    x, w, found = leaf(4) * 1, leaf(4), Told()
    with found:
        y = form(x, w).sum()
    forward, positions = TOLD[form]
    assert found.told == forward
    found.told.clear()
    y.backward()
    del y
    assert [one for one in found.told if one[0] == "restored"] == [("restored", position, 32) for position in positions]
    saved = sorted(one[1] for one in forward if one[0] == "saved")
    assert sorted(one[1] for one in found.told if one[0] == "let go") == saved
