"""Fixtures that every test may use."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import ckpt_hooks
from ckpt_hooks import _options
from ckpt_hooks._checkpoint import region
from ckpt_hooks._core import misuse
from ckpt_hooks._function import words
from ckpt_hooks._recorded import frame as recorded
from ckpt_hooks.policies import base
from tests.fake_device import FakeTransfers, fake_device


def pytest_configure(config: pytest.Config) -> None:
    """Has the plain command do without Triton where there is no GPU.

    Dynamo of torch 2.15 imports Triton, whose bindings print pages about leaks when the process ends
    (https://nanobind.readthedocs.io/en/latest/refleaks.html).
    """
    if "not compile" in config.getoption("markexpr") and not torch.cuda.is_available():
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases that run torch's own implementation: those whose name in brackets has the word ``torch`` for a part.

    Of the cases of one test in which torch is expected to fail the first stays: it says what torch does wrong.

    ``CKPT_HOOKS_ORDER=3`` shuffles files, and tests in each, by a seed.
    """
    shown, others = set(), set()
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and "torch" in call.id.split("-"):
            item.add_marker("parity")
            if item.get_closest_marker("xfail") is not None:
                test = item.nodeid.partition("[")[0]
                others |= {item} if test in shown else set()
                shown.add(test)
    config.hook.pytest_deselected(items=[*others])
    items[:] = [item for item in items if item not in others]
    if seed := os.environ.get("CKPT_HOOKS_ORDER"):
        draw = random.Random(seed)
        items.sort(key=lambda item: item.nodeid)  # parameters of sets come in any order
        draw.shuffle(items)
        place = functools.cache(lambda path: draw.random())
        items.sort(key=lambda item: place(item.path))


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """The collector does not look again through what other modules and imports have left in memory, which takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Each test draws the same numbers whatever ran before it, and leaves no hooks, modes or settings behind.

    A list of operators, a transform and a keyword have warned in no earlier test. A policy inside of a plain region has: many
    tests nest the two, and one is about the warning.
    """
    torch.manual_seed(0)
    random.seed(0)
    base._lists.clear()
    misuse.warn_of_transform.cache_clear()
    _options._warned.clear()
    words.other_threads_draw = False
    recorded._has_warned = True
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._get_graph_exec_group() is None
    assert not torch._C._is_any_autocast_enabled()
    assert torch.is_grad_enabled()
    assert not region._entered.open


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operators gain nothing from several threads, and several test processes lose by them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Switches the garbage collector off: what dies in such a test dies by reference counting alone (Rule 9).

    Tests whose threads draw random numbers at once need that too. ``torch.get_rng_state`` makes a Python object under a lock in
    C++. If the collector runs there and lets another thread go on, and that one wants the lock, neither ever does.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def no_self_check() -> Iterator[None]:
    """Switches the self-check off, whose passes are in a ledger, and depend on the tests before."""
    with ckpt_hooks.set_self_check(False):
        yield


@pytest.fixture
def transfers() -> Iterator[FakeTransfers]:
    """Makes the host a device that offloads, from 1 KiB by policies; see :mod:`tests.fake_device`."""
    with fake_device() as fake:
        yield fake


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "ours": ckpt_hooks.checkpoint,
    "torch": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
}


@pytest.fixture(params=list(IMPLEMENTATIONS))
def impl(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``checkpoint`` of this package and of torch: for what both promise."""
    return IMPLEMENTATIONS[request.param]
