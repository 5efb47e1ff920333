"""Random draws of recorded regions, operator by operator: noted in forward, and drawn again or anew in a replay."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_hooks._ambient.streams import is_capturing, is_same_state
from ckpt_hooks._ambient.threaded_draws import (
    NO_DRAW,
    call_with,
    default_generator,
    device_of,
    draw_apart,
    form_of,
    given_generator,
    handlers,
)

__all__ = ["OwnStreams", "draw_again", "draw_anew", "draw_noting"]

#: Generators, by identity, with the generators which replace them in a replay.
OwnStreams = dict[int, tuple[torch.Generator, torch.Generator]]


def _refuse_capture(operator: Any, device: torch.device) -> None:
    if device.type != "cpu" and is_capturing(device.type):
        raise RuntimeError(
            f"{operator} was to draw random numbers in a checkpoint_region with preserve_rng_state=True while a CUDA graph is "
            "being captured, when torch forbids to read the state of the device's generator. Pass preserve_rng_state=False to "
            "the region if its replays may draw other numbers; if not, leave the region out of the graph."
        )


def draw_noting(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, shared: bool
) -> tuple[Any, torch.Tensor | None]:
    """Runs an operator which may draw, and notes the state for :func:`draw_again`.

    Args:
        operator: The operator.
        args: Positional arguments.
        kwargs: Keyword arguments.
        shared: Whether other threads may draw from the default generators meanwhile.

    Returns:
        The operator's result, and the state of the generator before the draw; None where nothing was drawn.

    Raises:
        RuntimeError: If a CUDA graph is being captured on the device of the draw.
    """
    generator = given_generator(operator, args, kwargs)
    if generator is None:
        device = device_of(args, kwargs)
        if device.type == "meta":
            return operator(*args, **kwargs), None
        _refuse_capture(operator, device)
        form, position = form_of(operator)
        if shared and not handlers.active and form is not None:
            given = args[:position] if form is operator and position >= 0 else args
            result, drawn = draw_apart(form, given, kwargs, takes_generator=position >= 0)
            return result, drawn.before
        generator = default_generator(device)
    else:
        _refuse_capture(operator, generator.device)
    before = generator.get_state()
    handlers.latest = None
    result = operator(*args, **kwargs)
    if handlers.latest is not None:  # drawn from a generator of a mode around
        return result, handlers.latest.before
    if form_of(operator) is NO_DRAW and is_same_state(before, generator.get_state()):
        return result, None
    return result, before


def draw_again(operator: Any, args: list[Any], kwargs: dict[str, Any], state: torch.Tensor) -> Any:
    """Runs an operator with draws from a noted state; the user's generators do not move.

    Args:
        operator: The operator.
        args: Positional arguments, of which a generator is ignored.
        kwargs: Keyword arguments.
        state: The state returned by :func:`draw_noting`.
    """
    form, position = form_of(operator)
    device = device_of(tuple(args), kwargs)
    _refuse_capture(operator, device)
    own = torch.Generator(default_generator(device).device)
    own.set_state(state)
    if form is None or position < 0:
        return call_with(operator, args, kwargs, own, takes_generator=False)
    return call_with(form, args[:position], kwargs, own, takes_generator=True)


def draw_anew(operator: Any, args: list[Any], kwargs: dict[str, Any], streams: OwnStreams) -> Any:
    """Runs an operator with draws of new numbers; the user's generators do not move.

    While a CUDA graph is being captured no state can be read: then the operator draws from the user's generator.

    Args:
        operator: The operator.
        args: Positional arguments.
        kwargs: Keyword arguments.
        streams: The replay's generators so far; gets more.
    """
    given = given_generator(operator, tuple(args), kwargs)
    device = device_of(tuple(args), kwargs) if given is None else given.device
    if device.type == "meta" or (device.type != "cpu" and is_capturing(device.type)):
        return operator(*args, **kwargs)
    generator = default_generator(device) if given is None else given
    if id(generator) not in streams:
        own = torch.Generator(generator.device)
        own.set_state(generator.get_state())
        streams[id(generator)] = generator, own
    _, own = streams[id(generator)]
    form, position = form_of(operator)
    takes_generator = form is not None and position >= 0
    return call_with(
        form if takes_generator else operator,
        args[:position] if takes_generator else args,
        kwargs,
        own,
        takes_generator=takes_generator,
        is_draw=form is not None,
    )
