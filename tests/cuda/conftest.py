"""Fixtures of tests on a CUDA device."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

import ckpt_hooks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Has pytest's summary say in one line that there is no device, and not in one a test."""
    report = yield
    if report.skipped and not torch.cuda.is_available() and isinstance(report.longrepr, tuple):
        report.longrepr = (__file__, 1, report.longrepr[2])
    return report


@pytest.fixture(autouse=True)
def _device_as_it_was() -> Iterator[None]:
    """No test leaves settings of the device, a stream, or memory behind. ``tests/conftest.py`` seeds the device as well."""
    precision = torch.get_float32_matmul_precision()
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    yield
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == device
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.get_float32_matmul_precision() == precision
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Passes that the self-check compares wait for the device once, and have samples on it."""
    with ckpt_hooks.set_self_check(False):
        yield


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Each synchronisation that torch knows of raises; for the end of a test, as it holds until the test is over."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
