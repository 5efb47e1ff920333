"""Fake accelerators: modules of torch whose generators are like those of CUDA devices, and count what is asked of them."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckpt_hooks._ambient import devices
from tests.measure import as_library


@as_library
class PhiloxGenerator:
    """A generator whose state is a seed and an offset.

    Attributes:
        calls: How often the state was read (``get``) and set (``set``), and seed and offset were (``look``).
        has_seeded_rnn: Whether recurrent layers go on with the masks that they have; to set the state ends that.
    """

    def __init__(self, seed: int, calls: Counter[str], *, has_offset: bool = True) -> None:
        self.device = torch.device("cpu")
        self.calls = calls
        self._seed, self._offset = seed, 0
        self._has_offset = has_offset
        self.has_seeded_rnn = False

    def get_state(self) -> torch.Tensor:
        self.calls["get"] += 1
        return torch.frombuffer(bytearray(struct.pack("=QQ", self._seed, self._offset)), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        self.calls["set"] += 1
        self._seed, self._offset = struct.unpack("=QQ", bytes(state.tolist()))
        self.has_seeded_rnn = False

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        if not self._has_offset:
            raise RuntimeError("get_offset is not there")
        self.calls["look"] += 1
        return self._offset

    def manual_seed(self, seed: int) -> None:
        self._seed, self._offset, self.has_seeded_rnn = seed, 0, False

    def draw(self, size: int = 8) -> torch.Tensor:
        """Returns random numbers of double precision."""
        own = torch.Generator().manual_seed(self._seed * 1_000_003 + self._offset)
        self._offset += 4
        return torch.rand(size, generator=own, dtype=torch.float64)


class OnDevice(torch.Tensor):
    """A tensor that says that it is on some device, and has no data."""

    @staticmethod
    def __new__(cls, device: str | torch.device) -> OnDevice:
        return torch.Tensor._make_wrapper_subclass(cls, (2,), device=torch.device(device))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> OnDevice:
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        return OnDevice(args[0].device)


@as_library
class FakeDevices:
    """A device module as backends register them.

    Attributes:
        calls: What was asked of the generators, and how often a graph was asked about (``capturing``).
        capturing: Whether a graph is being captured.
    """

    def __init__(self, count: int = 1, *, has_offset: bool = True) -> None:
        self.calls: Counter[str] = Counter()
        self.default_generators = tuple(PhiloxGenerator(index + 1, self.calls, has_offset=has_offset) for index in range(count))
        self.capturing = False

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.default_generators)

    def current_device(self) -> int:
        return 0

    def is_current_stream_capturing(self) -> bool:
        self.calls["capturing"] += 1
        return self.capturing

    def get_rng_state(self, device: int = 0) -> torch.Tensor:
        return self.default_generators[device].get_state()

    def set_rng_state(self, state: torch.Tensor, device: int = 0) -> None:
        self.default_generators[device].set_state(state)

    def counted(self) -> dict[str, int]:
        """Returns how often states were read and set, and looked for, since the last time."""
        found = {name: self.calls[name] for name in ("get", "set", "look")}
        self.calls.clear()
        return found


def forget_modules() -> None:
    """Has the package look for device modules anew."""
    devices._modules_known_for = -1


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts a module on torch under a name, in the place of one that the package looks for."""

    def put(name: str, module: Any) -> Any:
        monkeypatch.setattr(torch, name, module, raising=False)
        forget_modules()
        if name not in devices._DEVICE_TYPES:
            monkeypatch.setattr(devices, "_DEVICE_TYPES", [*devices._DEVICE_TYPES, name])
        return module

    yield put
    monkeypatch.undo()  # first, since it would put back for how many names the modules are known, and the fakes with it
    forget_modules()
