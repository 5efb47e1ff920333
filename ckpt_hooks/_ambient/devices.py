"""The accelerators of this build, and the current device and streams: noted in forward, current again for a recompute.

A thread of autograd's engine has its own current device, and on each device it uses the stream of the node that it runs. A
recompute runs on the devices and streams of forward. Forward's streams first wait for the caller's streams, and the caller's
streams wait for forward's streams when the recompute is done. Any other stream waits before it reads a recomputed tensor
(:meth:`Current.hand_out`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ckpt_hooks._core.hooks import undo
from ckpt_hooks._core.modes import past_modes
from ckpt_hooks._torch.modes import cuda_device, cuda_stream_data, private_backend_name
from ckpt_hooks._torch.tensors import parts_of

R = TypeVar("R")

# Modules of torch which may have generators of devices. A backend outside of torch adds a module, maybe after this import.
_DEVICE_TYPES = ["cuda", "xpu", "mtia", "mps", "hpu"]
_modules: list[tuple[Callable[[], bool], Any]] = []
_modules_known_for = -1

#: A backend that registers adds its module to torch, so a changed number of names shows a new backend. Counting the names costs
#: less than asking for the backend's name.
TORCH_NAMES = vars(torch)
#: The number of torch's names if this build has no accelerator, not even an uninitialised one; -1 if it has any.
names_without_devices = -1


def find_devices() -> list[Any]:
    """Returns for each accelerator of this build a function to ask whether it is initialised, and its module."""
    global _modules_known_for, names_without_devices
    if len(TORCH_NAMES) == _modules_known_for:
        return _modules
    _modules.clear()
    for device_type in (*_DEVICE_TYPES, private_backend_name()):
        module = getattr(torch, device_type, None)
        if not hasattr(module, "get_rng_state") or not getattr(module, "_is_compiled", lambda: True)():
            continue
        if device_type != "mps":
            is_initialized = getattr(module, "is_initialized", lambda module=module: getattr(module, "_initialized", False))
            _modules.append((is_initialized, module))
        elif torch.backends.mps.is_built():
            _modules.append((torch.backends.mps.is_available, module))
    _modules_known_for = len(TORCH_NAMES)
    names_without_devices = -1 if _modules else _modules_known_for
    return _modules


def devices_of(module: Any) -> Any:
    """Returns the default generators of a backend's devices, or the number of devices if they have no such generators."""
    generators = getattr(module, "default_generators", None)
    return generators or (module.device_count() if hasattr(module, "device_count") else 1)


def is_capturing(device_type: str) -> bool:
    """Whether a CUDA graph is being captured on the current stream of a device type, when no state can be read."""
    return bool(getattr(getattr(torch, device_type, None), "is_current_stream_capturing", bool)())


def mark_used(tensor: torch.Tensor, stream: Any) -> None:
    """Keeps a tensor's memory from reuse until a stream has done the work queued before the tensor is freed."""
    parts = past_modes(parts_of, tensor)
    if parts is None:
        past_modes(tensor.record_stream, stream)
    for part in parts or ():
        if isinstance(part, torch.Tensor):
            mark_used(part, stream)


