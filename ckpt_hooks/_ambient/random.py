"""Random sources: torch's default generators, generators which a function reaches, and tracked sources.

Forward reads the generator state of every initialised device, since nothing tells in advance where a function draws. A
recompute sets a device's state only if the state differs: after a set, cuDNN seeds the dropout masks of recurrent layers anew.
The CPU's state has 5 KB, so regions without draws in between share one copy. (A forward that leaves the state unchanged may
still have drawn, inside of ``torch.random.fork_rng``.)
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import RNNBase
from typing_extensions import Self

from ckpt_hooks._core.misuse import wrong
from ckpt_hooks._torch.modes import address_of_generator, made_apart
from ckpt_hooks._torch.tensors import past_all_modes

from . import devices
from .devices import TORCH_NAMES, devices_of, find_devices, is_capturing


def is_same_state(state: Any, other: Any) -> bool:
    """Whether two states of a source are one object, or equal tensors on the host; other states count as different."""
    are_on_host = type(state) is type(other) is torch.Tensor and state.is_cpu and other.is_cpu
    return state is other or (are_on_host and past_all_modes(state, torch.equal, state, other))


# The image of the CPU's generator: shows whether the generator has moved, without reading its state
#
# An image is a copy of a few bytes of the generator's object. Comparing images takes 0.2 us, and reading a state 1 us or more:
# images save 5% to 11% of a region of ten operators. The object has the 624 words of the Mersenne twister
# (ATen/core/MT19937RNGEngine.h), before them seed and position, and behind them left-over normal numbers. These places are
# found on import, in a generator made for this. If some kind of draw leaves that generator's image unchanged, no image is used.
#
# Equal images mean equal states: every draw moves the position or a left-over number, and after 624 draws, when the position is
# the same again, all words are new, and the image has the first eight words. Equal states may have different images, since the
# image includes padding.

_WORDS = 624
#: Bytes before the words (seed and position) and behind the words (left-over normal numbers of both dtypes).
_BEFORE, _BEHIND = 24, 40
#: The bytes of an image: offset from the words, and size.
_LOOKED_AT = ((-_BEFORE, _BEFORE + 4 * 8), (4 * _WORDS, _BEHIND))
_SEARCHED = 256  # the words have to begin within this many bytes of the object


def _views_of(generator: torch.Generator) -> list[Any]:
    """Returns two views of a generator's object; the ``raw`` of each has the present bytes."""
    words = struct.unpack_from(f"<{_WORDS}Q", bytes(generator.get_state().tolist()), 24)
    array, address = struct.pack(f"={_WORDS}I", *(word & 0xFFFFFFFF for word in words)), address_of_generator(generator)
    offset = ctypes.string_at(address, _SEARCHED).index(array[:32], _BEFORE)
    if ctypes.string_at(address + offset, len(array)) != array:
        raise ValueError
    return [(ctypes.c_char * size).from_address(address + offset + begin) for begin, size in _LOOKED_AT]


def _find_views() -> list[Any] | None:
    """Returns the views of the default generator; None if the generator's object is not laid out as expected."""
    try:
        generator = torch.Generator().manual_seed(1)
        head, tail = _views_of(generator)
        images = [(head.raw, tail.raw)]
        # All kinds of moves have to change the image: a number of 32 bits; a normal number, which leaves a second number over;
        # the left-over number, which moves nothing else; both in double precision; as many draws as words, which end at the
        # same position; and a seed.
        for draw in (
            lambda: torch.rand(1, generator=generator),
            lambda: torch.randn(1, generator=generator, dtype=torch.float32),
            lambda: torch.randn(1, generator=generator, dtype=torch.float32),
            lambda: torch.randn(1, generator=generator, dtype=torch.float64),
            lambda: torch.randn(1, generator=generator, dtype=torch.float64),
            lambda: torch.rand(_WORDS, generator=generator),
            lambda: generator.manual_seed(2),
        ):
            draw()
            images.append((head.raw, tail.raw))
        return _views_of(torch.default_generator) if len(set(images)) == len(images) else None
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError, struct.error):
        return None


_views = made_apart(_find_views)
#: The views of the default generator: ``(HEAD.raw, TAIL.raw)`` is the present image. Empty buffers if images are not used.
HEAD, TAIL = _views or [ctypes.create_string_buffer(0), ctypes.create_string_buffer(0)]


