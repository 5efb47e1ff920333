"""Random streams: the default generators, generators which a function reaches, tracked sources; their states of a forward.

A recompute starts from forward's starting state and leaves every stream where it found it. Every initialised device is read
whatever the arguments of a region, since nothing tells where a function draws. Reading initialises no accelerator and touches
no stream.

A state is set only where it differs from the stream's present state. A CUDA generator, once set, makes cuDNN seed its dropout
masks of recurrent layers anew, and a recompute without draws must not change the next masks.

The state of the CPU's generator is 5 KB. Regions without draws in between start from the same state and share one copy, so that
a model without randomness keeps one copy for any number of regions. States of devices are shared in the same way. The road not
taken: to compare the state before and after forward, and to keep no state where the two are equal. A function which draws
inside ``torch.random.fork_rng`` leaves the generator as it was, and still needs its starting state.
"""

from __future__ import annotations

import functools
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module, RNNBase

from ckpt_hooks._torch.modes import private_backend_name
from ckpt_hooks._torch.tensors import past_all_modes


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two states of one stream are known to be equal; states other than tensors count as different."""
    return one is other or (
        type(one) is type(other) is torch.Tensor
        and one.is_cpu
        and other.is_cpu
        and past_all_modes(one, torch.equal, one, other)
    )


class Stream:
    """A random stream: functions to read and to set its state, and to set a device's default stream to its initial state."""

    # The state of a CUDA generator is a seed and an offset. To read these two costs a tenth of reading the state, which is a
    # new tensor each time. So the stream keeps the latest state with the two numbers, and returns it while they are unchanged.
    __slots__ = ("_look", "_seen", "generator", "read", "restart", "write")

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], object], restart: Callable[[], object] | None = None
    ) -> None:
        self.read = read
        self.write = write
        self.restart = restart
        self.generator: torch.Generator | None = None
        # Returns seed and offset, if these are the whole state; and the latest of both, with the state.
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
        return self._look is not None

    def is_readable(self) -> bool:
        return self.generator is None or self.generator.device.type == "cpu" or not is_capturing(self.generator.device.type)

    def holds(self, state: Any) -> bool:
        """Whether the stream is known to be in a state."""
        seen = self._seen
        if self._look is not None and seen is not None and seen[1] is state:
            return seen[0] == self._look()
        return is_same_state(self.read(), state)

    def look_for_offset(self, generator: torch.Generator) -> None:
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
        is_compiled: Callable[[], bool] | None = getattr(module, "_is_compiled", None)
        if not hasattr(module, "get_rng_state") or (is_compiled is not None and not is_compiled()):
            continue
        if device_type != "mps":
            is_initialized = getattr(module, "is_initialized", lambda module=module: getattr(module, "_initialized", False))
            _modules.append((is_initialized, module))
        elif torch.backends.mps.is_built():
            _modules.append((torch.backends.mps.is_available, module))
    _modules_known_for = len(TORCH_NAMES)
    names_without_devices = -1 if _modules else _modules_known_for


def device_streams(*, needed: bool) -> list[Stream]:
    """Returns the stream of each initialised device; the same objects each time, while a backend has the same devices."""
    # No state can be read while a CUDA graph is being captured: an error if needed, else that backend is left out.
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
            streams += _streams_on(module, devices_of(module))
    return streams


def devices_of(module: Any) -> Any:
    """Returns the devices of a backend, as the tuple of default generators, or their number."""
    generators = getattr(module, "default_generators", None)
    return generators or (module.device_count() if hasattr(module, "device_count") else 1)


@functools.cache
def _streams_on(module: Any, devices: Any) -> tuple[Stream, ...]:
    if not isinstance(devices, int):
        return tuple(map(_stream_of_default, devices))
    if devices == 1:
        return (Stream(module.get_rng_state, module.set_rng_state, _restart_of(module)),)
    return tuple(_stream_at(module, index) for index in range(devices))


def _stream_at(module: Any, index: int) -> Stream:
    read, restart = functools.partial(module.get_rng_state, index), _restart_of(module, index)
    return Stream(read, lambda state: module.set_rng_state(state, index), restart)


def _restart_of(module: Any, index: int | None = None) -> Callable[[], object] | None:
    if not hasattr(module, "initial_seed") or not hasattr(module, "manual_seed"):
        return None
    if index is None:
        return lambda: module.manual_seed(module.initial_seed())

    def restart() -> None:
        with module.device(index):
            module.manual_seed(module.initial_seed())

    return restart


def default_generator(device: torch.device) -> torch.Generator:
    """Returns torch's generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = getattr(torch, device.type)
    generator: torch.Generator = module.default_generators[module.current_device() if device.index is None else device.index]
    return generator


# States of all streams

#: Held by the recompute which sets the default generators back. Another recompute waits at its first draw.
default_generators_lock = threading.RLock()

#: Streams, each with a state.
States = tuple[tuple[Stream, Any], ...]
#: States of the CPU's generator, of devices, and of other streams; None for the first where nothing is to be restored.
Snapshot = tuple["torch.Tensor | None", States, States]
#: State of the CPU's generator and of other streams before a recompute; None for the first if untouched.
Undo = tuple["torch.Tensor | None", States]

_NONE: States = ()
#: The streams that are tracked now; the same list each time, so that to ask whether there are any costs no call.
TRACKED: list[Stream] = []

read_cpu, write_cpu = torch.default_generator.get_state, torch.default_generator.set_state
_latest: torch.Tensor | None = None
_latest_devices: States = _NONE


def read_devices() -> States:
    """Returns the state of each initialised device's default stream, as the same tuple while no state has moved."""
    global _latest_devices
    if not find_devices():
        return _NONE
    known = _latest_devices
    found, moved = [(stream, stream.state()) for stream in device_streams(needed=True)], True
    if len(found) == len(known):
        moved = False
        for index, (stream, state) in enumerate(found):
            if stream is known[index][0] and is_same_state(state, known[index][1]):
                found[index] = known[index]
            else:
                moved = True
    if moved:
        known = _latest_devices = tuple(found)
    return known


