"""Fixtures of tests on a CUDA device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


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
def no_synchronisation() -> Iterator[None]:
    """Each synchronisation that torch knows of raises; for the end of a test, as it holds until the test is over."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
