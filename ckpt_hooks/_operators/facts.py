"""The facts known of an operator before it runs: the places of tensors, the writes, and the outputs.

Most facts come from schemas. Facts missing or wrong in schemas are in :mod:`.schema_gaps`. Function frames, recorders, policies
and the modes which watch parameters all read this record, made once for each operator.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ckpt_hooks._ambient import switches
from ckpt_hooks._ambient.switches import heeds
from ckpt_hooks._torch.functions import OVERLOAD

from . import schema_gaps
from .reusable_outputs import Kind, operator_kind
from .routing_operators import is_routing

__all__ = ["KNOWN", "OpFacts", "Written", "facts_of", "same_operator"]

#: Kinds whose outputs can stand in for running the operator again; for writing kinds only outputs which are new.
_ASKED = frozenset({Kind.CAST, Kind.SAVEABLE, Kind.COLLECTIVE, Kind.RANDOM, Kind.EFFECT})
_WRITING = frozenset({Kind.WRITES, Kind.REWRITES})


class Written(NamedTuple):
    """An argument written to by an operator.

    Attributes:
        position: The place among positional arguments.
        name: The argument's name.
        counted: Whether the version counts the write.
        overwritten: Whether nothing is left of the old content.
    """

    position: int
    name: str
    counted: bool
    overwritten: bool

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the argument of a call; None where left out."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


class OpFacts:
    """The facts of an operator.

    Attributes:
        is_function: Whether this is a call of a custom ``autograd.Function``, recorded as one operator, which has
            ``rerun`` in place of ``call``.
        operator: The operator.
        call: The callable which runs the operator.
        name: The name, without library and overload.
        kind: The kind.
        tensors: The positions of tensors, for each number of positional arguments.
        lists: Positions of arguments which are lists of tensors.
        full_name: The name, as in ``"aten.mm.default"``.
        keywords: Names of arguments which are tensors or lists of tensors.
        written: The arguments written to.
        single: Whether the operator returns one tensor.
        has_buffered_masks: Whether a call may drop out by masks from a buffer, which a second call would not draw again.
        has_effect: Whether there is an ordered effect, for which results are kept.
        has_shape_from_data: Whether a result has a shape from data, or decides shapes.
        has_fresh: Whether a result is neither an argument nor a view of an argument.
        is_fast: Whether the operator only takes tensors by position and returns tensors.
        is_view: Whether the output is a view of the input, with the same version counter.
        is_detach: Whether the operator is ``detach``. ``tensor.data`` runs ``detach`` too, and has a version of its own.
        is_random: Whether the operator draws random numbers, or may.
        may_drop_out: Whether the operator draws only with a dropout probability.
        is_repeatable: Whether a second run writes the same again.
        may_be_left_out: Whether random streams and the world are the same without the operator.
        is_uninitialized: Whether the result is uninitialised memory.
        is_like: Whether the operator reads only the shape of its first argument.
        is_asked_about: Whether the output can stand in for another run, so that policies are asked.
        is_fresh: Whether all results are new, and maybe worth keeping.
        is_inplace_view: Whether the operator turns a tensor into a view of itself.
        is_mark: Whether the operator only tells the allocator of a stream which uses a tensor.
        is_opaque: Whether the effects on arguments are unknown.
        replaces_storage: Whether a written tensor may be in another storage afterwards.
        is_collective: Whether the result is complete only after a wait.
        is_trusted: Whether outputs are new, or share memory with arguments.
        is_never_kept: Whether the output is a view or alias of the input: the operator runs again whatever a policy says.
        is_routing: Whether routes or shapes depend on the result; None if the arguments tell (:mod:`.routing_operators`).
        looks_at_switches: Whether the result depends on switches of the process which change without notice.
        looks_at_all_switches: Whether all of these switches matter, not only the common ones.
        looks_at_grad: Whether the result depends on the arguments' ``requires_grad``.
    """

    is_function = False
    rerun: Callable[..., list[Any]]
    __slots__ = (
        "call",
        "full_name",
        "has_buffered_masks",
        "has_effect",
        "has_fresh",
        "has_shape_from_data",
        "is_asked_about",
        "is_collective",
        "is_detach",
        "is_fast",
        "is_fresh",
        "is_inplace_view",
        "is_like",
        "is_mark",
        "is_never_kept",
        "is_opaque",
        "is_random",
        "is_repeatable",
        "is_routing",
        "is_trusted",
        "is_uninitialized",
        "is_view",
        "keywords",
        "kind",
        "lists",
        "looks_at_all_switches",
        "looks_at_grad",
        "looks_at_switches",
        "may_be_left_out",
        "may_drop_out",
        "name",
        "operator",
        "replaces_storage",
        "single",
        "tensors",
        "written",
    )

    def __init__(self, operator: Any) -> None:
        self.operator, self.full_name = operator, str(operator)
        # An overload's own callable spares one call of Python.
        self.call: Callable[..., Any] = operator._op if type(operator) is OVERLOAD else operator
        self.kind = kind = operator_kind(operator)
        schema = getattr(operator, "_schema", None)
        namespace, _, name = ("", "", self.full_name) if schema is None else schema.name.partition("::")
        self.name: str = name
        aten = namespace == "aten"
        self.is_opaque = schema is None or (kind is Kind.REWRITES and not aten)
        arguments = [] if schema is None else schema.arguments
        types = [str(argument.type) for argument in arguments]
        positions = tuple(index for index, one in enumerate(types) if one in ("Tensor", "Optional[Tensor]"))
        self.lists = tuple(index for index, one in enumerate(types) if "Tensor" in one and index not in positions)
        self.tensors = [tuple(index for index in positions if index < count) for count in range(len(arguments) + 1)]
        self.keywords = frozenset(arguments[index].name for index in (*positions, *self.lists))
        tags = () if schema is None else operator.tags
        self.is_inplace_view = torch.Tag.inplace_view in tags
        self.replaces_storage = self.name in schema_gaps.REPLACES_STORAGE
        self.is_mark = operator is schema_gaps.RECORD_STREAM
        self.written = () if schema is None or self.is_mark else _written(schema, self.name)
        self.has_fresh = schema is None or any(returned.alias_info is None for returned in schema.returns)
        self.single = schema is not None and [str(returned.type) for returned in schema.returns] == ["Tensor"]
        self.is_view = (
            schema is not None
            and not schema.is_mutable
            and any(returned.alias_info is not None for returned in schema.returns)
            and kind is not Kind.ALIASES
        )
        self.is_never_kept = kind in (Kind.VIEW, Kind.ALIASES)
        self.is_asked_about = kind in _ASKED or (kind in _WRITING and self.has_fresh and not self.is_opaque)
        self.is_fresh = kind in (Kind.SAVEABLE, Kind.RANDOM)
        self.has_effect = kind is Kind.EFFECT
        self.is_detach = self.name == "detach" and self.is_view
        self.is_random = kind in (Kind.RANDOM, Kind.EFFECT) or torch.Tag.nondeterministic_seeded in tags
        self.is_uninitialized = aten and self.name in schema_gaps.UNINITIALIZED
        self.is_like = aten and self.name in schema_gaps.LIKE
        self.may_drop_out = self.is_random and "dropout_p" in {argument.name for argument in arguments}
        self.is_collective = kind is Kind.COLLECTIVE
        self.is_trusted = namespace in schema_gaps.TRUSTED
        self.looks_at_all_switches = not aten or heeds(self.name, switches.FURTHER)
        self.looks_at_switches = self.looks_at_all_switches or heeds(self.name, switches.COMMON)
        self.has_buffered_masks = aten and self.name in schema_gaps.BUFFERED_MASKS
        self.is_routing = is_routing(operator)
        self.has_shape_from_data = self.is_routing is True or torch.Tag.dynamic_output_shape in tags
        self.is_repeatable = self.name in schema_gaps.REPEATABLE
        self.may_be_left_out = not (
            schema is None
            or kind is Kind.RANDOM
            or kind is Kind.EFFECT
            or (kind is Kind.WRITES and namespace not in schema_gaps.TAGGED)
            or torch.Tag.nondeterministic_seeded in tags
        )
        self.looks_at_grad = aten and self.name in schema_gaps.LOOKS_AT_GRAD
        self.is_fast = self.is_trusted and not (
            self.is_opaque
            or self.has_effect
            or self.has_shape_from_data
            or self.looks_at_grad
            or self.written
            or self.lists
            or self.is_random
            or self.is_uninitialized
            or self.is_like
            or self.is_inplace_view
            or self.is_mark
            or (self.looks_at_switches and not aten)
        )

    def numbers(self, first: int) -> Iterable[int]:
        """Returns the numbers of the results' values on a tape, given the operator's number."""
        return itertools.count(first)

    def written_in(self, args: Any, kwargs: Any) -> list[Any]:
        """Returns the arguments of a call known to be written to; all arguments of an opaque operator."""
        return [args, kwargs] if self.is_opaque else [written.of(args, kwargs) for written in self.written]

    def drops_from_buffer(self, args: Any, kwargs: Any) -> bool:
        """Whether a call advances a buffer of dropout masks: a second call would drop other elements."""
        if not self.has_buffered_masks:
            return False
        names = [argument.name for argument in self.operator._schema.arguments]
        return all(
            args[position] if (position := names.index(name)) < len(args) else kwargs.get(name) for name in ("dropout", "train")
        )

    def under(self, mode: Any) -> OpFacts:
        """Returns the facts of the operator under a dispatch mode which makes fake tensors without fake inputs."""
        facts = copy.copy(self)
        facts.call = functools.partial(_call_under, mode, self.call)
        return facts


def _call_under(mode: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return call(*args, **kwargs)


def _written(schema: Any, name: str) -> tuple[Written, ...]:
    quiet = schema_gaps.WRITES.get(name, ()) if schema.name.startswith("aten::") else ()
    returned = {alias for value in schema.returns if value.alias_info is not None for alias in value.alias_info.before_set}
    found = []
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            counted = bool(returned & set(info.before_set)) or (not schema.returns and position == 0 and name.endswith("_"))
            overwritten = name in schema_gaps.OVERWRITES or argument.is_out or name.startswith("rrelu_with_noise")
            found.append(Written(position, argument.name, counted, overwritten))
        elif argument.name in quiet:
            found.append(Written(position, argument.name, counted=False, overwritten=False))
    return tuple(found)


#: Known facts, by the identity of operators, which the facts keep alive: operators hash by a Python function, integers do not.
KNOWN: dict[int, OpFacts] = {}


def facts_of(operator: Any) -> OpFacts:
    """Returns the facts of an operator, made once."""
    found = KNOWN.get(id(operator))
    if found is None:
        found = KNOWN[id(operator)] = OpFacts(operator)
    return found


def same_operator(one: Any, other: Any) -> bool:
    """Whether two operators are the same, except that one may be the overload with a generator."""
    if one is other:
        return True
    # Where threads besides the main one run regions, draws get a generator, by another overload.
    packet = getattr(one, "overloadpacket", None)
    return (
        packet is not None
        and packet is getattr(other, "overloadpacket", None)
        and facts_of(other).kind in (Kind.RANDOM, Kind.FACTORY)
    )
