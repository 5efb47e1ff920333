"""``checkpoint_loop``: runs many steps and keeps few states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch

from ckpt_hooks._core.misuse import Misuse, add_note, check_runs, check_signature, checked_integer, described_as, wrong
from ckpt_hooks._function.contexts import noop_context_fn
from ckpt_hooks._tensors.nested import leaves_of, named_entries, with_entries

from .curried import MADE, PLAIN, Curried
from .running import run

State = TypeVar("State")


@overload
def checkpoint_loop(step: Callable[[State], State], state: State, n: int, slots: int | None = None) -> State: ...


@overload
def checkpoint_loop(
    step: Callable[[State, Any], tuple[State, Any]],
    state: State,
    n: int | None = None,
    slots: int | None = None,
    *,
    xs: Any,
) -> tuple[State, Any]: ...


def checkpoint_loop(
    step: Callable[..., Any], state: Any, n: int | None = None, slots: int | None = None, *, xs: Any = None
) -> Any:
    """Runs ``state = step(state)`` ``n`` times and keeps about ``slots`` states for backward.

    For rollouts and recurrent networks. Steps may have an input and an output each, as in ``jax.lax.scan``::

        h, ys = checkpoint_loop(step, h, xs=inputs, slots=16)  # h, y = step(h, x) for each x, and ys = torch.stack([y, ...])

    Backward recomputes the other states by the binomial schedule, which needs the fewest calls of ``step``: for 256 steps and
    16 slots at most 853 calls, of which 256 in forward. With ``slots`` near the square root of ``n`` each step runs at most
    four times. Other behavior is as for :func:`ckpt_hooks.checkpoint`.

    Kept until the graph is freed:
        ``slots`` states, including the first, what autograd saves in the last step, ``xs``, of which inputs are views, and the
        outputs. Backward adds what autograd saves in one step, and a few states in transit.

    Args:
        step: The function of one step, ``step(state)``; with ``xs``, ``step(state, x)`` that returns ``(state, y)``.
            ``checkpoint(...)(step)`` sets options of the regions; a policy says what to keep of a step while backward is at it.
        state: A tensor, or lists, tuples, dicts and dataclasses of tensors and other values, at any depth.
        n: The number of steps. With ``xs`` it may be left out.
        slots: The number of states to keep, at least 2. None means the square root of ``n``.
        xs: The inputs of the steps: a list with an input for each step, or a tensor, or a tuple, dict or dataclass of tensors,
            cut along the first dimension; other values there go to each step. Inputs that ``step`` takes from an iterator
            itself would be other inputs in a recompute.

    Returns:
        The state after the last step; with ``xs`` also the outputs. Tensors are stacked along a new first dimension, within
        tuples, lists, dicts and dataclasses. Of other values there is a list, or None if all are None. Without any step the
        outputs are None.

    Raises:
        TypeError: If ``step`` is not a function, ``xs`` is none of these, ``step`` returns no pair with ``xs``, or outputs of
            another structure in some step. Errors of ``step`` have a note with the number of the step, since Python 3.11.
        ValueError: If ``n`` or ``slots`` is not an integer or is too small, ``n`` or the tensors of ``xs`` disagree on the
            number of steps, or tensors of the outputs have different shapes.

    Note:
        Under FSDP2 put the loop inside a unit; ``step`` must not call units of its own.

        Source: Griewank and Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26 (1), 2000.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint_loop
        >>> cell, inputs = torch.nn.GRUCell(4, 4), torch.randn(100, 2, 4)
        >>> def step(h, x):
        ...     h = cell(x, h)
        ...     return h, h.square().mean()
        >>> h, losses = checkpoint_loop(step, torch.zeros(2, 4), xs=inputs, slots=8)
        >>> losses.sum().backward()
        >>> losses.shape
        torch.Size([100])
    """
    if not callable(step):
        raise Misuse.NO_FUNCTION.error(step, form="checkpoint_loop", right="checkpoint_loop(step, state, n, slots)")
    check_runs(step)
    inputs = None
    if xs is None:
        check_signature(step, "step", "state")
        steps = checked_integer(n, "n", "Pass the number of steps, or the inputs of the steps as xs.", least=0)
    else:
        inputs = _rows_of(xs)
        check_signature(step, "step", "state, x")
        steps = len(inputs)
        if n is not None and checked_integer(n, "n", least=0) != steps:
            raise wrong(n, "n", f"the number of inputs ({steps})", "Leave it out.", ValueError)
    held = max(2, math.isqrt(steps)) if slots is None else checked_integer(slots, "slots", least=2)
    part = _LoopPart(_Step.of(step), 0, steps, held)
    if inputs is None:
        return part(state) if steps else state
    if not steps:
        return state, None
    state, outputs = part(state, inputs)
    return state, _stacked(outputs)


def first_part(steps: int, slots: int) -> int:
    """Returns the number of steps to run before the next state to hold, for the fewest calls in backward."""
    repeats = 1  # the most repeats of any step, the repetition number of Griewank and Walther
    while math.comb(slots + repeats, slots) < steps:
        repeats += 1
    # Several numbers may give the fewest calls. This is the smallest: after it, with one slot less, at most
    # ``comb(slots + repeats - 1, slots - 1)`` steps fit.
    return max(1, math.comb(slots + repeats - 2, slots), steps - math.comb(slots + repeats - 1, slots - 1))


@dataclasses.dataclass(frozen=True)
class _Step:
    """The function of a step, and the options of the regions around several steps."""

    call: Callable[..., Any]
    around: Curried

    @staticmethod
    def of(step: Any) -> _Step:
        if not isinstance(step, MADE):
            return _Step(step, PLAIN)
        region = step._region
        if region.options.policy is None and region.context_fn is noop_context_fn:
            return _Step(step.__wrapped__, region)
        return _Step(step, Curried(region.options.replaced(policy=None), noop_context_fn))


class _LoopPart:
    __slots__ = ("__qualname__", "count", "slots", "start", "step")

    def __init__(self, step: _Step, start: int, count: int, slots: int) -> None:
        self.step, self.start, self.count, self.slots = step, start, count, slots
        self.__qualname__ = f"checkpoint_loop[{start}:{start + count}]"

    def __call__(self, state: Any, inputs: Sequence[Any] | None = None) -> Any:
        start, left, slots, around = self.start, self.count, self.slots, self.step.around
        outputs: list[Any] = []
        while left > 1:
            count = first_part(left, slots)
            part = _LoopPart(self.step, start, count, slots)
            if inputs is None:
                state = run(part, (state,), {}, around.options, around.context_fn)
            else:
                state, made = run(part, (state, inputs[:count]), {}, around.options, around.context_fn)
                outputs, inputs = [*outputs, *made], inputs[count:]
            start, left, slots = start + count, left - count, slots - 1
        # The last step is no region, since backward needs its activations first.
        try:
            if inputs is None:
                return self.step.call(state)
            result = self.step.call(state, inputs[0])
        except Exception as error:
            add_note(error, f"In step {start} of checkpoint_loop.")
            raise
        if not (isinstance(result, tuple) and len(result) == 2):
            raise Misuse.NO_PAIR.error(result, step=start)
        return result[0], [*outputs, result[1]]


def _rows_of(xs: Any) -> list[Any]:
    """Returns the input of each step."""
    if isinstance(xs, list):
        return xs
    sizes = {leaf.shape[0] if leaf.dim() else -1 for leaf in leaves_of(xs) if isinstance(leaf, torch.Tensor)}
    if not sizes:
        wanted = "a list, a tensor, or a tuple, dict or dataclass of tensors"
        raise wrong(xs, "xs", wanted, "Write a list with an input for each step: list(...).")
    if len(sizes) > 1 or -1 in sizes:
        wanted = "tensors with equal numbers of rows, a row for each step"
        raise wrong(xs, "xs", wanted, "Put a tensor that all steps share into the state, or let step hold it.", ValueError)
    return _rows_in(xs, sizes.pop())


def _rows_in(value: Any, count: int) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return list(value.unbind(0))  # a single autograd node, with a single gradient, for all rows; ``value[row]`` makes many
    entries = named_entries(value)
    if entries is None:
        return [value] * count
    columns = [_rows_in(entry, count) for _, entry in entries]
    return [with_entries(value, [column[row] for column in columns]) for row in range(count)]


def _stacked(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        for number, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                raise Misuse.OTHER_OUTPUT.error(value, step=number, first=described_as(first))
            if value.shape != first.shape:
                raise Misuse.OTHER_OUTPUT.error(value, ValueError, step=number, first=described_as(first))
        return torch.stack(list(values))
    entries = named_entries(first)
    if entries is None:
        return None if all(value is None for value in values) else list(values)
    names = [name for name, _ in entries]
    rows = [named_entries(value) if type(value) is type(first) else None for value in values]
    for number, row in enumerate(rows):
        if row is None or [name for name, _ in row] != names:
            raise Misuse.OTHER_OUTPUT.error(values[number], step=number, first=described_as(first))
    return with_entries(first, [_stacked([row[at][1] for row in rows if row is not None]) for at in range(len(names))])
