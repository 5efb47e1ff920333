"""Facts of an operator, known before a run: kind, places of tensors, writes, outputs.

Most facts follow from the schema. Lists of facts that schemas lack come first; names without a library are of ``aten``.
"""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ckpt_hooks._ambient import switches
from ckpt_hooks._ambient.switches import heeds
from ckpt_hooks._torch.compiling import graph_of
from ckpt_hooks._torch.functions import OVERLOAD, has_effects

# Writes. ``count_writes`` in ``_core/modes.py`` counts writes to lists: it is there because lower packages need it too.

#: Arguments that operators write to although their schemas declare inputs: running statistics.
WRITES = dict.fromkeys(
    {
        *("batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
        *("batch_norm_update_stats", "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"),
    },
    ("running_mean", "running_var"),
)

#: With ``training`` (the sixth argument), no result depends on the old statistics (the fourth and fifth argument).
NORMALIZES_BY_BATCH = frozenset({"cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"})

#: Libraries whose operators may write to any argument, which neither schemas nor versions tell: collectives in place, and the
#: gathering and freeing of FSDP's parameters.
REWRITING = frozenset({"c10d", "fsdp"})

#: An operator that tells the allocator which stream uses a tensor. Its schema declares a write, but the tensor stays the same.
RECORD_STREAM: Any = torch.ops.aten.record_stream.default

#: Operators that give every written element a new value, whatever the old. Schemas do not say whether the old value matters.
OVERWRITES = frozenset(
    {
        *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_"),
        *("random_", "uniform_", "zero_"),
    }
)

#: Operators whose second run writes the same values, so that a rerun may repeat the write. Schemas do not say this.
REPEATABLE = frozenset(
    {
        *("abs_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "clip_", "copy_", "embedding_renorm_", "fill_"),
        *("fill_diagonal_", "floor_", "hardtanh_", "index_copy_", "index_fill_", "masked_fill_", "nan_to_num_"),
        *("normal_", "relu_", "renorm_", "round_", "sign_", "threshold_", "tril_", "triu_", "trunc_", "uniform_", "zero_"),
        *("_foreach_abs_", "_foreach_clamp_max_", "_foreach_clamp_min_", "_foreach_copy_", "_foreach_zero_"),
    }
)

#: Operators that give a tensor another storage, or its storage another size. Schemas only declare a write.
REPLACES_STORAGE = frozenset({"_resize_output_", "resize_", "resize_as_", "resize_as_sparse_", "set_", "set_data"})

# Memory of outputs

#: Operators whose outputs share the input's memory, which schemas deny: the caller promises not to use the input any more.
ALIASES = frozenset({"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})

#: Operators that return uninitialised memory.
UNINITIALIZED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})

#: Libraries whose operators return new memory, or the memory of an argument.
TRUSTED = frozenset({"aten", "prims", "prim", "quantized"})

# What a result depends on

#: Operators that read the shape of their first argument, and not its content.
LIKE = frozenset(
    {
        *("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randint_like"),
        *("randn_like", "zeros_like"),
    }
)

#: Operators that ask for a tensor's layout, as all of ``prim`` do. Some classes cache the answer, so a rerun may not ask again.
LAYOUT = frozenset(
    {
        *("dim", "is_contiguous", "is_non_overlapping_and_dense", "is_pinned", "is_strides_like_format"),
        *("numel", "size", "storage_offset", "stride", "sym_is_contiguous", "sym_numel", "sym_size"),
        *("sym_storage_offset", "sym_stride"),
    }
)

#: Operators that return more if an argument requires grad. No argument of a replay does, so the results are kept.
LOOKS_AT_GRAD = frozenset({"_sparse_mm_reduce_impl"})

# Random numbers and effects

#: Libraries that tag their random operators; operators of other libraries are watched when they run.
TAGGED = frozenset({"aten", "prims", "_c10d_functional"})

#: Operators that take masks of recurrent layers from a buffer of the device and advance the buffer, which schemas do not say;
#: and the operator that makes the buffer from a seed.
BUFFERED_MASKS = frozenset({"_cudnn_init_dropout_state", "_cudnn_rnn", "miopen_rnn"})

#: Higher-order operators that only compute an output. Other higher-order operators may write to their arguments.
PURE_HIGHER_ORDER = frozenset({"flex_attention"})

#: The operator by which Inductor calls its code, under ``wrap_inductor_compiled_regions``.
COMPILED = "inductor_compiled_code"


class OpKind(enum.Enum):
    """How a recompute treats an operator: a kept output can replace a run, except the run of a view or a write."""

    #: The operator does no work, or runs only in forward or only in a recompute: comparisons of the two leave it out.
    IGNORED = enum.auto()
    #: Like ``IGNORED``: the operator begins or ends a named range of a profiler.
    RANGE = enum.auto()
    #: A cast of a leaf. Autocast makes the cast once and keeps it until its block ends, so only some runs have the operator.
    CAST = enum.auto()
    #: A view of the input. It has to run again. Comparisons of forward and recompute leave it out, since autograd runs some
    #: views once more after a write to their base.
    VIEW = enum.auto()
    #: The operator has to run again, since it writes to its arguments.
    WRITES = enum.auto()
    #: Like ``WRITES``, but neither schema nor versions tell of the write.
    REWRITES = enum.auto()
    #: The operator has to run again: against its schema, its outputs share the input's memory, though not the version counter.
    ALIASES = enum.auto()
    #: The operator runs again although its output could be kept: a run costs little, and the user has a view of the output with
    #: another version counter.
    FACTORY = enum.auto()
    #: A kept output can replace another run of the operator.
    SAVEABLE = enum.auto()
    #: Like ``SAVEABLE``, but the output is complete only after a wait: it is kept as it is, and never copied.
    COLLECTIVE = enum.auto()
    #: Like ``SAVEABLE``, but the operator draws random numbers, or may draw.
    RANDOM = enum.auto()
    #: Like ``SAVEABLE``, but the operator has an effect, ordered with other effects: it runs again only if a policy insists.
    EFFECT = enum.auto()


#: Kinds whose kept outputs can replace another run of the operator; for the writing kinds below, only outputs in new memory.
_ASKED = frozenset({OpKind.CAST, OpKind.SAVEABLE, OpKind.COLLECTIVE, OpKind.RANDOM, OpKind.EFFECT})
_WRITING = frozenset({OpKind.WRITES, OpKind.REWRITES})


class Written(NamedTuple):
    position: int  # among positional arguments
    name: str
    counted: bool  # whether the version counter counts the write
    overwritten: bool  # whether nothing is left of the old content

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the argument of a call; None where left out."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


class OpFacts:
    # The schema is read once for each operator: a look at a schema takes microseconds, and recorders ask at each run.
    # A call of a custom ``autograd.Function`` is recorded as an operator, which has ``rerun`` in place of ``call``.
    is_function = False
    rerun: Callable[..., list[Any]]
    __slots__ = (
        "alone",
        "call",
        "calls",
        "draws",
        "full_name",
        "has_buffered_masks",
        "has_effect",
        "has_fresh",
        "has_shape_from_data",
        "is_asked_about",
        "is_collective",
        "is_compiled",
        "is_detach",
        "is_fast",
        "is_fresh",
        "is_inplace_view",
        "is_like",
        "is_mark",
        "is_never_kept",
        "is_opaque",
        "is_plain",
        "is_random",
        "is_repeatable",
        "is_routing",
        "is_silent",
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
        "writes_first",
        "written",
    )

    def __init__(self, operator: Any) -> None:
        self.operator, self.full_name = operator, str(operator)
        # The ``_op`` of an overload spares a Python call.
        self.call: Callable[..., Any] = operator._op if type(operator) is OVERLOAD else operator
        self.kind = kind = operator_kind(operator)
        schema = getattr(operator, "_schema", None)
        namespace, _, name = ("", "", self.full_name) if schema is None else schema.name.partition("::")
        self.name: str = name
        aten = namespace == "aten"
        # It is unknown what the operator does to its arguments.
        self.is_opaque = schema is None or (kind is OpKind.REWRITES and not aten)
        arguments = [] if schema is None else schema.arguments
        types = [str(argument.type) for argument in arguments]
        positions = tuple(index for index, type_name in enumerate(types) if type_name in ("Tensor", "Optional[Tensor]"))
        self.is_compiled = schema is None and self.full_name == COMPILED
        # Positions of lists of tensors; positions of tensors in a call with n arguments, at ``tensors[n]``; names of both.
        self.lists = tuple(index for index, type_name in enumerate(types) if "Tensor" in type_name and index not in positions)
        self.tensors = [tuple(index for index in positions if index < count) for count in range(len(arguments) + 1)]
        # The quickest call for each number of positional arguments, without keywords; None until it is asked for.
        self.calls: list[Callable[..., Any] | None] = [None] * len(self.tensors)
        self.keywords = frozenset(arguments[index].name for index in (*positions, *self.lists))
        if self.is_compiled:
            self.lists = (1,)  # the list of inputs comes after the code; there is no schema to say so
        tags = () if schema is None else operator.tags
        self.is_inplace_view = torch.Tag.inplace_view in tags
        self.replaces_storage = self.name in REPLACES_STORAGE
        self.is_mark = operator is RECORD_STREAM
        returns = () if schema is None else schema.returns
        # The operator returns no tensor to bring back: it marks something, or asks for a layout.
        self.is_silent = kind is OpKind.IGNORED and not any("Tensor" in str(returned.type) for returned in returns)
        self.written = () if schema is None or self.is_mark else _written(schema, self.name)
        # Whether a result is neither an argument nor a view of an argument.
        self.has_fresh = schema is None or any(returned.alias_info is None for returned in schema.returns)
        # The operator writes to its first argument only, counts the write, and returns nothing else.
        self.writes_first = (
            len(self.written) == 1
            and self.written[0].position == 0
            and self.written[0].counted
            and not (self.lists or self.is_opaque or self.is_inplace_view or self.replaces_storage)
            and not self.has_fresh
        )
        self.alone: OpFacts | None = None  # the facts that :meth:`as_functional` has made
        self.single = schema is not None and [str(returned.type) for returned in schema.returns] == ["Tensor"]
        # The result shares the version counter of its input, unlike the result of ``OpKind.ALIASES``.
        self.is_view = (
            schema is not None
            and not schema.is_mutable
            and any(returned.alias_info is not None for returned in schema.returns)
            and kind is not OpKind.ALIASES
        )
        self.is_never_kept = kind in (OpKind.VIEW, OpKind.ALIASES)
        # An output can stand in for another run, so policies are asked.
        is_known = not self.is_opaque or self.is_compiled
        self.is_asked_about = kind in _ASKED or (kind in _WRITING and self.has_fresh and is_known)
        self.is_fresh = kind in (OpKind.SAVEABLE, OpKind.RANDOM)
        self.has_effect = kind is OpKind.EFFECT
        # Also true for ``tensor.data``, which runs ``detach`` too, but has a version counter of its own.
        self.is_detach = self.name == "detach" and self.is_view
        self.draws = torch.Tag.nondeterministic_seeded in tags
        self.is_random = kind in (OpKind.RANDOM, OpKind.EFFECT) or self.draws or self.is_compiled
        self.is_uninitialized = aten and self.name in UNINITIALIZED
        self.is_like = aten and self.name in LIKE
        # The operator draws only if its dropout probability is not 0.
        self.may_drop_out = self.is_random and "dropout_p" in {argument.name for argument in arguments}
        self.is_collective = kind is OpKind.COLLECTIVE
        # Outputs are in new memory or in an argument's memory, as the schema says.
        self.is_trusted = namespace in TRUSTED
        self.looks_at_all_switches = not aten or heeds(self.name, switches.FURTHER)
        self.looks_at_switches = self.looks_at_all_switches or heeds(self.name, switches.COMMON)
        # The operator may take dropout masks from a buffer: a second call would take the next masks.
        self.has_buffered_masks = aten and self.name in BUFFERED_MASKS
        # Whether routes or shapes depend on the result; None if that depends on the arguments.
        self.is_routing = _is_routing(operator)
        self.has_shape_from_data = self.is_routing is True or torch.Tag.dynamic_output_shape in tags
        self.is_repeatable = self.name in REPEATABLE
        # Whether random sources and everything outside of the program stay the same if the operator does not run.
        self.may_be_left_out = not (
            schema is None
            or kind is OpKind.RANDOM
            or kind is OpKind.EFFECT
            or (kind is OpKind.WRITES and namespace not in TAGGED)
            or self.draws
        )
        # A replay may pass tensors by position, and stores the results without further steps.
        self.is_plain = not (self.lists or self.written or self.is_inplace_view or self.has_shape_from_data)
        self.looks_at_grad = aten and self.name in LOOKS_AT_GRAD
        self.is_fast = self._is_fast(is_aten=aten)

    def _is_fast(self, *, is_aten: bool) -> bool:
        """Whether the recorder's fast path fits: the operator takes tensors by position, returns tensors, and does no more."""
        return self.is_trusted and not (
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
            or self.is_silent
            or (self.looks_at_switches and not is_aten)
        )

    def find_call(self, count: int) -> Callable[..., Any]:
        from ckpt_hooks._torch.quick_calls import binding_of  # only recorded regions need it

        call = self.calls[count] = binding_of(self.operator, count) or self.call
        return call

    def as_functional(self) -> OpFacts:
        """Returns the facts of a call whose result replaces its argument, since nothing else refers to that memory."""
        if self.alone is None:
            self.alone = copy.copy(self)
            self.alone.written, self.alone.writes_first = (), False
        return self.alone

    def numbers(self, first: int) -> Iterable[int]:
        """Returns the numbers of the results' values on a tape, given the operator's number."""
        return itertools.count(first)

    def written_in(self, args: Any, kwargs: Any) -> list[Any]:
        """Returns the arguments of a call known to be written to; all arguments of an opaque operator."""
        return [args, kwargs] if self.is_opaque else [written.of(args, kwargs) for written in self.written]

    def arguments_of(self, args: Any) -> Any:
        """Returns the arguments of a call to look at after its run: compiled code empties the list of its inputs."""
        return (args[0], [*args[1]], *args[2:]) if self.is_compiled else args

    def unread(self, args: Sequence[Any]) -> Sequence[int]:
        """Returns the positions of written tensors whose old content affects no result."""
        return (3, 4) if self.name in NORMALIZES_BY_BATCH and len(args) > 5 and args[5] else ()

    def drops_from_buffer(self, args: Any, kwargs: Any) -> bool:
        """Whether a call advances a buffer of dropout masks: a second call would drop other elements."""
        if not self.has_buffered_masks:
            return False
        names = [argument.name for argument in self.operator._schema.arguments]
        return all(
            args[position] if (position := names.index(name)) < len(args) else kwargs.get(name) for name in ("dropout", "train")
        )

    def routes(self, args: Any, kwargs: Any) -> bool:
        """Whether routes or shapes may depend on the result of a call."""
        if self.is_routing is not None:
            return self.is_routing
        if self.name != _CAST:
            return any(map(_has_fractions, args))
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex) and _has_fractions(args[0]):
            return True
        # A copy to the host, where Python may branch on the numbers.
        return device is not None and torch.device(device).type == "cpu" and _kind_of(args[0])[1].type != "cpu"

    def chooses(self, args: Any, kwargs: Any) -> bool:
        """Whether a run of the operator chooses among floating-point numbers, which a recompute may round otherwise."""
        # Choices among integers and masks follow from choices among floating-point numbers.
        if not self.is_routing:
            return self.is_routing is None and self.routes(args, kwargs)
        if not self.operator._schema.name.startswith("aten::"):
            return any(map(_has_fractions, args))
        return _has_fractions(args[1 if self.name == "masked_select" else 0])

    def under(self, mode: Any) -> OpFacts:
        """Returns facts whose calls run under a fake mode, for an operator that makes fake tensors without fake inputs."""
        facts = copy.copy(self)
        facts.call = functools.partial(_call_under, mode, self.call)
        facts.calls = [facts.call] * len(self.calls)
        return facts


def _call_under(mode: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return call(*args, **kwargs)


def operator_kind(operator: Any) -> OpKind:
    if operator in SAC_IGNORED_OPS or operator is RECORD_STREAM:
        return OpKind.IGNORED
    schema = getattr(operator, "_schema", None)
    if schema is None:  # a higher-order operator
        if has_effects(operator):
            return OpKind.EFFECT
        return OpKind.SAVEABLE if str(operator) in PURE_HIGHER_ORDER else OpKind.REWRITES
    library, _, name = schema.name.partition("::")
    if library == "profiler":
        return OpKind.RANGE
    if library == "prim" or (name in LAYOUT and library == "aten"):
        return OpKind.IGNORED
    if library in REWRITING or (library == "aten" and name in WRITES):
        return OpKind.REWRITES
    if schema.is_mutable:
        return OpKind.WRITES
    if name in ALIASES:
        return OpKind.ALIASES
    if any(returned.alias_info is not None for returned in schema.returns):
        return OpKind.VIEW
    if name == "_to_copy" and library == "aten":
        return OpKind.CAST
    if library == "_c10d_functional":
        return OpKind.COLLECTIVE
    if has_effects(operator):
        return OpKind.EFFECT
    takes_tensor = any("Tensor" in str(argument.type) for argument in schema.arguments)
    if library == "aten" and (name.endswith("_like") or name in UNINITIALIZED or not takes_tensor):
        return OpKind.FACTORY
    draws = torch.Tag.nondeterministic_seeded in operator.tags or library not in TAGGED
    return OpKind.RANDOM if draws else OpKind.SAVEABLE


def _written(schema: Any, name: str) -> tuple[Written, ...]:
    quiet = WRITES.get(name, ()) if schema.name.startswith("aten::") else ()
    returned = {alias for value in schema.returns if value.alias_info is not None for alias in value.alias_info.before_set}
    written = []
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            counted = bool(returned & set(info.before_set)) or (not schema.returns and position == 0 and name.endswith("_"))
            overwritten = name in OVERWRITES or argument.is_out or name.startswith("rrelu_with_noise")
            written.append(Written(position, argument.name, counted, overwritten))
        elif argument.name in quiet:
            written.append(Written(position, argument.name, counted=False, overwritten=False))
    return tuple(written)


# Routing operators. Their inputs are continuous and their results are not: a last bit, or a tie which comes out otherwise,
# changes a result altogether, to another expert or another number of rows. Names are of ``aten``; operators of other libraries
# are known by their tags.
#: Operators that choose among values, or count values in bins.
_CHOICES = frozenset(
    {
        *("argmax", "argmin", "bincount", "bucketize", "histc", "kthvalue", "mode", "multinomial", "nonzero_static"),
        *("searchsorted", "sort", "topk"),
    }
)
#: Operators that choose among values in overloads that return indices too (``max.dim``).
_CHOICES_WITH_INDICES = frozenset({"cummax", "cummin", "max", "median", "min", "nanmedian"})
#: Operators that torch tags with shapes from data, but that choose nothing: ``index`` reads rows that other operators chose.
_NO_CHOICES = frozenset({"_ctc_loss", "index", "linalg_lstsq"})
#: Operators that turn numbers into truth values.
_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
_CAST = "_to_copy"
_ROUTING_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def _is_routing(operator: Any) -> bool | None:
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
    return any(tag in operator.tags for tag in _ROUTING_TAGS)


def _kind_of(value: Any) -> tuple[Any, Any]:
    """Returns dtype and device of a tensor, or of its kind (dtype, shape, device) in a log of operators."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device
    return (value[0], value[2]) if type(value) is tuple and len(value) == 3 else (None, None)


def _has_fractions(value: Any) -> bool:
    dtype = _kind_of(value)[0]
    return isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)


def routing_advice(operators: Sequence[str]) -> str:
    """Returns advice on a recompute that ran these choosing operators again."""
    return (
        f" The recompute ran {' and '.join(operators)} again. Routes and shapes depend on the result, which may differ from "
        "forward's on a tie or by a last bit. Keep such results: pass policy=ckpt_hooks.policies.routing_saveable, or "
        "save_from_both_policies(routing_saveable, policy) if the region has a policy already."
    )


#: Known facts, by ``id`` of the operator, which the facts keep alive: hashing an operator itself would run Python code.
KNOWN: dict[int, OpFacts] = {}


def facts_of(operator: Any) -> OpFacts:
    facts = KNOWN.get(id(operator))
    if facts is None:
        facts = KNOWN[id(operator)] = OpFacts(operator)
    return facts


class CodeFacts(NamedTuple):
    """Facts of code that Inductor generated."""

    written: frozenset[int] | None  # the places of inputs that it writes to; None where unknown, or where it has other effects
    devices: frozenset[torch.device]  # devices named in the code, on which it makes tensors


_UNKNOWN = CodeFacts(None, frozenset())
_known_code: weakref.WeakKeyDictionary[Any, CodeFacts] = weakref.WeakKeyDictionary()
#: Python modules whose functions appear in graphs besides operators: arithmetic of sizes, and picking parts of results.
_OF_NUMBERS = frozenset({"_operator", "builtins", "math"})


def facts_of_code(compiled: Any) -> CodeFacts:
    graph = graph_of(compiled)
    if graph is None:
        return _UNKNOWN
    facts = _known_code.get(compiled)
    if facts is None:
        nodes = list(graph.nodes)
        args = itertools.chain.from_iterable((*node.args, *node.kwargs.values()) for node in nodes)
        facts = CodeFacts(_find_written(nodes), frozenset(arg for arg in args if isinstance(arg, torch.device)))
        _known_code[compiled] = facts
    return facts


def _find_written(nodes: Sequence[Any]) -> frozenset[int] | None:
    inputs = [node for node in nodes if node.op == "placeholder"]
    positions = set()
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if node.op == "output":
            if any(_base_of(source).op == "get_attr" for source in node.all_input_nodes):
                return None  # each run returns the same memory, and the program may write there
            continue
        if type(node.target) is not OVERLOAD:
            if getattr(node.target, "__module__", None) not in _OF_NUMBERS:
                return None
            continue
        facts = facts_of(node.target)
        if facts.is_opaque or facts.is_inplace_view or facts.has_effect or facts.is_collective:
            return None
        for written in facts.written:
            target = _base_of(written.of(node.args, node.kwargs))
            if target in inputs:
                positions.add(inputs.index(target))
            elif getattr(target, "op", "") != "call_function":  # a list of tensors, or a constant
                return None
    return frozenset(positions)


def _base_of(node: Any) -> Any:
    """Returns the node whose memory a node of a graph views, as far as operators tell."""
    while getattr(node, "op", "") == "call_function":
        facts = facts_of(node.target) if type(node.target) is OVERLOAD else None
        if not (facts is None or facts.is_view or facts.is_never_kept):
            break
        node = node.args[0]
    return node


def same_operator(operator: Any, other: Any) -> bool:
    """Whether two operators are the same, or differ only by the overload with a generator, which replays call."""
    packet = getattr(operator, "overloadpacket", None)
    return operator is other or (
        packet is not None
        and packet is getattr(other, "overloadpacket", None)
        and facts_of(other).kind in (OpKind.RANDOM, OpKind.FACTORY)
    )
