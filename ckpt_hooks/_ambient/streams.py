"""Random streams besides the CPU's default stream: of devices, of generators reached by a function, and of tracked sources.

Every initialised device is read whatever the arguments of a region, since nothing tells where a function draws. Reading
initialises no accelerator.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._torch.modes import private_backend_name
from ckpt_hooks._torch.tensors import past_all_modes

__all__ = ["TORCH_NAMES", "Stream", "device_streams", "find_devices", "is_capturing", "is_same_state", "stream_of_generator"]


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two states of one stream are known to be equal; states other than tensors count as different."""
    return one is other or (
        type(one) is type(other) is torch.Tensor
        and one.is_cpu
        and other.is_cpu
        and past_all_modes(one, torch.equal, one, other)
    )


class Stream:
    """A random stream: functions to read and to set its state.

    The state of a CUDA generator is a seed and an offset. To read these two costs a tenth of reading the state, which is a new
    tensor each time. So the stream keeps the latest state with the two numbers, and returns it while they are unchanged.

    Attributes:
        read: Returns the state.
        write: Sets the state.
        restart: Sets a device's default stream to its initial state, where known.
        generator: The generator of the stream, if any.
    """

    __slots__ = ("_look", "_seen", "generator", "read", "restart", "write")

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], object], restart: Callable[[], object] | None = None
    ) -> None:
        self.read = read
        self.write = write
        self.restart = restart
        self.generator: torch.Generator | None = None
        #: Returns seed and offset, if these are the whole state; and the latest of both, with the state.
        self._look: Callable[[], tuple[int, int]] | None = None
        self._seen: tuple[tuple[int, int], Any] | None = None

    def state(self) -> Any:
        """Returns the state, not to be written to: the same object as before, while known to be the same."""
        if self._look is None:
            return self.read()
        look, seen = self._look(), self._seen
        if seen is not None and seen[0] == look:
            return seen[1]
        state = self.read()
        if self._look() == look:  # no other thread has drawn in between
            self._seen = look, state
        return state

    def has_offset(self) -> bool:
        """Whether the state is a seed and an offset."""
        return self._look is not None

    def is_readable(self) -> bool:
        """Whether the state can be read now: not while a CUDA graph is being captured on the generator's device."""
        return self.generator is None or self.generator.device.type == "cpu" or not is_capturing(self.generator.device.type)

    def holds(self, state: Any) -> bool:
        """Whether the stream is known to be in a state."""
        seen = self._seen
        if self._look is not None and seen is not None and seen[1] is state:
            return seen[0] == self._look()
        return is_same_state(self.read(), state)

    def look_for_offset(self, generator: torch.Generator) -> None:
        """Finds out whether a generator's state consists of seed and offset."""

        def look() -> tuple[int, int]:
            return generator.initial_seed(), generator.get_offset()

        try:
            state = generator.get_state()
            if state.nbytes == _SEED_AND_OFFSET.size and bytes(state.tolist()) == _SEED_AND_OFFSET.pack(*look()):
                self._look = look
        except (AttributeError, RuntimeError, struct.error):  # the CPU's generator has no offset
            pass


_SEED_AND_OFFSET = struct.Struct("=QQ")


