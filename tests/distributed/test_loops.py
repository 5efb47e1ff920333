"""``checkpoint_loop`` in a replica and in a unit: steps that call the same modules, again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no process groups", allow_module_level=True)

pytest.importorskip("torch.distributed.fsdp")

from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt_hooks import checkpoint_loop
from tests.distributed.training import Model, assert_equal, trained
from tests.test_loop import plain_loop


class Looped(Model):
    """Calls its three blocks in a circle, for five steps."""

    def __init__(self, loop: Callable[..., Any]) -> None:
        super().__init__()
        self.loop = loop

    def through(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Returns the result of some blocks."""
        return self.loop(lambda state: (self.blocks[state[1] % 3](state[0]), state[1] + 1), (x, start), 5, 2)[0]


def as_plain(wrap: Callable[[Model], Any]) -> None:
    found = []
    for loop in plain_loop, checkpoint_loop:
        torch.manual_seed(0)
        found.append(trained(wrap(Looped(loop))))
    assert_equal(found[1], found[0], "loop")


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_loops(ranks, wrap):
    ranks.run(as_plain, wrap)
