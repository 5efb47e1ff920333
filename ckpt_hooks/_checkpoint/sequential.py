"""``checkpoint_sequential``: runs functions one after the other, in segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar, overload

import torch
from typing_extensions import Unpack

from ckpt_hooks._core.misuse import Misuse, integer_in, reentrant_error, unknown_error, wrong

from .checkpoint import checkpoint

R = TypeVar("R")
_Functions = torch.nn.Sequential | torch.nn.ModuleList | Sequence[Callable[[Any], Any]] | Iterator[Callable[[Any], Any]]


# For type checkers: the result has the type that the last function of a tuple returns. A list has one type for all functions,
# and ``Module.__call__`` returns Any, so the second overload returns Any.
@overload
def checkpoint_sequential(
    functions: tuple[Unpack[tuple[Callable[[Any], Any], ...]], Callable[[Any], R]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
) -> R: ...


@overload
def checkpoint_sequential(
    functions: _Functions,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
) -> Any: ...


def checkpoint_sequential(
    functions: _Functions,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs functions one after the other, in segments. Each segment but the last is a region.

    Kept until the graph is freed: the input of each segment, and all activations of the last, which backward needs first.

    Args:
        functions: The functions in order, each called with the output of the one before: a ``torch.nn.Sequential``, a
            ``torch.nn.ModuleList`` or a sequence of callables.
        segments: The number of segments. The last takes the remainder. The square root of the number of functions is a good
            start.
        input: The input of the first function.
        use_reentrant: None or False, as for :func:`checkpoint`.
        preserve_rng_state: As for :func:`checkpoint`.
        **kwargs: Accepts nothing; unknown options raise.

    Returns:
        The result of the last function.

    Raises:
        TypeError: If more than one input is given, or ``functions`` are not callables in order.
        ValueError: If ``segments`` is not between 1 and the number of functions, or an option is unknown.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint_sequential
        >>> layers = [torch.nn.Linear(4, 4) for _ in range(9)]
        >>> y = checkpoint_sequential(layers, 3, torch.ones(2, 4, requires_grad=True))
    """
    if kwargs:
        advice = "For other options, call each segment by itself: `checkpoint(policy=...)(function)(input)`."
        raise unknown_error(kwargs, ["use_reentrant", "preserve_rng_state"], "checkpoint_sequential", advice)
    if use_reentrant is not None and not isinstance(use_reentrant, bool):
        raise TypeError(
            "checkpoint_sequential takes one input, but got another positional argument of type "
            f"{type(use_reentrant).__name__} in the place of use_reentrant. Pack inputs into a tuple that the first function "
            "unpacks."
        )
    if use_reentrant:
        raise reentrant_error(use_reentrant)
    # These types are iterable, but a set has no order, and a mapping iterates over its keys.
    if not hasattr(functions, "__iter__") or isinstance(functions, (type, Set, Mapping, torch.nn.ModuleDict)):
        raise Misuse.STEPS.error(functions)
    steps: list[Callable[[Any], Any]] = list(functions)
    for at, step in enumerate(steps):
        if not callable(step) or (isinstance(step, type) and issubclass(step, torch.nn.Module)):
            raise wrong(step, f"functions[{at}]", "a function or a module", "Leave it out, or pass torch.nn.Identity().")
    number = integer_in(segments)
    if number is None or not 1 <= number <= max(len(steps), 1):
        wanted = f"an integer from 1 to the number of functions ({len(steps)})"
        raise wrong(segments, "segments", wanted, "Pass a number in this range.", ValueError)
    size = len(steps) // number
    for start in range(0, size * (number - 1), max(size, 1)):
        input = checkpoint(_Segment(steps[start : start + size], start), input, preserve_rng_state=preserve_rng_state)
    return _Segment(steps[size * (number - 1) :], size * (number - 1))(input)


class _Segment:
    __slots__ = ("__qualname__", "steps")

    def __init__(self, steps: list[Callable[[Any], Any]], start: int) -> None:
        self.steps = steps
        self.__qualname__ = f"checkpoint_sequential[{start}:{start + len(steps)}]"

    def __call__(self, value: Any) -> Any:
        for step in self.steps:
            value = step(value)
        return value
