"""Kinds of operators: whether an output can stand in for running its operator again.

Most kinds follow from the schema. A view shares its input's memory, and a writing operator does its work by writing: to return
a kept output would do neither. Facts missing in schemas are in :mod:`.schema_gaps`.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ckpt_hooks._torch.functions import has_effects

from . import schema_gaps

__all__ = ["SAC_IGNORED_OPS", "Kind", "operator_kind"]


class Kind(enum.Enum):
    """The actions open to a recompute for an operator."""

    #: Does no work, or comes and goes: not part of the common sequence of forward and recompute.
    IGNORED = enum.auto()
    #: The same; begins or ends a named range of a profiler.
    RANGE = enum.auto()
    #: A cast of a leaf, which autocast makes once and keeps until its block ends: sometimes in the sequence, sometimes not.
    CAST = enum.auto()
    #: A view of its input: has to be made again, and is not part of the sequence either, since autograd makes some views anew
    #: where their base was written to.
    VIEW = enum.auto()
    #: Has to run again, since it writes to its arguments.
    WRITES = enum.auto()
    #: Like ``WRITES``, but neither schema nor versions tell of the write.
    REWRITES = enum.auto()
    #: Has to run again, since its outputs share the input's memory, which the schema denies, but not the version counter.
    ALIASES = enum.auto()
    #: Runs again without need: it costs little, and the user got not the result itself but a view with a version counter of its
    #: own.
    FACTORY = enum.auto()
    #: May be skipped where its output is at hand.
    SAVEABLE = enum.auto()
    #: The same, but the output is complete only after a wait: it is kept as it is, and copied nowhere.
    COLLECTIVE = enum.auto()
    #: The same, but draws random numbers, or may.
    RANDOM = enum.auto()
    #: The same, but has an effect, ordered with others of this kind: runs again only where a policy insists.
    EFFECT = enum.auto()


def _takes_no_tensor(schema: Any) -> bool:
    return not any("Tensor" in str(argument.type) for argument in schema.arguments)


def operator_kind(operator: Any) -> Kind:
    """Returns the kind of an operator: an ``OpOverload``, or a higher-order operator."""
    if operator in SAC_IGNORED_OPS or operator is schema_gaps.RECORD_STREAM:
        return Kind.IGNORED
    schema = getattr(operator, "_schema", None)
    if schema is None:  # a higher-order operator
        if has_effects(operator):
            return Kind.EFFECT
        return Kind.SAVEABLE if str(operator) in schema_gaps.PURE_HIGHER_ORDER else Kind.REWRITES
    library, _, name = schema.name.partition("::")
    if library == "profiler":
        return Kind.RANGE
    if library == "prim" or (name in schema_gaps.LAYOUT and library == "aten"):
        return Kind.IGNORED
    if library in schema_gaps.REWRITING or (library == "aten" and name in schema_gaps.WRITES):
        return Kind.REWRITES
    if schema.is_mutable:
        return Kind.WRITES
    if name in schema_gaps.ALIASES:
        return Kind.ALIASES
    if any(returned.alias_info is not None for returned in schema.returns):
        return Kind.VIEW
    if name == "_to_copy" and library == "aten":
        return Kind.CAST
    if library == "_c10d_functional":
        return Kind.COLLECTIVE
    if has_effects(operator):
        return Kind.EFFECT
    if library == "aten" and (name.endswith("_like") or name in schema_gaps.UNINITIALIZED or _takes_no_tensor(schema)):
        return Kind.FACTORY
    draws = torch.Tag.nondeterministic_seeded in operator.tags or library not in schema_gaps.TAGGED
    return Kind.RANDOM if draws else Kind.SAVEABLE
