"""What there is to know of an operator before it runs: whether its output can stand in for running it again.

Most of it is in the schema. A view's output is another face of its input, and an operator that writes does its work by writing:
neither is done by handing out what it returned. Some schemas do not tell: those are listed here, with what they leave out.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ckpt_hooks._torch import OVERLOAD, has_effects

__all__ = [
    "BLANK",
    "KNOWN",
    "RECORD_STREAM",
    "SAC_IGNORED_OPS",
    "WRITES_UNSAID",
    "Facts",
    "Kind",
    "call_of",
    "drops_from_buffer",
    "facts_of",
    "has_buffered_masks",
    "kind_of",
    "may_be_left_out",
    "same_operator",
    "written_by",
]


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


#: Return memory that nobody has written to yet.
BLANK = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})

#: Tells the allocator that a stream uses a tensor's memory. Its schema has it write to the tensor, in which it changes nothing.
RECORD_STREAM: Any = torch.ops.aten.record_stream.default

#: Operators of these libraries write to tensors that they are given, and neither their schemas nor versions tell:
#: collectives that work in place, and the gathering and freeing of parameters.
_REWRITING = frozenset({"c10d", "fsdp"})

#: Tell how a tensor of another class is laid out, which some keep once they were asked; so do all of ``prim``.
_LAYOUT = frozenset(
    {
        "dim",
        "is_contiguous",
        "is_non_overlapping_and_dense",
        "is_pinned",
        "is_strides_like_format",
        "numel",
        "size",
        "storage_offset",
        "stride",
        "sym_is_contiguous",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
    }
)

#: Update running statistics, which their schemas have as inputs: names of those arguments, by name of operator.
WRITES_UNSAID = dict.fromkeys(
    (
        "batch_norm",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
        "batch_norm_update_stats",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "native_batch_norm",
    ),
    ("running_mean", "running_var"),
)

#: Draw the masks of recurrent layers from a buffer of the device, which they advance though their schemas do not say so; and
#: the one that makes that buffer, whose seed is a number among its arguments.
_BUFFERED_MASKS = frozenset({"_cudnn_init_dropout_state", "_cudnn_rnn", "miopen_rnn"})

#: Operators of operators that compute an output of their own and do nothing else. Others may write to their arguments.
_PURE_HIGHER_ORDER = frozenset({"flex_attention"})

#: Libraries whose operators are tagged where they draw random numbers; those of others are looked at when they run.
_TAGGED = frozenset({"aten", "prims", "_c10d_functional"})

#: Promise autograd that nobody looks at their input any more. A policy may have kept it.
_ALIASES_UNSAID = frozenset({"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})

#: An operator, its kind, and how to call it.
Facts = tuple[Any, Kind, Callable[..., Any]]

#: What was found out so far, by the identity of operators: they hash by a function of Python, integers do not. An entry whose
#: first is another operator is none.
KNOWN: dict[int, Facts] = {}


def _takes_no_tensor(schema: Any) -> bool:
    return not any("Tensor" in str(argument.type) for argument in schema.arguments)


def kind_of(operator: Any) -> Kind:
    """Returns what a recompute may do with an operator: an ``OpOverload``, or a higher-order operator."""
    if operator in SAC_IGNORED_OPS or operator is RECORD_STREAM:
        return Kind.IGNORED
    schema = getattr(operator, "_schema", None)
    if schema is None:  # a higher-order operator
        if has_effects(operator):
            return Kind.EFFECT
        return Kind.SAVEABLE if str(operator) in _PURE_HIGHER_ORDER else Kind.REWRITES
    name = schema.name.partition("::")[2]
    if operator.namespace == "profiler":
        return Kind.RANGE
    if operator.namespace == "prim" or (name in _LAYOUT and operator.namespace == "aten"):
        return Kind.IGNORED
    if operator.namespace in _REWRITING or name in WRITES_UNSAID:
        return Kind.REWRITES
    if schema.is_mutable:
        return Kind.WRITES
    if name in _ALIASES_UNSAID:
        return Kind.ALIASES
    if any(returned.alias_info is not None for returned in schema.returns):
        return Kind.VIEW
    if name == "_to_copy" and operator.namespace == "aten":
        return Kind.CAST
    if operator.namespace == "_c10d_functional":
        return Kind.COLLECTIVE
    if has_effects(operator):
        return Kind.EFFECT
    if operator.namespace == "aten" and (name.endswith("_like") or name in BLANK or _takes_no_tensor(schema)):
        return Kind.FACTORY
    draws = torch.Tag.nondeterministic_seeded in operator.tags or operator.namespace not in _TAGGED
    return Kind.RANDOM if draws else Kind.SAVEABLE


def call_of(operator: Any) -> Callable[..., Any]:
    """Returns what runs an operator: an overload's own callable, which spares one call of Python, where there is one."""
    call: Callable[..., Any] = operator._op if type(operator) is OVERLOAD else operator
    return call


def facts_of(operator: Any) -> Facts:
    """Returns what is known of an operator; found out once."""
    found = KNOWN.get(id(operator))
    if found is None or found[0] is not operator:
        found = KNOWN[id(operator)] = operator, kind_of(operator), call_of(operator)
    return found


def same_operator(one: Any, other: Any) -> bool:
    """Whether two operators are the same, of which one may be given a generator.

    Where threads besides the main one run regions, draws get a generator, by another overload.
    """
    if one is other:
        return True
    packet = getattr(one, "overloadpacket", None)
    return (
        packet is not None
        and packet is getattr(other, "overloadpacket", None)
        and facts_of(other)[1] in (Kind.RANDOM, Kind.FACTORY)
    )


@functools.cache
def _buffered_masks(operator: Any) -> tuple[int, int] | None:
    """Returns where dropout and training are among the arguments of an operator whose masks come from a buffer."""
    schema: Any = getattr(operator, "_schema", None)
    library, _, name = ("", "", "") if schema is None else schema.name.partition("::")
    if library != "aten" or name not in _BUFFERED_MASKS:
        return None
    names = [argument.name for argument in schema.arguments]
    return names.index("dropout"), names.index("train")


def drops_from_buffer(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call drops out by masks from a buffer that it advances: run again, it would drop other elements."""
    found = _buffered_masks(operator)
    if found is None:
        return False
    dropout, train = (
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in zip(found, ("dropout", "train"), strict=True)
    )
    return bool(dropout and train)


def has_buffered_masks(operator: Any) -> bool:
    """Whether an operator may do that (:func:`drops_from_buffer`)."""
    return _buffered_masks(operator) is not None


def may_be_left_out(operator: Any) -> bool:
    """Whether random streams and the world are the same without an operator."""
    if getattr(operator, "_schema", None) is None:  # a higher-order operator, which may do anything
        return False
    kind = facts_of(operator)[1]
    if kind is Kind.RANDOM or kind is Kind.EFFECT or (kind is Kind.WRITES and operator.namespace not in _TAGGED):
        return False
    return torch.Tag.nondeterministic_seeded not in operator.tags


def written_by(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments of a call that an operator writes to, as is known of it; all where nothing is."""
    kind, schema = facts_of(operator)[1], getattr(operator, "_schema", None)
    library, _, name = ("", "", "") if schema is None else schema.name.partition("::")
    unsaid = WRITES_UNSAID.get(name, ()) if library == "aten" else ()
    if kind is not Kind.WRITES and not unsaid:
        return [args, kwargs]
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(operator._schema.arguments)
        if argument.name in unsaid or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
