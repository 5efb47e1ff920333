"""Random draws where several threads run regions: each operator draws from a generator of the region's own.

Torch's default generators belong to the process. A recompute which sets one back for a while hides it from every other thread,
and a forward whose draws interleave with another thread's cannot be repeated from the start. So where threads besides the main
thread run regions, and where two recomputes overlap, a dispatch mode notes the state at each draw of a forward. In a recompute,
which touches no default generator, each draw gets the noted state. The mode costs microseconds an operator, so a program of one
thread goes by :mod:`.rng` instead.

An operator without a generator argument runs on the default generator, set for the call alone. Drawing operators are known by
their tag (``nondeterministic_seeded``). If untagged operators of other libraries counted too, these would wait for each other
across threads, collectives among them.
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
    """The modes of a thread, outermost first, and the latest draw of any of the modes."""

    def __init__(self) -> None:
        self.active: list[_Draws] = []
        self.latest: Draw | None = None


#: The modes of this thread.
handlers = _Handlers()
_one_draw = threading.Lock()

_Form = tuple[Any, int]
NO_DRAW: _Form = (None, -1)


@functools.cache
def form_of(operator: Any) -> _Form:
    """Returns an operator's overload with a generator argument and that argument's position, or the operator and -1.

    :data:`NO_DRAW` for operators which do not draw.
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
    """Returns the device on which a call of an operator draws."""
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


class _Draws(QuietDispatchMode):
    """A dispatch mode which runs all operators as they are, except draws."""

    def __enter__(self) -> _Draws:
        super().__enter__()
        handlers.active.append(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.abandoned()
        super().__exit__(*exc_info)

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
            args = args[:position]  # the generator is the last argument wherever its position counts
        return self.draw(func, operator, args, kwargs, takes_generator=position >= 0)

    @abc.abstractmethod
    def skip(self, device: torch.device, drawn: Draw) -> bool:
        """Goes on as if a skipped operator had drawn; returns whether the modes around need not be told."""

    @abc.abstractmethod
    def draw(self, func: Any, operator: Any, args: Any, kwargs: Any, *, takes_generator: bool) -> Any:
        """Runs a drawing operator called without a generator.

        Args:
            func: The operator.
            operator: The overload with a generator argument, if any.
            args: Positional arguments, without the generator.
            kwargs: Keyword arguments.
            takes_generator: Whether ``operator`` takes a generator.
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
    """Calls an operator with draws from a given generator, which must be of the right device.

    Args:
        call: The operator.
        args: Positional arguments, without a generator.
        kwargs: Keyword arguments.
        generator: The generator.
        takes_generator: Whether the operator takes a generator; if not, the default generator is set for the call.
        is_draw: Whether the operator is known to draw. If not, it may run beside other operators, for which it may wait.
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
    """Draws the default generator's next numbers, beside draws of other threads; returns the result and the states."""
    device = device_of(args, kwargs)
    default, own = default_generator(device), torch.Generator(device)
    state = default.get_state()
    own.set_state(state)
    result = call_with(call, args, kwargs, own, takes_generator=takes_generator)
    # If another thread has drawn meanwhile, both drew the same, which is allowed.
    with _one_draw:
        if is_same_state(default.get_state(), state):
            default.set_state(own.get_state())
    return result, Draw(state, own.get_state())


class RecordDraws(_Draws):
    """Notes the state at the start of each draw of a forward.

    Attributes:
        states: One state a draw.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states: list[torch.Tensor] = []

    def draw(self, func: Any, operator: Any, args: Any, kwargs: Any, *, takes_generator: bool) -> Any:
        if handlers.active[0] is not self:
            # The mode of the region around draws; this mode notes the state.
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


class ReplayDraws(_Draws):
    """Gives each draw of a recompute the state at its start in forward."""

    def __init__(self, states: list[torch.Tensor] | None) -> None:
        # Without states, as in a program of one thread, draws start where the default generators stand as the recompute begins.
        super().__init__()
        self._states = states or []
        self._count = 0
        self._own: dict[torch.device, torch.Generator] = {}

    def start(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Sets the state of the first draw on a default generator's device."""
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
    """Returns the generator among an operator's arguments, None if the operator draws from a default generator."""
    overload, position = form_of(operator)
    if overload is not operator or position < 0:
        return None
    given: torch.Generator | None = args[position] if position < len(args) else kwargs.get("generator")
    return given


def num_draw_modes() -> int:
    """Returns the number of this module's modes active on this thread."""
    return len(handlers.active)


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


@unseen
def watch_draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Draw | None] | None:
    """Watches a possible draw of an operator which is about to run.

    Returns:
        A function to call afterwards, which returns the draw, if any. None for an operator which will not draw.
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
        return None  # in a region which draws anew: others have refused to run
    watched, before = generator, generator.get_state()

    @unseen
    def drawn() -> Draw | None:
        after = watched.get_state()
        return None if is_same_state(before, after) else Draw(before, after)

    return drawn


@unseen
def skip_draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: Draw, *, modes: int) -> None:
    """Moves the random stream past a skipped operator.

    Args:
        operator: The operator.
        args: Positional arguments in this recompute, whose generator may be another object than in forward.
        kwargs: Keyword arguments.
        drawn: The operator's draw in forward.
        modes: The number of this module's modes (:func:`num_draw_modes`) still to be told.
    """
    generator = given_generator(operator, args, kwargs)
    if generator is not None:
        generator.set_state(drawn.after)
        return
    device = device_of(args, kwargs)
    if form_of(operator) is not NO_DRAW:
        handlers.latest = drawn
    elif modes:  # the modes do not see such a draw either
        return
    for mode in reversed(handlers.active[:modes]):
        if mode.skip(device, drawn):
            return
    if modes == 0:
        default_generator(device).set_state(drawn.after)
