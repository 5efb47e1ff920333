"""Random draws, operator by operator: which operators draw, from which generator, and how to draw again.

Drawing operators are known by their tag (``nondeterministic_seeded``).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from ckpt_hooks._ambient.devices import is_capturing
from ckpt_hooks._ambient.random import CPU, RandomStates, default_generator, is_same_state
from ckpt_hooks._core.modes import QuietDispatchMode, unrecorded
from ckpt_hooks._core.unseen import WatchesUnseen
from ckpt_hooks._torch.modes import FAKE, address_of_generator

from .facts import facts_of

_DrawSignature = tuple[Any, int]
_NO_DRAW: _DrawSignature = (None, -1)

#: Generators, by identity, with the generators which replace them in a replay.
ReplacedGenerators = dict[int, tuple[torch.Generator, torch.Generator]]


_signatures: dict[int, tuple[Any, _DrawSignature]] = {}  # by ``id``: hashing an operator would run Python code


def _signature_of(operator: Any) -> _DrawSignature:
    """Returns an operator's overload with a generator argument and that argument's position, or the operator and -1."""
    known = _signatures.get(id(operator))
    if known is None:
        known = _signatures[id(operator)] = operator, _find_signature(operator)
    return known[1]


def _find_signature(operator: Any) -> _DrawSignature:
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):  # higher-order operators have no tags
        return _NO_DRAW
    names = [argument.name for argument in operator._schema.arguments]
    if "generator" in names:
        return operator, names.index("generator")
    for overload in operator.overloadpacket.overloads():
        other = getattr(operator.overloadpacket, overload)
        others = [(argument.name, str(argument.type)) for argument in other._schema.arguments]
        expected = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
        if [argument for argument in others if argument[0] != "generator"] == expected and others != expected:
            return other, len(others)
    return operator, -1


def device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is None:
        if args and isinstance(args[0], torch.Tensor):
            return args[0].device
        inner = (argument for value in args for argument in (value if type(value) is list else (value,)))
        device = next((argument.device for argument in inner if isinstance(argument, torch.Tensor)), "cpu")
    return torch.device(device)


def _explicit_generator(operator: Any, args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
    overload, position = _signature_of(operator)
    if overload is not operator or position < 0:
        return None
    generator: torch.Generator | None = args[position] if position < len(args) else kwargs.get("generator")
    return None if generator is None or _is_default(generator) else generator


def _is_default(generator: torch.Generator) -> bool:
    # By address: under a dispatch mode an operator gets another Python object for the same generator.
    module = getattr(torch, generator.device.type, None)
    defaults = [torch.default_generator] if generator.device.type == "cpu" else getattr(module, "default_generators", ())
    return address_of_generator(generator) in map(address_of_generator, defaults)


def _source_of(operator: Any, args: Any, kwargs: dict[str, Any]) -> tuple[torch.Generator | None, torch.device]:
    explicit = _explicit_generator(operator, args, kwargs)
    return explicit, device_of(args, kwargs) if explicit is None else explicit.device


def _generator_at(explicit: torch.Generator | None, device: torch.device) -> torch.Generator:
    if explicit is not None:
        return explicit
    default, modes = default_generator(device), _own_draws.active
    return modes[-1].generator_for(default) if modes and not modes[-1].paused else default


# For each operator that draws only for dropout, such as attention: the position of the probability; -1 for other operators.
_dropout_at: dict[int, int] = {}


def drops_nothing(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator, such as attention, draws only for dropout and the probability is 0."""
    position = place_of_probability(operator)
    if position < 0:
        return False
    return not (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


def place_of_probability(operator: Any) -> int:
    position = _dropout_at.get(id(operator))
    if position is None:
        schema = getattr(operator, "_schema", None)  # higher-order operators have no schema
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        position = _dropout_at[id(operator)] = names.index("dropout_p") if "dropout_p" in names else -1
    return position


_PLAIN = (torch.Tensor, torch.nn.Parameter, FAKE)


def _is_for_subclass(args: Any) -> bool:
    """Whether a call draws for a tensor of another class, whose handler may use any generator, and any count of numbers."""
    # A ``DTensor`` draws only for its part on this rank, and on the CPU not from an explicit generator.
    return bool(args) and type(args[0]) not in _PLAIN and isinstance(args[0], torch.Tensor)


_one_draw = threading.Lock()


def _call_with(operator: Any, args: Any, kwargs: Any, generator: torch.Generator, *, is_draw: bool) -> Any:
    """Calls an operator with ``generator`` as its argument, or with the default generator in the state of ``generator``."""
    form, position = _signature_of(operator)
    if position >= 0 and (not _is_for_subclass(args) or _explicit_generator(operator, args, kwargs) is not None):
        return facts_of(form).call(*args[:position], **{**kwargs, "generator": generator})
    default = default_generator(generator.device)
    # No lock for an operator that is not known to draw: a collective would hold the lock while it waits for other threads.
    with _one_draw if is_draw else nullcontext():
        before, wanted = default.get_state(), generator.get_state()
        if not is_same_state(before, wanted):  # a CUDA generator, once set, makes cuDNN seed its dropout masks anew
            default.set_state(wanted)
        try:
            return facts_of(operator).call(*args, **kwargs)
        finally:
            after = default.get_state()
            generator.set_state(after)
            if not is_same_state(before, after):
                default.set_state(before)


# Recorded regions


def _refuse_capture(operator: Any, device: torch.device) -> None:
    if device.type != "cpu" and is_capturing(device.type):
        raise RuntimeError(
            f"{operator} draws random numbers in a checkpoint_region with preserve_rng_state=True (the default), but while a "
            "CUDA graph is captured, torch forbids reading the state of the device's generator. Pass preserve_rng_state=False "
            "to the region if its replays may draw other numbers; if not, leave the region out of the graph."
        )


# A draw holds the state of the generator before it (5 KB on the CPU); short draws of a frame that follow each other share the
# state before the first. A replay repeats the draws before the wanted draw, and keeps the results it needs later.

#: Operators whose count of random numbers depends on shapes only.
_BY_SHAPE = {
    id(operator)
    for operator in (
        torch.ops.aten.bernoulli_.float,
        torch.ops.aten.uniform_.default,
        torch.ops.aten.rand.default,
        torch.ops.aten.rand_like.default,
    )
}
_SHORT = 1264  # numbers: as float32 they take no more memory than a state
_LONGEST = 16  # draws in a series


class Series:
    """Short draws from the CPU's default generator, each right after another."""

    __slots__ = ("__weakref__", "calls", "frame", "state")

    def __init__(self, state: torch.Tensor, frame: int) -> None:
        self.state = state  # before the first draw
        self.frame = frame  # the number on the tape at which the frame begins
        self.calls: list[tuple[int, Any, list[Any], dict[str, Any]]] = []  # number on the tape, operator, arguments


class _TensorLayout(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _layout_of(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return _TensorLayout(argument.shape, argument.stride(), argument.dtype)
    return argument


class InSeries(NamedTuple):
    """The state before a draw of a series."""

    series: Series
    place: int


def _is_short(operator: Any, args: Any) -> bool:
    if id(operator) not in _BY_SHAPE or CPU.look is None:
        return False
    first = args[0]
    if not isinstance(first, torch.Tensor):
        return bool(math.prod(first) <= _SHORT)
    if _is_for_subclass(args):
        return False
    return first.layout is torch.strided and not first.is_nested and first.numel() <= _SHORT


class NotedStates:
    """Notes the states before the draws of a tape."""

    __slots__ = ("_after", "_series")

    def __init__(self) -> None:
        self._series: weakref.ref[Series] | None = None
        self._after: Any = None  # ``CPU.look()`` after the latest draw of the series

    def draw(self, operator: Any, args: Any, kwargs: Any, number: int, frame: int) -> tuple[Any, Any]:
        """Runs a short draw; returns the result, and the state before as a place in a series."""
        assert CPU.look is not None
        series = None if self._series is None else self._series()
        if series is None or series.frame != frame or len(series.calls) == _LONGEST or CPU.look() != self._after:
            series = Series(torch.default_generator.get_state(), frame)
        result = facts_of(operator).call(*args, **kwargs)
        if type(result) is not torch.Tensor:  # a mode returned another class: a replay keeps no such result
            number = -1
        if not isinstance(args[0], torch.Tensor):
            kwargs = {**kwargs, "dtype": result.dtype}  # a replay may run under another default dtype
        series.calls.append((number, operator, [_layout_of(argument) for argument in args], kwargs))
        self._series, self._after = weakref.ref(series), CPU.look()
        return result, InSeries(series, len(series.calls) - 1)


def draw_noting(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], states: NotedStates | None, number: int = 0, frame: int = 0
) -> tuple[Any, Any]:
    """Runs an operator which may draw; returns also the state before, for :func:`draw_again`, None if nothing was drawn."""
    # A fast path for dropout on a host, with the result of the lines below: saves a fifth of a small block's draw.
    is_simple = args and not kwargs and type(args[0]) is torch.Tensor and args[0].is_cpu
    if states is not None and is_simple and _is_short(operator, args) and not _own_draws.active:
        return states.draw(operator, args, kwargs, number, frame)
    explicit, device = _source_of(operator, args, kwargs)
    if device.type == "meta":
        return operator(*args, **kwargs), None
    _refuse_capture(operator, device)
    generator = _generator_at(explicit, device)
    if states is not None and generator is torch.default_generator and _is_short(operator, args):
        return states.draw(operator, args, kwargs, number, frame)
    before = generator.get_state()
    result = operator(*args, **kwargs)
    if _signature_of(operator) is _NO_DRAW and is_same_state(before, generator.get_state()):
        return result, None
    return result, before


class _Spare(threading.local):
    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}
        # How far the CPU's spare generator is: a series, and the number of its draws repeated so far; None outside of a series.
        self.place: tuple[weakref.ref[Series], int] | None = None


_spare = _Spare()


def draw_again(
    operator: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    state: torch.Tensor | InSeries,
    keep: Callable[[int, torch.Tensor], None] | None = None,
) -> Any:
    """Runs an operator with draws from a noted state; ``keep`` gets the results of draws in a series before this draw."""
    device = device_of(args, kwargs)
    _refuse_capture(operator, device)
    device = default_generator(device).device
    spare = _spare.generators.get(device)
    if spare is None:
        spare = _spare.generators[device] = torch.Generator(device)
    place, _spare.place = _spare.place, None
    if not isinstance(state, InSeries):
        spare.set_state(state)
        return _call_with(operator, args, kwargs, spare, is_draw=True)
    series, number = state
    begin = place[1] if place is not None and place[0]() is series and place[1] <= number else 0
    if begin == 0:
        spare.set_state(series.state)
    if begin < number:
        _draw_on_the_way(series.calls[begin:number], spare, keep)
    result = _call_with(operator, args, kwargs, spare, is_draw=True)
    _spare.place = weakref.ref(series), number + 1
    return result


@unrecorded
def _draw_on_the_way(calls: Any, generator: torch.Generator, keep: Callable[[int, torch.Tensor], None] | None) -> None:
    for number, operator, args, kwargs in calls:
        made = [torch.empty_strided(*arg[:2], dtype=arg.dtype) if type(arg) is _TensorLayout else arg for arg in args]
        result = _call_with(operator, made, kwargs, generator, is_draw=True)
        if keep is not None:
            keep(number, result)


def draw_anew(operator: Any, args: list[Any], kwargs: dict[str, Any], replaced: ReplacedGenerators) -> Any:
    """Runs an operator with draws of new numbers, from the replay's own generators; the user's generators do not move."""
    explicit, device = _source_of(operator, args, kwargs)
    # Operators on meta tensors draw nothing, and while a CUDA graph is captured no state can be read.
    if device.type == "meta" or (device.type != "cpu" and is_capturing(device.type)):
        return operator(*args, **kwargs)
    generator = _generator_at(explicit, device)
    if id(generator) not in replaced:
        fresh = torch.Generator(generator.device)
        fresh.set_state(generator.get_state())
        replaced[id(generator)] = generator, fresh
    return _call_with(operator, args, kwargs, replaced[id(generator)][1], is_draw=_signature_of(operator) is not _NO_DRAW)


# Function regions


class OwnDraws(QuietDispatchMode):
    """Lets a rerun draw from generators of its own, which begin where forward began: the default generators do not move."""

    def __init__(self, captured: RandomStates) -> None:
        super().__init__()
        cpu, devices, _ = captured
        self._begin = {} if cpu is None else {id(torch.default_generator): cpu}
        self._begin |= {id(source.generator): state for source, state in devices}
        self._generators: dict[int, torch.Generator] = {}

    def generator_for(self, generator: torch.Generator) -> torch.Generator:
        key = id(generator)
        if key not in self._generators:
            self._generators[key] = fresh = torch.Generator(generator.device)
            fresh.set_state(self._begin[key] if key in self._begin else generator.get_state())
        return self._generators[key]

    def __enter__(self) -> Self:
        _own_draws.active.append(self)
        return super().__enter__()

    def leaves(self) -> None:
        if self in _own_draws.active:
            _own_draws.active.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_draw = not self.paused and _signature_of(func) is not _NO_DRAW and _explicit_generator(func, args, kwargs) is None
        if not is_draw or drops_nothing(func, args, kwargs):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return _call_with(func, args, kwargs, self.generator_for(default_generator(device_of(args, kwargs))), is_draw=True)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.active: list[OwnDraws] = []  # outermost first


_own_draws = _OfThread()


class DrawWatch(WatchesUnseen):
    """Notes the devices whose default generators a function draws from, and a call that may draw unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[torch.device] = set()
        self.first_draw: str | None = None  # the first operator that draws
        self.unknown: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        may_draw = not (self.paused or facts_of(func).may_be_left_out or drops_nothing(func, args, kwargs))
        if may_draw and _signature_of(func) is _NO_DRAW:
            self.unknown = f"{func} may draw"
        elif may_draw and _explicit_generator(func, args, kwargs) is None:
            self.devices.add(default_generator(device_of(args, kwargs)).device)
            self.first_draw = self.first_draw or str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run_function(self, around: list[WatchesUnseen], function: Any, *args: Any, **kwargs: Any) -> Any:
        self.unknown = f"kernels of the custom function {function.__qualname__} may draw"
        return super().run_function(around, function, *args, **kwargs)

    def run_unseen(self, writer: str, args: Any, call: Callable[[], Any]) -> Any:
        self.unknown = f"the kernel {writer} may draw"
        return super().run_unseen(writer, args, call)

    def run_sharing(self, receiver: str, args: Any, call: Callable[[], Any]) -> Any:
        return call()