def enter_devices(captured: States) -> States | None:
    """Sets the devices' default streams; returns the states before, None where other devices are initialised by now."""
    streams = device_streams(needed=bool(captured)) if find_devices() else []
    if len(streams) != len(captured) or any(one is not two for one, (two, _) in zip(streams, captured, strict=True)):
        return None
    before = tuple([(stream, stream.state()) for stream in streams])
    try:
        for (stream, present), (_, state) in zip(before, captured, strict=True):
            if not is_same_state(present, state):
                stream.write(state)
    except BaseException:
        leave_streams(before)
        raise
    return before


def leave_streams(before: States) -> None:
    """Sets each stream back to its earlier state, unless already there."""
    for stream, state in before:
        if type(state) is not torch.Tensor or not stream.holds(state):
            stream.write(state)


def capture(generators: Sequence[torch.Generator] = (), *, preserve: bool = True) -> Snapshot:
    """Returns the state of every stream; none of default generators if a recompute is to draw other numbers."""
    global _latest
    if not preserve:
        return None, _NONE, tuple((stream_of_generator(generator), None) for generator in generators)
    devices = read_devices()
    others = _NONE
    if generators or TRACKED:
        streams = (*TRACKED, *map(stream_of_generator, generators))
        others = tuple((stream, stream.read()) for stream in streams)
    state, latest = read_cpu(), _latest  # read once: another thread may replace it
    if latest is not None and is_same_state(state, latest):
        state = latest
    else:
        _latest = state
    return state, devices, others


def enter(captured: Snapshot, *, defaults: bool = True) -> Undo:
    """Sets every stream of a snapshot back, but for default generators if not asked to; returns the states before."""
    state, _, others = captured
    before = read_cpu() if defaults else None
    has_others = others or TRACKED or (defaults and find_devices())
    undo = _enter_others(captured, defaults=defaults) if has_others else _NONE
    if state is not None and defaults:
        write_cpu(state)
    return before, undo


def _enter_others(captured: Snapshot, *, defaults: bool) -> States:
    cpu, devices, others = captured
    states, present = dict(others), tuple(TRACKED)
    if defaults:
        states.update(devices)
        present += tuple(device_streams(needed=bool(devices)))
    # All are read before any is set: a generator may occur twice, explicit and as a device's default.
    undo = tuple(
        [
            (stream, stream.state())
            for stream in dict.fromkeys([*states, *present])
            if states.get(stream) is not None or stream.is_readable()
        ]
    )
    try:
        for stream, present_state in undo:
            state = states.get(stream)
            if state is not None:
                if not is_same_state(present_state, state):
                    stream.write(state)
            elif cpu is not None and stream.restart is not None:
                # A device not yet in use when forward began: if forward was the first to draw, it drew from the start.
                stream.restart()
        return undo  # here, since Ctrl-C may come between the last step and a line behind
    except BaseException:
        leave((None, undo))
        raise


def leave(before: Undo) -> None:
    """Sets every stream back to its state before."""
    cpu, others = before
    if cpu is not None:
        write_cpu(cpu)
    leave_streams(others)


# Recurrent layers with dropout on a device
#
# cuDNN and MIOpen make the masks of ``torch.nn.LSTM``, ``GRU`` and ``RNN`` from a buffer of the device, which advances from
# layer to layer. Torch seeds the buffer from its generator, in the first such layer after the generator's state was set. A
# recompute sets the state, and plain forward does not, so the recompute would draw once more than forward, and drop other
# elements. So a region with such a layer sets the state to itself as forward begins. Its masks differ from those of the program
# without regions, and are the same in both runs. The buffer belongs to the process: where several threads run such layers on
# one device, a recompute may drop other elements.


def recurrent_layers(modules: Iterable[Module]) -> Sequence[weakref.ref[RNNBase]]:
    """Returns the recurrent layers among modules, with dropout or without."""
    return tuple(weakref.ref(module) for module in modules if isinstance(module, RNNBase))


def seed_masks_anew(layers: Iterable[weakref.ref[RNNBase]]) -> None:
    """Makes the next recurrent layer seed masks again, on each device where such a layer has active dropout."""
    devices = dict.fromkeys(
        parameter.device
        for reference in layers
        if (layer := reference()) is not None and layer.training and layer.dropout
        for parameter in layer.parameters(recurse=False)
    )
    for device in devices:
        if getattr(getattr(torch, device.type, None), "default_generators", None):
            generator = default_generator(device)
            generator.set_state(generator.get_state())