def is_capturing(device_type: str) -> bool:
    """Whether a CUDA graph is being captured on the current stream of a device type, when no state can be read."""
    capturing = getattr(getattr(torch, device_type, None), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


def stream_of_generator(generator: torch.Generator) -> Stream:
    """Returns the stream of a generator, without a restart: an explicit generator is as made until its first draw."""
    stream = Stream(generator.get_state, generator.set_state)
    stream.generator = generator
    return stream


def _stream_of_default(generator: torch.Generator) -> Stream:
    stream = stream_of_generator(generator)
    stream.restart = lambda: generator.manual_seed(generator.initial_seed())
    stream.look_for_offset(generator)
    return stream


# Modules of torch which may hold an accelerator's state. A backend outside of torch registers as ``privateuseone`` and adds a
# module under a name of its own, maybe after this import.
_DEVICE_TYPES = ["cuda", "xpu", "mtia", "mps", "hpu"]
_modules: list[tuple[Callable[[], bool], Any]] = []
_modules_known_for = -1

#: A registering backend adds its module to torch. To count torch's names costs less than to ask for the backend's name.
TORCH_NAMES = vars(torch)
#: The number of torch's names where this build has no accelerator, initialised or not; -1 where it has one.
names_without_devices = -1


def find_devices() -> list[Any]:
    """Returns this build's accelerators, initialised or not: the same list each time."""
    if len(TORCH_NAMES) != _modules_known_for:
        _find_modules(private_backend_name())
    return _modules


def _find_modules(private_backend: str) -> None:
    global _modules_known_for, names_without_devices
    _modules.clear()
    for device_type in (*_DEVICE_TYPES, private_backend):
        module = getattr(torch, device_type, None)
        if not hasattr(module, "get_rng_state") or _never(module):
            continue
        if device_type == "mps":
            if torch.backends.mps.is_built():
                _modules.append((torch.backends.mps.is_available, module))
        else:
            _modules.append((_initialised_test(module), module))
    _modules_known_for = len(TORCH_NAMES)
    names_without_devices = -1 if _modules else _modules_known_for


def _never(module: Any) -> bool:
    """Whether this build of torch lacks the backend, so that it will not be initialised."""
    compiled: Callable[[], bool] | None = getattr(module, "_is_compiled", None)
    return compiled is not None and not compiled()


def _initialised_test(module: Any) -> Callable[[], bool]:
    test: Callable[[], bool] | None = getattr(module, "is_initialized", None)
    return (lambda: bool(getattr(module, "_initialized", False))) if test is None else test


def device_streams(*, needed: bool) -> list[Stream]:
    """Returns the stream of each initialised device; the same objects each time, while a backend has the same devices.

    Args:
        needed: Whether to raise while a CUDA graph is being captured, when no state can be read. If not, the streams of that
            backend are left out.

    Raises:
        RuntimeError: If a graph is being captured.
    """
    streams: list[Stream] = []
    for initialised, module in _modules:
        if initialised():
            capturing = getattr(module, "is_current_stream_capturing", None)
            if capturing is not None and capturing():
                if not needed:
                    continue
                raise RuntimeError(
                    "a region with preserve_rng_state=True ran while a CUDA graph is being captured, when torch forbids to "
                    "read the state of the device's generator. Pass preserve_rng_state=False to a region that draws no random "
                    "numbers; leave one that does out of the graph."
                )
            streams += _streams_of(module)
    return streams


def _streams_of(module: Any) -> tuple[Stream, ...]:
    # The devices, as the tuple of generators, or their number.
    generators = getattr(module, "default_generators", None)
    return _streams_on(module, generators or (module.device_count() if hasattr(module, "device_count") else 1))


@functools.cache
def _streams_on(module: Any, devices: Any) -> tuple[Stream, ...]:
    if not isinstance(devices, int):
        return tuple(map(_stream_of_default, devices))
    if devices == 1:
        return (Stream(module.get_rng_state, module.set_rng_state, _restart_of(module)),)
    return tuple(
        Stream(
            functools.partial(module.get_rng_state, index),
            functools.partial(_write_device, module, index),
            _restart_of(module, index),
        )
        for index in range(devices)
    )


def _write_device(module: Any, index: int, state: torch.Tensor) -> None:
    module.set_rng_state(state, index)


def _restart_of(module: Any, index: int | None = None) -> Callable[[], object] | None:
    if not hasattr(module, "initial_seed") or not hasattr(module, "manual_seed"):
        return None
    if index is None:
        return lambda: module.manual_seed(module.initial_seed())

    def restart() -> None:
        with module.device(index):
            module.manual_seed(module.initial_seed())

    return restart
