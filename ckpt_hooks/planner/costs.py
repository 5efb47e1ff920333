"""The cost of running an operator again: floating-point operations, and ten for each byte moved; or measured seconds."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_hooks._core.events import Operator

__all__ = ["BYTE", "by_seconds", "bytes_moved", "cost_of"]

#: The operations in whose time a byte is moved, about, on an accelerator. Without it pointwise operators would be free, which
#: are most of what a recompute of convolutions runs.
BYTE = 10


def bytes_moved(operator: Operator) -> int:
    """Returns the bytes that an operator reads and writes."""
    return 0 if operator.is_view else sum(tensor.nbytes for tensor in (*operator.inputs, *operator.outputs))


def cost_of(operator: Operator) -> float:
    """Returns the cost of an operator."""
    return 0.0 if operator.is_view else BYTE * bytes_moved(operator) + _count(operator)


def by_seconds(runs: Sequence[tuple[float, float, float]]) -> list[float]:
    """Returns costs by measured seconds, never less than the price of the bytes moved.

    Args:
        runs: Of each run: the cost by operations, the bytes moved, and the seconds.
    """
    total = sum(seconds for *_, seconds in runs)
    scale = sum(cost for cost, *_ in runs) / total if total else 0.0
    return [max(seconds * scale, BYTE * moved) if cost else 0.0 for cost, moved, seconds in runs]


def _count(operator: Operator) -> float:
    """Returns the floating-point operations: those of products by shape, and one for each element of other results."""
    inputs = [tensor.shape for tensor in operator.inputs if tensor.shape is not None]
    outputs = [tensor.shape for tensor in operator.outputs if tensor.shape is not None]
    name = operator.name.removeprefix("aten.").partition(".")[0]
    if name in ("mm", "bmm") and len(inputs) == 2:
        return 2.0 * inputs[0].numel() * inputs[1][-1]
    if name in ("addmm", "baddbmm") and len(inputs) == 3:
        return 2.0 * inputs[1].numel() * inputs[2][-1]
    if name == "convolution" and len(inputs) > 1 and outputs:
        return 2.0 * outputs[0].numel() * inputs[1][1:].numel()
    if "attention" in name and len(inputs) > 2:
        return 4.0 * inputs[0].numel() * inputs[1][-2]
    return float(sum(shape.numel() for shape in outputs))
