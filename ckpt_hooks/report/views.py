"""Views of parameters in a graph, as ``MmBackward0`` of a linear layer saves one: by the nodes of views in between."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._torch.graphs import LEAF_NODE

__all__ = ["views_of_leaves"]

_WORD = re.compile(r"(?<!^)(?=[A-Z])")


def views_of_leaves(node: Any) -> list[torch.Size]:
    """Returns the shapes of those arguments of a node which are views of leaves that require grad."""
    shapes = []
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
