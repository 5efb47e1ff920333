"""The processes in which the tests of this folder run."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch

from tests.distributed.ranks import Ranks

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("distributed")


def started(world: int) -> Iterator[Ranks]:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no process groups")
    found = Ranks(world)
    yield found
    found.stop()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes with a process group."""
    yield from started(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes, for meshes of two dimensions."""
    yield from started(4)
