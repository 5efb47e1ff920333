"""The cost of running an operator again: floating-point operations, and ten for each byte moved."""

from __future__ import annotations

from ckpt_hooks._core.events import Operator

__all__ = ["BYTE", "cost_of"]

#: Operations for which a byte is moved: about the ratio of the two speeds of an accelerator. Without it pointwise operators, which
#: are most of what a recompute of convolutions runs, would be free.
BYTE = 10


def cost_of(operator: Operator) -> float:
    """Returns the cost of an operator."""
    if operator.is_view:
        return 0.0
    moved = sum(tensor.nbytes for tensor in (*operator.inputs, *operator.outputs))
    return BYTE * moved + _count(operator)


def _count(operator: Operator) -> float:
    shapes = [tensor.shape for tensor in operator.inputs]
    name = operator.name.removeprefix("aten.").partition(".")[0]
    if None in shapes:
        return 0.0
    if name in ("mm", "bmm"):
        return 2.0 * shapes[0].numel() * shapes[1][-1]
    if name in ("addmm", "baddbmm"):
        return 2.0 * shapes[1].numel() * shapes[2][-1]
    if name == "convolution":
        (out,) = (one.shape for one in operator.outputs)
        return 2.0 * out.numel() * shapes[1][1:].numel()
    if "attention" in name:
        query, key = shapes[0], shapes[1]
        return 4.0 * query.numel() * key[-2]
    return float(sum(one.shape.numel() for one in operator.outputs if one.shape is not None))