class _Accelerator:
    __slots__ = ("_indices", "index", "module", "stream")

    def __init__(self, module: Any, devices: Any) -> None:
        self.module, self._indices = module, range(devices if isinstance(devices, int) else len(devices))
        index, stream = getattr(module, "current_device", None), getattr(module, "current_stream", None)
        if module is torch.cuda and cuda_device is not None:
            index, stream = cuda_device, cuda_stream_data
        self.index: Callable[[], int] | None = index if len(self._indices) > 1 and hasattr(module, "set_device") else None
        self.stream: Any = stream if hasattr(module, "set_stream") else None

    def read(self) -> _AcceleratorState:
        streams_now = () if self.stream is None else tuple(map(self.stream, self._indices))
        return self, None if self.index is None else self.index(), streams_now

    def stream_of(self, told: Any) -> Any:
        if type(told) is tuple:
            return torch.cuda.Stream(stream_id=told[0], device_index=told[1], device_type=told[2])  # type: ignore[no-untyped-call]
        return told

    def move(self, index: int | None, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        """Makes a device and streams current; a new stream waits for the stream that it replaces."""
        for old, new in zip(before, after, strict=True):
            if old != new:
                stream = self.stream_of(new)
                stream.wait_stream(self.stream_of(old))
                self.module.set_stream(stream)  # also makes the stream's device current, so the device is set last
        if index is not None and self.index is not None and self.index() != index:
            self.module.set_device(index)


#: An accelerator, its current device and the handle of the current stream of each device.
_AcceleratorState = tuple[_Accelerator, "int | None", tuple[Any, ...]]

_accelerator = functools.cache(_Accelerator)


@dataclass
class Current:
    """The current device and streams of each accelerator in use; equal for equal devices and streams."""

    _states: list[_AcceleratorState]
    _by_device: dict[torch.device, tuple[_Accelerator, Any] | None] = field(default_factory=dict, compare=False)

    def enter(self) -> Current | None:
        """Makes this state current on this thread, after the present streams' work; returns the present state."""
        before = capture()
        if before is not None and before != self:
            try:
                before.move(self)
            except BaseException:
                self.leave(before)
                raise
        return before

    def leave(self, before: Current | None) -> None:
        """Makes the state returned by :meth:`enter` current again, after the work of this state's and of present streams."""
        if before is None:
            return
        current = capture()
        if current is not None and current != self:  # the function changed devices or streams, and did not change them back
            current.move(before)
        if before != self:
            self.move(before)

    def move(self, other: Current, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Makes another state current; its streams wait for differing streams of this state, and will read ``tensors``."""
        states = {id(state[0]): state for state in self._states}
        for accelerator, index, after in other._states:
            before = states[id(accelerator)][2] if id(accelerator) in states else after
            accelerator.move(index, before, after)
            for tensor in tensors if before != after else ():
                reader, told = other.accelerator_of(tensor.device) or (None, None)
                if reader is not None:
                    mark_used(tensor, reader.stream_of(told))

    def accelerator_of(self, device: torch.device) -> tuple[_Accelerator, Any] | None:
        """Returns the accelerator of a device, and the handle of its current stream; None for a device without streams."""
        if device not in self._by_device:
            module = getattr(torch, device.type, None)
            matching = [
                (reader, told[device.index or 0]) for reader, _, told in self._states if reader.module is module and told
            ]
            self._by_device[device] = matching[0] if matching else None
        return self._by_device[device]

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Makes the current stream of a value's device wait for the value, if it was made on another stream."""
        accelerator, made = self.accelerator_of(tensor.device) or (None, None)
        if accelerator is not None and (current := accelerator.stream(tensor.device.index or 0)) != made:
            stream = accelerator.stream_of(current)
            stream.wait_stream(accelerator.stream_of(made))
            mark_used(tensor, stream)

    def checking(self, check: Callable[[], bool]) -> Callable[[], bool]:
        """Returns a function which says whether this state is still current and ``check`` passes."""
        # Each operator of a recorded region calls the function, so the function reads only settings that the backend has.
        asked: list[tuple[Callable[..., Any], tuple[int, ...], Any]] = []
        for accelerator, index, told in self._states:
            if accelerator.index is not None:
                asked.append((accelerator.index, (), index))
            if accelerator.stream is not None:
                asked += [(accelerator.stream, (device,), stream) for device, stream in enumerate(told)]
        if len(asked) == 1:
            ((read, args, expected),) = asked
            return lambda: check() and read(*args) == expected
        return lambda: check() and all(read(*args) == expected for read, args, expected in asked)


def run_on(current: Current | None, function: Callable[..., R], *args: Any) -> R:
    """Calls a function on the devices and streams of ``current``; if None, on the current ones of this thread."""
    if current is None:
        return function(*args)
    before = current.enter()
    try:
        return function(*args)
    finally:
        undo(current.leave, before)


_latest: Current | None = None


def capture() -> Current | None:
    """Returns this thread's devices and streams, the same object while unchanged; None if no accelerator is in use."""
    global _latest
    if len(TORCH_NAMES) == names_without_devices:
        return None
    used = [_accelerator(module, devices_of(module)) for initialised, module in find_devices() if initialised()]
    states = [accelerator.read() for accelerator in used if accelerator.index is not None or accelerator.stream is not None]
    latest = _latest
    if not states:
        return None
    if latest is None or states != latest._states:
        latest = _latest = Current(states)
    return latest
