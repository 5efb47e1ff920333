"""Random draws where several threads run regions: each operator draws from a generator of the region's own.

Torch's default generators belong to the process. A recompute that sets one back for a while hides it from every other thread,
and a forward whose draws another thread's interleave with cannot be repeated from where it started. So where threads besides
the main one run regions, and where two recomputes overlap, a dispatch mode notes the state at each draw of a forward, and gives
it to that draw in a recompute, which touches no default generator. That costs microseconds an operator, which is why a program
of one thread goes by :mod:`.rng` instead.

An operator that takes no generator runs on the default one, set for that call alone. Which operators draw is told by their
tags (``nondeterministic_seeded``); to take the untagged ones of other libraries for such as well would have them wait for each
other across threads, collectives among them.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ckpt_hooks._core.modes import QuietDispatchMode, count_writes, unseen

from .streams import is_capturing, is_same_state

__all__ = [
    "NO_DRAW",
    "Draw",
    "RecordDraws",
    "ReplayDraws",
    "call_with",
    "default_generator",
    "device_of",
    "draw_apart",
    "drops_nothing",
    "form_of",
    "given_generator",
    "handlers",
    "num_draw_modes",
    "skip_draw",
    "watch_draw",
]


class Draw(NamedTuple):
    """The states of a generator before and after an operator drew from it."""

    before: torch.Tensor
    after: torch.Tensor


class _Handlers(threading.local):
    """The modes of one thread, outermost first, and the latest draw that one of them made."""

    def __init__(self) -> None:
        self.active: list[_Draws] = []
        self.latest: Draw | None = None


#: This thread's.
handlers = _Handlers()
_one_draw = threading.Lock()

_Form = tuple[Any, int]
NO_DRAW: _Form = (None, -1)


@functools.cache
def form_of(operator: Any) -> _Form:
    """Returns the overload of an operator that takes a generator, or the operator, and at which position it takes one, or -1.

    :data:`NO_DRAW` for those that do not draw.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):  # operators of operators have none
        return NO_DRAW
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


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Returns the device that an operator draws on when it is called with some arguments."""
    device = kwargs.get("device")
    if device is None:
        device = next((value.device for value in args if isinstance(value, torch.Tensor)), "cpu")
    return torch.device(device)


def default_generator(device: torch.device) -> torch.Generator:
    """Returns torch's generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = getattr(torch, device.type)
    generator: torch.Generator = module.default_generators[module.current_device() if device.index is None else device.index]
    return generator