@dataclass(eq=False, slots=True)
class RandomSource:
    """A random source: functions to read and to set its state, and to set a device's default source to its initial state."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    restart: Callable[[], object] | None = None
    generator: torch.Generator | None = None
    # Returns a few numbers that identify the state, at a tenth of the cost of ``read``. ``seen`` has the latest numbers and the
    # state that they identify.
    look: Callable[[], Any] | None = None
    is_default: bool = False
    seen: tuple[Any, Any] = (None, None)

    def state(self) -> Any:
        """Returns the state, not to be written to: the same object as before, if the state is known to be the same."""
        if not self.is_default:
            return self.read()
        look, (seen, known) = None if self.look is None else self.look(), self.seen
        if look is not None and look == seen:
            return known
        state = self.read()
        if look is None and is_same_state(state, known):
            return known
        if self.look is None or self.look() == look:  # else another thread has drawn between the look and the read
            self.seen = look, state
        return state

    def holds(self, state: Any) -> bool:
        look, known = self.seen
        return look == self.look() if self.look is not None and known is state else is_same_state(self.read(), state)


def source_of_generator(generator: torch.Generator) -> RandomSource:
    """Returns the source of an explicit generator, which needs no ``restart``: forward can always read its state."""
    return RandomSource(generator.get_state, generator.set_state, generator=generator)


def _source_of_default(generator: torch.Generator) -> RandomSource:
    def restart() -> None:
        generator.manual_seed(generator.initial_seed())

    def look() -> tuple[int, int]:
        return generator.initial_seed(), generator.get_offset()

    source = RandomSource(generator.get_state, generator.set_state, restart, generator, is_default=True)
    with suppress(AttributeError, RuntimeError, struct.error):  # raised for generators without an offset
        if bytes(generator.get_state().tolist()) == struct.pack("=QQ", *look()):  # seed and offset are the whole state
            source.look = look
    return source


CPU = RandomSource(torch.default_generator.get_state, torch.default_generator.set_state, is_default=True)
if _views:
    CPU.look = lambda: (HEAD.raw, TAIL.raw)


def device_sources(*, needed: bool) -> list[RandomSource]:
    """Returns the source of each initialised device; the same objects each time, while a backend has the same devices."""
    # While a CUDA graph is being captured, no state can be read. Raises if the caller needs the states, and leaves the backend
    # out otherwise.
    sources: list[RandomSource] = []
    for module in [module for initialised, module in find_devices() if initialised()]:
        if not getattr(module, "is_current_stream_capturing", bool)():
            sources += _sources_on(module, devices_of(module))
        elif needed:
            raise RuntimeError(
                "a region with preserve_rng_state=True ran while a CUDA graph is being captured, when torch forbids reading "
                "the state of the device's generator. Pass preserve_rng_state=False to a region that draws no random numbers; "
                "leave a region that draws out of the graph."
            )
    return sources


@functools.cache
def _sources_on(module: Any, devices: Any) -> tuple[RandomSource, ...]:
    if not isinstance(devices, int):
        return tuple(map(_source_of_default, devices))
    return tuple(_source_at(module, () if devices == 1 else (index,)) for index in range(devices))


def _source_at(module: Any, index: tuple[int, ...]) -> RandomSource:
    def restart() -> None:
        with module.device(*index) if index else nullcontext():
            module.manual_seed(module.initial_seed())

    has_seed = hasattr(module, "initial_seed") and hasattr(module, "manual_seed")
    read = functools.partial(module.get_rng_state, *index)
    return RandomSource(read, lambda state: module.set_rng_state(state, *index), restart if has_seed else None, is_default=True)


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module: Any = getattr(torch, device.type)
    generator: torch.Generator = module.default_generators[module.current_device() if device.index is None else device.index]
    return generator


#: Held by the recompute which sets the default generators back. A concurrent recompute does not wait: it draws from generators
#: of its own (``OwnDraws``).
default_generators_lock = threading.RLock()

States = tuple[tuple[RandomSource, Any], ...]
#: States of the CPU's generator, of devices, and of other sources. The first is None if a recompute draws new numbers.
RandomStates = tuple["torch.Tensor | None", States, States]

#: The sources that are tracked now. Always the same list object, so that other modules can test it without a call.
TRACKED: list[RandomSource] = []

_latest_devices: States = ()


def read_devices() -> States:
    """Returns the state of each initialised device's default source; the same tuple as before if no state has changed."""
    global _latest_devices
    known, states = _latest_devices, tuple([(source, source.state()) for source in device_sources(needed=True)])
    if [id(part) for pair in states for part in pair] != [id(part) for pair in known for part in pair]:
        _latest_devices = known = states
    return known


def capture(generators: Sequence[torch.Generator] = (), *, preserve: bool = True) -> RandomStates:
    """Returns the state of every source; without ``preserve`` no states, since a recompute then draws new numbers."""
    if not preserve:  # lists the generators without states: a recompute puts them back when it ends
        return None, (), tuple((source_of_generator(generator), None) for generator in generators)
    others = (*TRACKED, *map(source_of_generator, generators))
    return CPU.state(), read_devices(), tuple([(source, source.read()) for source in others])


