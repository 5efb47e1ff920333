"""Random state of devices, with a backend that exists for these tests alone."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import ckpt_hooks
from tests.devices import OnDevice

APIS = {"ours": ckpt_hooks, "torch": torch.utils.checkpoint}


@pytest.fixture(params=list(APIS))
def api(request: pytest.FixtureRequest) -> Any:
    """The functions of this package and of torch, which have the same names."""
    return APIS[request.param]


class FakeBackend:
    """A device module: some devices, each with a random state, one of them current."""

    def __init__(self, num_devices: int) -> None:
        self.states = [torch.full((2,), 10 * (index + 1), dtype=torch.uint8) for index in range(num_devices)]
        self.current = 0
        self.entered: list[int] = []

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        self.entered.append(index)
        try:
            yield
        finally:
            self.current = before

    def get_rng_state(self) -> torch.Tensor:
        return self.states[self.current].clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.states[self.current] = state.clone()


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """Three devices in the place of ``torch.xpu``."""
    backend = FakeBackend(3)
    monkeypatch.setattr(torch, "xpu", backend)
    return backend


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """Two devices in the place of ``torch.cuda``."""
    backend = FakeBackend(2)
    backend.states = [state + 1 for state in backend.states]
    monkeypatch.setattr(torch, "cuda", backend)
    return backend


@pytest.fixture
def default_device_type(api: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``DefaultDeviceType`` as it is in a new process."""
    monkeypatch.setattr(api.DefaultDeviceType, "_default_device_type", None)
    return api.DefaultDeviceType


def values(states: list[torch.Tensor]) -> list[int]:
    assert all(state.dtype is torch.uint8 and state.shape == (2,) for state in states)
    return [int(state[0]) for state in states]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="nothing"),
        pytest.param((1, "a", None, object()), id="no tensors"),
        pytest.param((torch.ones(2), [torch.ones(2)]), id="CPU"),
        pytest.param((torch.ones(2, device="meta"),), id="meta"),
    ],
)
def test_no_accelerator_no_state(api: Any, arguments: tuple[Any, ...]) -> None:
    devices, states = api.get_device_states(*arguments)
    assert (devices, states) == ([], [])


# Reading


def test_state_of_the_tensors_device(api: Any, xpu: FakeBackend) -> None:
    devices, states = api.get_device_states(OnDevice("xpu:1"))
    assert devices == [1]
    assert values(states) == [20]
    assert xpu.entered == [1]
    assert xpu.current == 0


def test_cuda_counts_where_there_are_several_types(xpu: FakeBackend, cuda: FakeBackend) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        devices, states = ckpt_hooks.get_device_states(OnDevice("xpu:2"), OnDevice("cuda:1"), OnDevice("xpu:0"))
    assert devices == [1]
    assert values(states) == [21]
    assert xpu.entered == []


def test_first_type_counts_where_none_is_cuda(monkeypatch: pytest.MonkeyPatch, xpu: FakeBackend) -> None:
    mtia = FakeBackend(1)
    monkeypatch.setattr(torch, "mtia", mtia)
    devices, states = ckpt_hooks.get_device_states(OnDevice("xpu:2"), OnDevice("mtia:0"))
    assert devices == [2]
    assert values(states) == [30]
    devices, states = ckpt_hooks.get_device_states(OnDevice("mtia"), OnDevice("xpu:2"))
    assert devices == [0]
    assert values(states) == [10]


def test_the_current_device_is_put_back_where_reading_fails(
    api: Any, xpu: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> torch.Tensor:
        raise OSError("no state")

    monkeypatch.setattr(xpu, "get_rng_state", failing)
    with pytest.raises(OSError, match="no state"):
        api.get_device_states(OnDevice("xpu:2"))
    assert xpu.current == 0


# Writing


def test_states_are_written_to_their_devices(api: Any, xpu: FakeBackend) -> None:
    new = [torch.tensor([1, 1], dtype=torch.uint8), torch.tensor([2, 2], dtype=torch.uint8)]
    api.set_device_states([2, 0], new, device_type="xpu")
    assert values(xpu.states) == [2, 20, 1]
    assert xpu.entered == [2, 0]
    assert xpu.current == 0


def test_meta_has_no_state_to_write(api: Any) -> None:
    api.set_device_states([0], [torch.zeros(2, dtype=torch.uint8)], device_type="meta")


# The default device type


def test_default_device_type_is_what_was_set(api: Any, default_device_type: Any) -> None:
    default_device_type.set_device_type("xpu")
    assert default_device_type.get_device_type() == "xpu"
    default_device_type.set_device_type()
    assert default_device_type.get_device_type() == "cuda"


@pytest.mark.parametrize("accelerator", [torch.device("xpu"), None])
def test_default_device_type_is_the_machines(
    default_device_type: Any, accelerator: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless set it is the accelerator that is available, asked once, or else the CPU."""
    asked: list[bool] = []

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        asked.append(check_available)
        return accelerator

    monkeypatch.setattr(torch, "accelerator", types.SimpleNamespace(current_accelerator=current_accelerator))
    expected = "cpu" if accelerator is None else "xpu"
    assert [default_device_type.get_device_type() for _ in range(2)] == [expected, expected]
    assert asked == [True]