class _Draws(QuietDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that passes on what does not draw."""

    def __enter__(self) -> _Draws:
        super().__enter__()  # type: ignore[no-untyped-call]
        handlers.active.append(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.abandoned()
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def abandoned(self) -> None:
        if self in handlers.active:
            handlers.active.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = form_of(func)
        if form is NO_DRAW:
            output = func(*args, **kwargs)
            count_writes(func, args)
            return output
        operator, position = form
        if operator is func and position >= 0:
            given = args[position] if position < len(args) else kwargs.get("generator")
            if given is not None:
                return func(*args, **kwargs)
            args = args[:position]  # the generator is the last argument wherever it may be given by position
        return self.draw(func, operator, args, kwargs, takes_generator=position >= 0)

    @abc.abstractmethod
    def skip(self, device: torch.device, drawn: Draw) -> bool:
        """Goes on as if an operator that is skipped had drawn; returns whether that is all, or modes around it have to know."""

    @abc.abstractmethod
    def draw(self, func: Any, operator: Any, args: Any, kwargs: Any, *, takes_generator: bool) -> Any:
        """Runs an operator that draws, and was given no generator.

        Args:
            func: The operator.
            operator: The overload of it that takes a generator, if any does.
            args: Positional arguments, without the generator.
            kwargs: Keyword arguments.
            takes_generator: Whether ``operator`` does.
        """


def call_with(
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    generator: torch.Generator,
    *,
    takes_generator: bool,
    is_draw: bool = True,
) -> Any:
    """Lets an operator draw from a generator, which must be of the right device.

    Args:
        call: The operator.
        args: Its arguments, without a generator.
        kwargs: Its keyword arguments.
        generator: The generator.
        takes_generator: Whether it takes one; if not, the default generator is set for the call.
        is_draw: Whether it is known to draw. If not, it is not kept from running beside others, which it may wait for.
    """
    if takes_generator:
        return call(*args, **{**kwargs, "generator": generator})
    default = default_generator(generator.device)
    with _one_draw if is_draw else nullcontext():
        before, wanted = default.get_state(), generator.get_state()
        if not is_same_state(before, wanted):  # see :mod:`.rng`
            default.set_state(wanted)
        try:
            return call(*args, **kwargs)
        finally:
            after = default.get_state()
            generator.set_state(after)
            if not is_same_state(before, after):
                default.set_state(before)


def draw_apart(call: Callable[..., Any], args: Any, kwargs: Any, *, takes_generator: bool) -> tuple[Any, Draw]:
    """Lets an operator draw what the default generator has next, though other threads draw from it; returns states as well."""
    device = device_of(args, kwargs)
    default, own = default_generator(device), torch.Generator(device)
    state = default.get_state()
    own.set_state(state)
    result = call_with(call, args, kwargs, own, takes_generator=takes_generator)
    # Should another thread have drawn meanwhile, then both drew the same, which they may.
    with _one_draw:
        if is_same_state(default.get_state(), state):
            default.set_state(own.get_state())
    return result, Draw(state, own.get_state())


class RecordDraws(_Draws):  # type: ignore[no-untyped-call]
    """Notes the state that each draw of a forward starts from.

    Attributes:
        states: One a draw.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.states: list[torch.Tensor] = []

    def draw(self, func: Any, operator: Any, args: Any, kwargs: Any, *, takes_generator: bool) -> Any:
        if handlers.active[0] is not self:
            # The mode of the region around this one draws; this one notes from where.
            result = func(*args, **kwargs)
            assert handlers.latest is not None
            self.states.append(handlers.latest.before)
            return result
        result, drawn = draw_apart(operator, args, kwargs, takes_generator=takes_generator)
        self.states.append(drawn.before)
        handlers.latest = drawn
        return result

    def skip(self, device: torch.device, drawn: Draw) -> bool:
        self.states.append(drawn.before)
        if handlers.active[0] is self:
            default_generator(device).set_state(drawn.after)
        return False


class ReplayDraws(_Draws):  # type: ignore[no-untyped-call]
    """Gives each draw of a recompute the state that it started from in forward."""

    def __init__(self, states: list[torch.Tensor] | None) -> None:
        """Prepares to draw.

        Args:
            states: Those of a :class:`RecordDraws`. None where forward ran without, in a program of one thread: then draws
                start from where the default generators are when the recompute begins.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = states or []
        self._count = 0
        self._own: dict[torch.device, torch.Generator] = {}

    def start(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Sets from where the first draw on a default generator's device starts."""
        own = self._own[generator.device] = torch.Generator(generator.device)
        own.set_state(state)

    def draw(self, func: Any, operator: Any, args: Any, kwargs: Any, *, takes_generator: bool) -> Any:
        device = device_of(args, kwargs)
        default = default_generator(device)
        if default.device not in self._own:
            self.start(default, default.get_state())
        own = self._own[default.device]
        if self._count < len(self._states):
            own.set_state(self._states[self._count])
        self._count += 1
        before = own.get_state()
        result = call_with(operator, args, kwargs, own, takes_generator=takes_generator)
        handlers.latest = Draw(before, own.get_state())
        return result

    def skip(self, device: torch.device, drawn: Draw) -> bool:
        default = default_generator(device)
        self.start(default, drawn.after)
        self._count += 1
        return True


def given_generator(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """Returns the generator that an operator was given, None where it draws from a default one."""
    overload, position = form_of(operator)
    if overload is not operator or position < 0:
        return None
    given: torch.Generator | None = args[position] if position < len(args) else kwargs.get("generator")
    return given


def num_draw_modes() -> int:
    """Returns how many modes of this module are active on this thread."""
    return len(handlers.active)


# For each operator that draws for dropout alone: where its probability is among the arguments; -1 for the others.
_dropout_at: dict[int, int] = {}


def drops_nothing(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator, attention for one, could draw for dropout and has none to do."""
    position = _dropout_at.get(id(operator))
    if position is None:
        schema = getattr(operator, "_schema", None)  # operators of operators have none
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        position = _dropout_at[id(operator)] = names.index("dropout_p") if "dropout_p" in names else -1
    if position < 0:
        return False
    return not (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


@unseen
def watch_draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Draw | None] | None:
    """Watches an operator that may draw, and is about to run.

    Args:
        operator: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        Says, when it has run, what it drew; None where it did not. None itself where it will not.
    """
    if drops_nothing(operator, args, kwargs):
        return None
    generator = given_generator(operator, args, kwargs)
    if generator is None and handlers.active and form_of(operator) is not NO_DRAW:
        handlers.latest = None
        return lambda: handlers.latest
    if generator is None:
        device = device_of(args, kwargs)
        if device.type == "meta":
            return None
        generator = default_generator(device)
    if generator.device.type != "cpu" and is_capturing(generator.device.type):
        return None  # of a region that draws anew: others have refused to run
    watched, before = generator, generator.get_state()

    @unseen
    def drawn() -> Draw | None:
        after = watched.get_state()
        return None if is_same_state(before, after) else Draw(before, after)

    return drawn


@unseen
def skip_draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: Draw, *, modes: int) -> None:
    """Moves the random stream past an operator that is not run.

    Args:
        operator: The operator.
        args: Its arguments in this recompute, whose generator need not be the object that forward had.
        kwargs: Its keyword arguments.
        drawn: What it drew in forward.
        modes: How many modes of this module (:func:`num_draw_modes`) have yet to hear of it.
    """
    generator = given_generator(operator, args, kwargs)
    if generator is not None:
        generator.set_state(drawn.after)
        return
    device = device_of(args, kwargs)
    if form_of(operator) is not NO_DRAW:
        handlers.latest = drawn
    elif modes:  # which do not see it draw either
        return
    for mode in reversed(handlers.active[:modes]):
        if mode.skip(device, drawn):
            return
    if modes == 0:
        default_generator(device).set_state(drawn.after)
