"""Operators with a shape from data, whose replay may come to another shape: another route was taken.

Sizes read by Python are constants on a tape, and so are loops. So a replay of other routes cannot come to the results of
forward. The shapes of forward are noted for the few operators which have shapes from data, and a replay with another shape
names the operators by which it chose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._operators.facts import routing_advice
from ckpt_hooks.errors import DeterminismError

from .values import Op, Value, flatten, values_on_tape


class Routed(NamedTuple):
    """The results of a routing operator in forward."""

    shapes: list[tuple[int, ...]] | None  # the shapes of the results; None for sizes unknown while torch traces
    chose: bool  # whether the operator chose among floating-point numbers


def routed(op: Op, args: Any, kwargs: Any, out: Any) -> Routed:
    """Returns a note on the results of an operator which has run in forward."""
    return Routed(_shapes_of(out), op.facts.chooses(args, kwargs))


def check_shapes(frame: Frame, op: Op, out: Any) -> None:
    """Compares the shapes of a replay of a frame with the shapes of forward."""
    expected, found = op.routed.shapes, _shapes_of(out)
    if expected is None or found is None or expected == found:
        return
    region, operators = format_path(frame.path), _choices_above(op)
    error = DeterminismError(
        f"region {'/'.join(region)!r}: the replay of {op.facts.operator} came to a result of another shape than forward.\n"
        f"shape in forward: {_in_words(expected)}\nshape in the replay: {_in_words(found)}\n"
        f"{routing_advice(operators).strip()}",
        region=region,
        index=op.number,
        expected=f"{op.facts.operator} with a result of shape {_in_words(expected)}",
        found=f"{op.facts.operator} with a result of shape {_in_words(found)}",
    )
    error.routing = tuple(operators)
    raise error


def _choices_above(op: Op) -> list[str]:
    """Returns the names of the nearest operators which chose among floating-point numbers; comparisons if there are none."""
    chosen: dict[int, Op] = {}
    compared: dict[int, Op] = {}
    seen: set[int] = set()
    todo = [op]
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        routing = current.facts.is_routing
        if routing and current.routed.chose:
            chosen[current.number] = current
            continue
        if routing is None and current.facts.name != "_to_copy":
            compared[current.number] = current
        todo += [above for value in _read_by(current) for above in _makers_of(value)]
    found = chosen or compared or {op.number: op}
    return list(dict.fromkeys(found[number].facts.full_name for number in sorted(found)))


def _read_by(op: Op) -> list[Value]:
    return [value for argument in (*op.args, *op.kwargs.values()) for value in values_on_tape(argument)]


def _makers_of(value: Value | None) -> list[Op]:
    """Returns the operators which made a value or wrote to it, as far as a replay runs them."""
    makers = []
    while value is not None and value.saved is None:
        if value.op is not None:
            makers.append(value.op)
        value = value.before
    return makers


def _shapes_of(out: Any) -> list[tuple[int, ...]] | None:
    shapes = [tuple(one.shape) for one in flatten(out) if isinstance(one, torch.Tensor) and not one.is_nested]
    return shapes if all(type(size) is int for shape in shapes for size in shape) else None


def _in_words(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)
