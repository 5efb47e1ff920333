"""Random draws, operator by operator: which operators draw, from which generator, and how to draw again.

Drawing operators are known by their tag (``nondeterministic_seeded``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from ckpt_hooks._ambient.streams import default_generator, is_capturing, is_same_state
from ckpt_hooks._core.modes import unseen
from ckpt_hooks._core.unseen import WatchesUnseen

from .facts import facts_of

_Form = tuple[Any, int]
_NO_DRAW: _Form = (None, -1)

#: Generators, by identity, with the generators which replace them in a replay.
OwnStreams = dict[int, tuple[torch.Generator, torch.Generator]]


@functools.cache
def _form_of(operator: Any) -> _Form:
    """Returns an operator's overload with a generator argument and that argument's position, or the operator and -1."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):  # operators of operators have none
        return _NO_DRAW
    names = [argument.name for argument in operator._schema.arguments]
    if "generator" in names:
        return operator, names.index("generator")
    for overload in operator.overloadpacket.overloads():
        other = getattr(operator.overloadpacket, overload)
        others = [(argument.name, str(argument.type)) for argument in other._schema.arguments]
        own = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
        if [argument for argument in others if argument[0] != "generator"] == own and others != own:
            return other, len(others)
    return operator, -1


def device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Returns the device on which a call of an operator draws."""
    device = kwargs.get("device")
    if device is None:
        device = next((value.device for value in args if isinstance(value, torch.Tensor)), "cpu")
    return torch.device(device)


def _given_generator(operator: Any, args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
    overload, position = _form_of(operator)
    if overload is not operator or position < 0:
        return None
    given: torch.Generator | None = args[position] if position < len(args) else kwargs.get("generator")
    return given


def _generator_of(operator: Any, args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
    """Returns the generator from which a call of an operator draws, if it draws; None for tensors without data."""
    given = _given_generator(operator, args, kwargs)
    if given is not None:
        return given
    device = device_of(args, kwargs)
    return None if device.type == "meta" else default_generator(device)


# For each operator which draws for dropout alone: the position of its probability; -1 for other operators.
_dropout_at: dict[int, int] = {}


def drops_nothing(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator, such as attention, draws for dropout alone and the probability is 0."""
    position = _dropout_at.get(id(operator))
    if position is None:
        schema = getattr(operator, "_schema", None)  # operators of operators have none
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        position = _dropout_at[id(operator)] = names.index("dropout_p") if "dropout_p" in names else -1
    if position < 0:
        return False
    return not (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


_one_draw = threading.Lock()


def _call_with(operator: Any, args: Any, kwargs: Any, generator: torch.Generator, *, is_draw: bool) -> Any:
    """Calls an operator with draws from a given generator, by its argument or set as the default for the call."""
    form, position = _form_of(operator)
    if position >= 0:
        return form(*args[:position], **{**kwargs, "generator": generator})
    default = default_generator(generator.device)
    # An operator that is not known to draw may wait for others, collectives among them: no lock.
    with _one_draw if is_draw else nullcontext():
        before, wanted = default.get_state(), generator.get_state()
        if not is_same_state(before, wanted):  # see :mod:`ckpt_hooks._ambient.streams`
            default.set_state(wanted)
        try:
            return operator(*args, **kwargs)
        finally:
            after = default.get_state()
            generator.set_state(after)
            if not is_same_state(before, after):
                default.set_state(before)


# Recorded regions


def _refuse_capture(operator: Any, device: torch.device) -> None:
    if device.type != "cpu" and is_capturing(device.type):
        raise RuntimeError(
            f"{operator} was to draw random numbers in a checkpoint_region with preserve_rng_state=True while a CUDA graph is "
            "being captured, when torch forbids to read the state of the device's generator. Pass preserve_rng_state=False to "
            "the region if its replays may draw other numbers; if not, leave the region out of the graph."
        )


def draw_noting(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor | None]:
    """Runs an operator which may draw; returns also the state before, for :func:`draw_again`, None if nothing was drawn."""
    generator = _generator_of(operator, args, kwargs)
    if generator is None:
        return operator(*args, **kwargs), None
    _refuse_capture(operator, generator.device)
    before = generator.get_state()
    result = operator(*args, **kwargs)
    if _form_of(operator) is _NO_DRAW and is_same_state(before, generator.get_state()):
        return result, None
    return result, before


def draw_again(operator: Any, args: list[Any], kwargs: dict[str, Any], state: torch.Tensor) -> Any:
    """Runs an operator with draws from a noted state; the user's generators do not move."""
    device = device_of(args, kwargs)
    _refuse_capture(operator, device)
    own = torch.Generator(default_generator(device).device)
    own.set_state(state)
    return _call_with(operator, args, kwargs, own, is_draw=True)


def draw_anew(operator: Any, args: list[Any], kwargs: dict[str, Any], streams: OwnStreams) -> Any:
    """Runs an operator with draws of new numbers, from a generator of the replay's; the user's generators do not move."""
    generator = _generator_of(operator, args, kwargs)
    if generator is None or (generator.device.type != "cpu" and is_capturing(generator.device.type)):
        return operator(*args, **kwargs)  # while a CUDA graph is captured no state can be read
    if id(generator) not in streams:
        own = torch.Generator(generator.device)
        own.set_state(generator.get_state())
        streams[id(generator)] = generator, own
    return _call_with(operator, args, kwargs, streams[id(generator)][1], is_draw=_form_of(operator) is not _NO_DRAW)


# Function regions


class DrawFound(BaseException):
    """Ends a function that draws random numbers."""


class DrawWatch(WatchesUnseen):
    """Ends a function before it draws from a default generator: ``found`` names what draws, or may."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        may_draw = not (self.paused or facts_of(func).may_be_left_out or drops_nothing(func, args, kwargs))
        if may_draw and _given_generator(func, args, kwargs) is None:
            self._end(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _end(self, found: str) -> NoReturn:
        self.found = found
        raise DrawFound

    def run_function(self, around: list[WatchesUnseen], function: Any, *args: Any, **kwargs: Any) -> Any:
        self._end(f"the custom function {function.__qualname__}, whose kernels may draw")

    def run_unseen(self, writer: str, args: Any, call: Callable[[], Any]) -> Any:
        self._end(f"the kernel {writer}, which may draw")


# Function regions with policies


@unseen
def watch_draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], torch.Tensor | None] | None:
    """Returns a function to call when an operator has run: it returns the state after a draw. None if none will draw."""
    generator = None if drops_nothing(operator, args, kwargs) else _generator_of(operator, args, kwargs)
    if generator is None or (generator.device.type != "cpu" and is_capturing(generator.device.type)):
        return None  # a graph is captured in a region which draws anew: others have refused to run
    watched, before = generator, generator.get_state()

    @unseen
    def drawn() -> torch.Tensor | None:
        after = watched.get_state()
        return None if is_same_state(before, after) else after

    return drawn


@unseen
def skip_draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: torch.Tensor) -> None:
    """Moves the random stream past a skipped operator."""
    generator = _generator_of(operator, args, kwargs)  # which may be another object than in forward
    assert generator is not None
    generator.set_state(drawn)