def enter(captured: RandomStates, *, defaults: bool = True) -> list[tuple[RandomSource, Any]]:
    """Sets every source of a snapshot back, default generators only with ``defaults``; returns the states before."""
    cpu, devices, others = captured
    states, before = {CPU: cpu}, [(CPU, CPU.read())] if defaults else []
    if others or TRACKED or (defaults and find_devices()):
        states |= [*(devices if defaults else ()), *others]
        present = [*TRACKED, *(device_sources(needed=bool(devices)) if defaults else ())]
        # Every source is read before any is set: a generator may occur twice, explicitly and as a device's default.
        for source in dict.fromkeys([*states, *present]):
            is_readable = source.generator is None or not is_capturing(source.generator.device.type)
            if source is not CPU and (is_readable or states.get(source) is not None):
                before.append((source, source.state()))
    try:
        for source, current in before:
            state = states.get(source)
            if state is not None:
                if source is CPU or not is_same_state(current, state):  # the CPU's state is quicker to set than to compare
                    source.write(state)
            elif cpu is not None and source.restart is not None:
                # The device was not in use when forward began. If forward drew first, it drew from the initial state.
                source.restart()
        return before  # inside of ``try``: Ctrl-C may come between the loop and the return
    except BaseException:
        leave(before)
        raise


def leave(before: Iterable[tuple[RandomSource, Any]]) -> None:
    for source, state in before:
        if source is CPU or type(state) is not torch.Tensor or not source.holds(state):
            source.write(state)


# Sources named by the user: Python's, NumPy's, other generators

#: Modules with a random source, by the names that users give, with the functions that read and set the state. To support a new
#: source, add a row.
_NAMED = {"python": ("random", "getstate", "setstate"), "numpy": ("numpy.random", "get_state", "set_state")}

#: Held by a recompute that sets back explicit generators and tracked sources. Threads may share these sources, so another such
#: recompute waits.
shared_sources_lock = threading.RLock()


