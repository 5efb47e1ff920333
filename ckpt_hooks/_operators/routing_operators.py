"""Operators on which routes and shapes depend: choices among values, results with a shape or number read from data.

The inputs of these operators are continuous, their results are not. A last bit, or a tie which comes out otherwise, changes a
result altogether: another expert, another number of rows. Everything behind takes other shapes, or other rows of the same
shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["advice_for", "chooses", "is_routing", "routes"]

#: Choose among values, or count values in bins. Names are of ``aten``.
_CHOICES = frozenset(
    {
        *("argmax", "argmin", "bincount", "bucketize", "histc", "kthvalue", "mode", "multinomial", "nonzero_static"),
        *("searchsorted", "sort", "topk"),
    }
)
#: The same, for overloads which return indices too (``max.dim``).
_CHOICES_WITH_INDICES = frozenset({"cummax", "cummin", "max", "median", "min", "nanmedian"})

#: Have a tag for shapes from data, and take no part in routing. ``index`` reads rows by indices or masks made by the others.
_NO_CHOICES = frozenset({"_ctc_loss", "index", "linalg_lstsq"})

#: Turn numbers into truth values.
_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
_CAST = "_to_copy"

_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def is_routing(operator: Any) -> bool | None:
    """Whether routes or shapes depend on the results of an operator; None if the arguments tell (:func:`routes`).

    Operators of other libraries are known by their tags.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    library, _, name = schema.name.partition("::")
    if library == "aten":
        if name in _CHOICES or (name in _CHOICES_WITH_INDICES and len(schema.returns) == 2):
            return True
        if name in _COMPARISONS or name == _CAST:
            return None
        if name in _NO_CHOICES:
            return False
    return any(tag in operator.tags for tag in _TAGS)


def routes(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether routes or shapes may depend on one run of an operator for which :func:`is_routing` returns None.

    These runs are comparisons of floating-point numbers, casts of such numbers to integers or truth values, and copies to the
    host, where Python reads numbers.
    """
    if operator._schema.name != f"aten::{_CAST}":
        return any(map(_has_fractions, args))
    tensor, dtype, device = args[0], kwargs.get("dtype"), kwargs.get("device")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex) and _has_fractions(tensor):
        return True
    return device is not None and torch.device(device).type == "cpu" and tensor.device.type != "cpu"


def chooses(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether one run of an operator chooses among floating-point numbers, which a recompute may round otherwise.

    Choices among integers and masks follow from such choices.
    """
    routing = is_routing(operator)
    if not routing:
        return routing is None and routes(operator, args, kwargs)
    name = operator._schema.name
    if not name.startswith("aten::"):
        return any(map(_has_fractions, args))
    return _has_fractions(args[1 if name == "aten::masked_select" else 0])


def _has_fractions(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def advice_for(found: Sequence[str]) -> str:
    """Returns sentences for the error of a recompute which may have taken other routes than forward.

    Args:
        found: The operators by which the recompute chose, with their lines where known.
    """
    return (
        f" The recompute ran {' and '.join(found)} again, on whose result routes and shapes depend: it may have come out "
        "otherwise than in forward, on a tie or by a last bit. Keep such results: pass policy=ckpt_hooks.policies."
        "routing_saveable, or save_from_both_policies(routing_saveable, policy) where there is a policy already."
    )
