"""Views of parameters in a graph, as ``MmBackward0`` of a linear layer saves one: by the nodes of views in between."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._torch.autograd import LEAF_NODE

__all__ = ["ParameterViews"]

_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class ParameterViews:
    """The views of leaves that require grad which a node reads, by their shapes."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._left: list[torch.Size] | None = None

    def take(self, shape: torch.Size | None) -> bool:
        """Whether a tensor of a shape that the node has saved is such a view. Each view counts once.

        A node may have saved another argument of the shape instead, one that requires no grad: then no edge leads to it.
        """
        if self._left is None:
            self._left = _views_read_by(self._node)
        if shape not in self._left:
            return False
        self._left.remove(shape)
        return True


def _views_read_by(node: Any) -> list[torch.Size]:
    shapes: list[torch.Size] = []
    if any(edge is None for edge, _ in node.next_functions):
        return shapes
    for edge, index in node.next_functions:
        inner = edge
        while inner is not None and _is_view(type(inner).__name__):
            inner = inner.next_functions[0][0]
        if inner is not edge and type(inner) is LEAF_NODE:
            shapes.append(torch.Size(edge._input_metadata[index].shape))
    return shapes


@functools.cache
def _is_view(node: str) -> bool:
    """Whether a node is that of an operator that returns a view, by the node's name, as in ``TransposeBackward0``."""
    name = _WORD.sub("_", node.partition("Backward")[0]).lower()
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"_{name}", None)
    return packet is not None and any(facts_of(getattr(packet, overload)).is_view for overload in packet.overloads())