class TrackedSource:
    """A random source rewound by regions: the result of :func:`track_rng`, and a context manager which ends the tracking."""

    def __init__(self, source: RandomSource) -> None:
        self._source = source
        TRACKED.append(source)

    def remove(self) -> None:
        """Stops tracking, for regions whose forward is yet to run. A second call does nothing."""
        with suppress(ValueError):
            TRACKED.remove(self._source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


@contextmanager
def hold_sources(sources: Iterable[RandomSource]) -> Iterator[None]:
    """Tracks the sources of a forward while its recompute runs, so that regions inside capture them again."""
    with ExitStack() as stack:
        for source in sources:
            if source not in TRACKED:
                stack.enter_context(TrackedSource(source))
        yield


def track_rng(source: Any) -> TrackedSource:
    """Makes recomputes draw the same numbers from a random source as forward, from now on and in the whole process.

    Torch's default generators, and generators among a function's arguments and closed-over variables, need no tracking.
    Python's ``random``, NumPy and other sources do: without it a recompute draws other numbers. Each region keeps the source's
    state from the start of its forward. The source is put back after a recompute while it is tracked.

    A thread that draws from torch's default generator while a region on another thread draws from it, as some data loaders do,
    makes the recompute raise. Give such threads a generator of their own.

    Args:
        source: ``"python"`` for the module ``random``, ``"numpy"`` for NumPy's global state, or an object: a
            ``torch.Generator``, a ``random.Random``, a ``numpy.random.Generator``, or anything with ``get_state()`` and
            ``set_state(state)``.

    Returns:
        The tracking, a context manager. ``remove()`` or the end of the block ends it.

    Raises:
        ValueError: If ``source`` is another string.
        TypeError: If ``source`` has no state to read and set.
        ImportError: If ``source`` is ``"numpy"`` and NumPy is not installed.

    Example:
        >>> import random
        >>> import torch
        >>> from ckpt_hooks import checkpoint, track_rng
        >>> x = torch.ones(2, requires_grad=True)
        >>> with track_rng("python"):
        ...     y = checkpoint(lambda x: (x * random.random()).sin(), x)
        >>> y.sum().backward()  # multiplies with the same number
    """
    return TrackedSource(_source_of(source))


def _source_of(source: Any) -> RandomSource:
    if isinstance(source, str) and source in _NAMED:
        module, read, write = _NAMED[source]
        return RandomSource(*(getattr(importlib.import_module(module), name) for name in (read, write)))
    if isinstance(source, torch.Generator):
        return source_of_generator(source)
    for read, write in () if isinstance(source, type) else (("get_state", "set_state"), ("getstate", "setstate")):
        if callable(getattr(source, read, None)) and callable(getattr(source, write, None)):
            return RandomSource(getattr(source, read), getattr(source, write))
    bits = getattr(source, "bit_generator", source)
    if isinstance(getattr(bits, "state", None), dict):
        return RandomSource(lambda: bits.state, lambda state: setattr(bits, "state", state))
    wanted = f"{', '.join(map(repr, _NAMED))}, a generator, or an object with get_state() and set_state(state)"
    kind, advice = ValueError if isinstance(source, str) else TypeError, "Pass the object that draws or has the state."
    raise wrong(source, "source", wanted, advice, kind)


def all_sources() -> list[RandomSource]:
    """Returns the default sources, the tracked sources, and the sources of loaded modules with a source."""
    loaded = [_source_of(name) for name, (module, *_) in _NAMED.items() if module in sys.modules]
    return [CPU, *device_sources(needed=False), *TRACKED, *loaded]


# Positions: show how far the default sources have moved, without reading a state
#
# Positions reveal a recompute that draws other numbers than forward. For example, if forward makes a random table and caches it
# (``functools.lru_cache``), the recompute does not make the table, and all its later draws are shifted. The position of the
# CPU's generator is the index of the next word, stored before the words, and the first word. The position of a device's
# generator is its offset, which is read without waiting for the device.

#: If two runs begin in the same state and end at equal positions, they end in equal states.
Position = Any

#: An object whose items 0 and 1 are the position; nearly every draw moves item 0. For the CPU, a memoryview of 32-bit numbers,
#: which Python reads fastest.
Where = Any

_NOWHERE: Where = (0, 0)
_CPU: Where = (
    memoryview((ctypes.c_char * 8).from_buffer(HEAD, _BEFORE - 4)).cast("B").cast("I") if CPU.look is not None else _NOWHERE
)


class _WithDevices:
    __slots__ = ("_offsets", "generators")

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators, self._offsets = generators, [generator.get_offset for generator in generators]

    def __getitem__(self, index: int, /) -> Position:
        return (_CPU[0], *[offset() for offset in self._offsets]) if index == 0 else _CPU[1]


def position_of_generators(*, watched: bool = True, begin: Position = None) -> Where:
    """Returns an object that reads the position while the same devices are in use; a constant position if not watched."""
    # In a recompute, ``begin`` is item 0 of the position where forward began. An integer shows that no device was in use when
    # forward began, so the positions of forward and of its recomputes include only the CPU's generator.
    if not watched:
        return _NOWHERE
    if len(TORCH_NAMES) == devices.names_without_devices or isinstance(begin, int):
        return _CPU
    moving = [source.generator for source in device_sources(needed=False) if source.look is not None]
    generators = [generator for generator in moving if generator is not None]
    return _WithDevices(generators) if generators else _CPU


def are_other_threads_alive() -> bool:
    return len(threading._active) > 1  # type: ignore[attr-defined]


def have_several_drawn() -> bool:
    """Whether the generators of several accelerators have moved, as when each thread trains on a device of its own."""
    generators: Sequence[torch.Generator] = getattr(position_of_generators(), "generators", ())
    return sum(generator.get_offset() > 0 for generator in generators) > 1


def devices_between(position: Position, other: Position, where: Where) -> set[torch.device]:
    """Returns the devices whose sources differ between two positions."""
    cpu = torch.device("cpu")
    devices = (cpu, *(generator.device for generator in getattr(where, "generators", ())))
    firsts = [first if isinstance(first, tuple) else (first,) for first in (position[0], other[0])]
    moved = {device for device, first, second in zip(devices, *firsts, strict=False) if first != second}
    return moved | {cpu} if position[1] != other[1] else moved


def moves_by_itself(devices: set[torch.device]) -> bool:
    """Whether a source of the devices moves while this thread does nothing, for at most a twentieth of a second."""
    # Only waiting shows whether another thread draws. The wait costs little, since an error follows unless a source moves.
    where = position_of_generators()
    begin = where[0], where[1]
    for _ in range(50):
        time.sleep(0.001)
        if devices & devices_between(begin, (where[0], where[1]), where):
            return True
    return False


# Recurrent layers with dropout on a device
#
# cuDNN and MIOpen make the dropout masks of ``torch.nn.LSTM``, ``GRU`` and ``RNN`` from a buffer on the device. Torch seeds the
# buffer from the device's generator, in the first such layer that runs after the generator's state was set. A recompute sets
# the state, so forward sets it too: both runs then have the same masks. A program without regions has other masks.


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
