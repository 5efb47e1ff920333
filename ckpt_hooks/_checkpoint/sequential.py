"""``checkpoint_sequential`` and ``checkpoint_loop``: functions in a row, in segments; and many steps on few states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch

from ckpt_hooks._core.callables import check_runs
from ckpt_hooks._core.misuse import Misuse, check_signature, checked_integer, integer_in, reentrant_error, unknown_error, wrong
from ckpt_hooks._function.contexts import noop_context_fn
from ckpt_hooks._options import DEFAULT_OPTIONS

from .checkpoint import checkpoint
from .running import run


def checkpoint_sequential(
    functions: torch.nn.Sequential | torch.nn.ModuleList | Sequence[Callable[[Any], Any]],
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
            f"{type(use_reentrant).__name__}, as use_reentrant. Pack several into a tuple that the first function unpacks."
        )
    if use_reentrant:
        raise reentrant_error(use_reentrant)
    # A set has no order, the others give names.
    if not hasattr(functions, "__iter__") or isinstance(functions, (type, Set, Mapping, torch.nn.ModuleDict)):
        raise Misuse.STEPS.error(functions)
    steps: list[Callable[[Any], Any]] = list(functions)
    for at, step in enumerate(steps):
        if not callable(step) or (isinstance(step, type) and issubclass(step, torch.nn.Module)):
            raise wrong(step, f"functions[{at}]", "a function or a module", "Leave it out, or pass one that returns its input.")
    number = integer_in(segments)
    if number is None or not 1 <= number <= max(len(steps), 1):
        wanted = f"an integer from 1 to the number of functions ({len(steps)})"
        raise wrong(segments, "segments", wanted, "Pass one of these.", ValueError)
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


State = TypeVar("State")


def checkpoint_loop(step: Callable[[State], State], state: State, n: int, slots: int) -> State:
    """Runs ``state = step(state)`` ``n`` times and keeps about ``slots`` states for backward.

    For rollouts and recurrent networks. Backward recomputes the other states by the binomial schedule, which needs the fewest
    calls of ``step``: for 256 steps and 16 slots at most 853 calls, of which 256 in forward. With ``slots`` near the square
    root of ``n`` each step runs at most four times. Other behavior is as for :func:`ckpt_hooks.checkpoint`.

    Kept until the graph is freed:
        ``slots`` states, including the first, and what autograd saves in the last step. Backward adds what autograd saves in
        one step, and a few states in transit.

    Args:
        step: The function of one step. To know the number of a step, count in the state.
        state: A tensor, or lists, tuples, dicts and dataclasses of tensors and other values, at any depth.
        n: The number of steps.
        slots: The number of states to keep, at least 2.

    Returns:
        The state after the last step.

    Raises:
        TypeError: If ``step`` is not a function.
        ValueError: If ``n`` or ``slots`` is not an integer or is too small.

    Note:
        Under FSDP2 put the loop inside a unit; ``step`` must not call units of its own.

        Source: Griewank and Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26 (1), 2000.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint_loop
        >>> cell, inputs = torch.nn.GRUCell(4, 4), torch.randn(100, 2, 4)
        >>> def step(state):
        ...     h, t = state
        ...     return cell(inputs[t], h), t + 1
        >>> h, t = checkpoint_loop(step, (torch.zeros(2, 4), 0), n=100, slots=8)
        >>> h.sum().backward()
    """
    if not callable(step):
        raise Misuse.NO_FUNCTION.error(step, form="checkpoint_loop", right="checkpoint_loop(step, state, n, slots)")
    check_runs(step)
    check_signature(step, "step", "state")
    checked_integer(n, "n", least=0)
    checked_integer(slots, "slots", least=2)
    return _LoopPart(step, 0, n, slots)(state) if n else state


def first_part(steps: int, slots: int) -> int:
    """Returns how many of some steps to run before the next state is held, for the fewest calls."""
    repeats = 1  # of a step, at most
    while math.comb(slots + repeats, slots) < steps:
        repeats += 1
    # The least optimal number: the steps after it have a slot less.
    return max(1, math.comb(slots + repeats - 2, slots), steps - math.comb(slots + repeats - 1, slots - 1))


class _LoopPart:
    __slots__ = ("__qualname__", "count", "slots", "start", "step")

    def __init__(self, step: Callable[[Any], Any], start: int, count: int, slots: int) -> None:
        self.step, self.start, self.count, self.slots = step, start, count, slots
        self.__qualname__ = f"checkpoint_loop[{start}:{start + count}]"

    def __call__(self, state: Any) -> Any:
        start, left, slots = self.start, self.count, self.slots
        while left > 1:
            part = first_part(left, slots)
            state = run(_LoopPart(self.step, start, part, slots), (state,), {}, DEFAULT_OPTIONS, noop_context_fn)
            start, left, slots = start + part, left - part, slots - 1
        return self.step(state)  # in no further region: backward needs it first
