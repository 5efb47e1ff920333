"""Kinds of operators: whether an output can stand in for running its operator again.

Most of it is in the schema. A view's output is another face of its input, and an operator that writes does its work by writing:
neither is done by handing out what it returned. What schemas leave out is in :mod:`.unsaid`.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ckpt_hooks._torch import has_effects

from . import unsaid

__all__ = ["SAC_IGNORED_OPS", "Kind", "kind_of"]


class Kind(enum.Enum):
    """What a recompute may do with an operator."""

    #: Does no work, or comes and goes: not part of the sequence that forward and recompute have in common.
    IGNORED = enum.auto()
    #: The same; begins or ends what a profiler shows by a name.
    RANGE = enum.auto()
    #: A cast of a leaf, which autocast makes once and keeps until its block ends: in the sequence or not, as it happens.
    CAST = enum.auto()
    #: Another face of its input: has to be made again, and is not part of that sequence either, since autograd makes some anew
    #: where the base of a view was written to.
    VIEW = enum.auto()
    #: Has to run again, since it writes to its arguments.
    WRITES = enum.auto()
    #: Like those, and neither schema nor versions tell of the writing.
    REWRITES = enum.auto()
    #: Has to run again, since its outputs share the memory of its input, which the schema denies, but not its version counter.
    ALIASES = enum.auto()
    #: Is run again though it need not be: it costs little, and what it returned is not what the user was given, which is
    #: another face of it with a version counter of its own.
    FACTORY = enum.auto()
    #: May be skipped where its output is at hand.
    SAVEABLE = enum.auto()
    #: The same, but the output is complete only when somebody has waited for it: it is kept as it is, and copied nowhere.
    COLLECTIVE = enum.auto()
    #: The same, but it draws random numbers, or may.
    RANDOM = enum.auto()
    #: The same, but it has an effect besides, in an order with others of the kind: it runs again only where a policy insists.
    EFFECT = enum.auto()


def _takes_no_tensor(schema: Any) -> bool:
    return not any("Tensor" in str(argument.type) for argument in schema.arguments)


def kind_of(operator: Any) -> Kind:
    """Returns what a recompute may do with an operator: an ``OpOverload``, or a higher-order operator."""
    if operator in SAC_IGNORED_OPS or operator is unsaid.RECORD_STREAM:
        return Kind.IGNORED
    schema = getattr(operator, "_schema", None)
    if schema is None:  # a higher-order operator
        if has_effects(operator):
            return Kind.EFFECT
        return Kind.SAVEABLE if str(operator) in unsaid.PURE_HIGHER_ORDER else Kind.REWRITES
    library, _, name = schema.name.partition("::")
    if library == "profiler":
        return Kind.RANGE
    if library == "prim" or (name in unsaid.LAYOUT and library == "aten"):
        return Kind.IGNORED
    if library in unsaid.REWRITING or (library == "aten" and name in unsaid.WRITES):
        return Kind.REWRITES
    if schema.is_mutable:
        return Kind.WRITES
    if name in unsaid.ALIASES:
        return Kind.ALIASES
    if any(returned.alias_info is not None for returned in schema.returns):
        return Kind.VIEW
    if name == "_to_copy" and library == "aten":
        return Kind.CAST
    if library == "_c10d_functional":
        return Kind.COLLECTIVE
    if has_effects(operator):
        return Kind.EFFECT
    if library == "aten" and (name.endswith("_like") or name in unsaid.BLANK or _takes_no_tensor(schema)):
        return Kind.FACTORY
    draws = torch.Tag.nondeterministic_seeded in operator.tags or library not in unsaid.TAGGED
    return Kind.RANDOM if draws else Kind.SAVEABLE
