"""The class of policies, their answers, and the conversion of functions and lists to policies.

Under Dynamo a policy is a key. Dynamo would trace the constructor, and build the policy when the compiled function runs, too
late for the region that it traces now. So functions that make policies return a string, by which regions look the policy up.
"""

from __future__ import annotations

import abc
import enum
import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from inspect import CO_VARARGS, isroutine
from types import FunctionType
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.descriptions import text_of
from ckpt_hooks._core.misuse import Misuse, check_signature, described_as
from ckpt_hooks._operators.facts import OpKind, facts_of
from ckpt_hooks._torch.compiling import while_tracing
from ckpt_hooks._torch.functions import OPERATOR_PACKET, OPERATORS, Operator

F = TypeVar("F", bound=Callable[..., Any])

PARAMETERS = "ctx, op, *args, **kwargs"

_SAVE, _RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


class _Named:
    """The name of an operator, for pickling: operators refuse to be pickled."""

    def __init__(self, name: str) -> None:
        self.name = name


def operator_named(name: str) -> Any:
    """Returns an operator by its ``str``: ``"aten.mm.default"``, or ``"flex_attention"``."""
    namespace: Any = torch.ops if "." in name else torch.ops.higher_order
    for part in name.split("."):
        namespace = getattr(namespace, part)
    return namespace


def _exchanged(state: dict[str, Any], kinds: Any, exchange: Callable[[Any], Any]) -> dict[str, Any]:
    def exchanged(value: Any) -> Any:
        if isinstance(value, frozenset):
            return frozenset(map(exchanged, value))
        return exchange(value) if isinstance(value, kinds) else value

    return {name: exchanged(value) for name, value in state.items()}


class Policy(abc.ABC):
    """A policy with a ``repr`` in words.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.policies import dots_saveable
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> y = checkpoint(policy=dots_saveable)(block)(torch.ones(2, 4))
    """

    #: The name and the decisions in words, for its ``repr``; empty for policies of a user's class.
    title: str = ""
    meaning: str = ""

    #: The operators, modules or tensors that the user named; ``kind`` says which. If regions never have any of these, the names
    #: are likely a mistake, and the user is warned. Empty once a region had one, or the user was warned.
    expects: frozenset[Any] = frozenset()
    kind: str = "operators"
    advice: str = (
        "Operators are matched below autograd, where linear layers are aten.addmm or aten.mm, and attention has a name for "
        "each backend: pass ckpt_hooks.policies.save_compute_and_communication, which knows them, or a function that prints "
        "the operators it is asked about."
    )

    #: The number of regions that had nothing of ``expects``.
    looked_through: int = 0

    #: Whether regions ask the policy about views and in-place operators too, as torch does.
    is_asked_as_torch: bool = False

    def __repr__(self) -> str:
        return f"<{self.title}: {self.meaning}>" if self.title else object.__repr__(self)

    @functools.cached_property
    def decisions(self) -> dict[Any, int]:
        """The cache of :class:`.decisions.Decisions`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # Pickles leave out the cache, and have the names of operators, which refuse to be pickled.
        state = {name: value for name, value in self.__dict__.items() if name != "decisions"}
        return _exchanged(state, OPERATORS, lambda op: _Named(str(op)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(_exchanged(state, _Named, lambda named: operator_named(named.name)))

    @abc.abstractmethod
    def for_op(self, op: Any) -> CheckpointPolicy | None:
        """Returns the decision on an operator; None if the decision depends on arguments or on a count."""

    def for_function(self, function: Any) -> bool:
        """Whether the results of a call of a custom function are kept, whatever made them."""
        return False

    def for_name(self, name: str) -> CheckpointPolicy | None:
        """Returns the decision on a tensor named by ``checkpoint_name``; None to treat the tensor like others."""
        return None

    def start(self) -> PolicyFn:
        """Returns the function to ask in one region: the policy itself, unless the policy counts."""
        is_kept = self.count_runs()
        return self if is_kept is None else by_count(is_kept)

    def count_runs(self) -> Callable[[Any], bool] | None:
        """Starts a count in one region, for a policy that goes by runs of operators alone; None for other policies.

        Returns:
            A function which is called for each run of an operator without a decision of its own (:meth:`for_op`), and returns
            whether to keep the output. Recorded regions ask it in a third of the time of :meth:`start`'s.
        """
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Decides on one run of an operator, given a context, the operator and its arguments."""
        if len(args) < 2 or not callable(args[1]):
            raise Misuse.CALLED.error(name=self.title or type(self).__name__)
        decision = self.for_op(op := args[1])
        if decision is None:
            raise TypeError(
                f"{self!r} was called as a function, but it counts operators, and each region needs a count of its own. Pass "
                "the policy itself to ckpt_hooks, which starts a count for each region. For other code, call the policy's "
                "start() for each region and pass the result."
            )
        return decision_of(decision, op)


class PolicyFn(Protocol):
    """A function that decides on one run of an operator, given a :class:`SelectiveCheckpointContext` and its arguments."""

    # The answer is a CheckpointPolicy, another enum with the same names, or a bool, which torch accepts too.
    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> enum.Enum | bool: ...


#: The policies that need no arguments, by name.
PolicyName = Literal[
    "attention_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "norms_recomputed",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "routing_saveable",
    "save_compute_and_communication",
]
#: The operators whose results a policy keeps.
Operators = Sequence[Operator] | Set[Operator]
#: The types of an argument ``policy``, besides None.
PolicyLike = Policy | PolicyFn | PolicyName | Operators


def by_count(is_kept: Callable[[Any], bool]) -> PolicyFn:
    """Returns a policy function that keeps a run of an operator if ``is_kept`` says so."""
    return lambda ctx, op, *args, **kwargs: _SAVE if is_kept(op) else _RECOMPUTE


def spread(values: Iterable[Any]) -> list[Any]:
    """Returns values as a flat list, with the entries of lists, tuples and sets in place of these."""
    return [part for value in values for part in (value if isinstance(value, (list, tuple, set, frozenset)) else [value])]


def checked_operators(ops: Iterable[Any], argument: str) -> list[Any]:
    """Returns operators as a list, or raises a ``ValueError`` that names the overloads of a packet."""
    ops = list(ops)
    if not ops:
        raise ValueError(
            f"{argument} has no operator. Name one, or write ckpt_hooks.policies.nothing_saveable to keep nothing."
        )
    for op in ops:
        if isinstance(op, OPERATORS):
            continue
        advice, packet = "Write operators like torch.ops.aten.mm.default.", op
        if isinstance(op, str) or isroutine(op):  # "aten.mm.default", or torch.mm
            name = re.sub(r"^(torch\.)?(ops\.)?(aten(\.|::))?", "", op if isinstance(op, str) else op.__name__)
            packet = getattr(torch.ops.aten, name.partition(".")[0] or "none", None)
        if isinstance(packet, OPERATOR_PACKET):
            overloads = ", ".join(f"torch.ops.{packet}.{overload}" for overload in packet.overloads())
            advice = f"Write one of: {overloads}."
            if packet is op:
                advice = f"Please update the OpOverloadPacket to a specific OpOverload, and write one of: {overloads}."
        words = str(op) if isinstance(op, OPERATOR_PACKET) else described_as(op)
        raise ValueError(f"Expected op in `{argument}` to be an OpOverload but got: {words}. {advice}")
    return ops


#: Kinds of operators that no policy is asked about.
UNASKED = (OpKind.IGNORED, OpKind.RANGE)


class OpsPolicy(Policy):
    """Makes the same decision for some operators, and recomputes all others."""

    def __init__(
        self,
        title: str,
        ops: Iterable[Any],
        decision: CheckpointPolicy,
        meaning: str,
        *,
        names: Iterable[str] = (),  # names of higher-order operators, which exist only after the import of their module
        expected: bool = False,  # whether the user named the operators, and is warned if regions never run any of them
    ) -> None:
        self.title, self._ops, self._decision, self.meaning = title, frozenset(ops), decision, meaning
        self._names = frozenset(names)
        if expected:
            views = [op for op in self._ops if facts_of(op).is_never_kept]
            self.expects = self._ops.difference(views, [op for op in self._ops if facts_of(op).kind in UNASKED])
            if views:
                warn_user(
                    f"{self!r} names views, which take no memory and run again in each recompute: {in_words(views)}. Name the "
                    "operators that compute their values, or use policies.everything_saveable to keep all that can be kept."
                )

    def for_op(self, op: Any) -> CheckpointPolicy:
        return self._decision if op in self._ops or str(op) in self._names else _RECOMPUTE


def saving(ops: list[Any]) -> OpsPolicy:
    """Returns the policy that keeps the outputs of operators named by the user."""
    return OpsPolicy("save_ops", ops, _SAVE, f"keeps the outputs of {in_words(ops)}", expected=True)


class _Function(Policy):
    """A user's function, asked about each run of an operator."""

    #: A single cache for all functions, since each has the same decision on every operator: to be asked about each run.
    decisions: dict[Any, int] = {}  # noqa: RUF012 -- a cache of the class, meant to be shared

    def __init__(self, function: PolicyFn) -> None:
        self._function = function

    def for_op(self, op: Any) -> None:
        return None

    def start(self) -> PolicyFn:
        return self._function

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return decision_of(self._function(ctx, op, *args, **kwargs), op)

    def __repr__(self) -> str:
        return f"<policy: asks {getattr(self._function, '__qualname__', None) or text_of(self._function)}>"


class _TorchsFunction(_Function):
    """A function given in torch's form; regions ask about the same runs as torch, since the function may count its calls."""

    is_asked_as_torch = True
    decisions: dict[Any, int] = {}  # noqa: RUF012 -- as above


def decision_of(answer: Any, op: Any = None) -> CheckpointPolicy:
    """Returns the answer of a policy as a ``CheckpointPolicy``; as under torch, True is to save and False to recompute."""
    if isinstance(answer, CheckpointPolicy):
        return answer
    if isinstance(answer, bool):
        return _SAVE if answer else _RECOMPUTE
    name = getattr(answer, "name", None)
    if isinstance(name, str) and name in CheckpointPolicy.__members__:  # another enum with the same names
        return CheckpointPolicy[name]
    raise TypeError(
        f"the policy should return a CheckpointPolicy for each operator, but returned {described_as(answer)} for {op}. To "
        "recompute the operator, return CheckpointPolicy.PREFER_RECOMPUTE."
    )


def policy_from(policy: Any, argument: str = "policy", *, as_torch: bool = False) -> Policy:
    """Makes a policy of a name, operators to save, or a function; ``as_torch`` asks a function about views and writes too."""
    if isinstance(policy, (list, tuple, set, frozenset)):
        return _from_ops(policy, argument, as_torch)
    if isinstance(policy, Policy):
        return policy
    if type(policy) is FunctionType:
        is_function = policy.__module__ not in _FACTORIES
    else:
        is_function = callable(policy) and not isinstance(policy, _CALLABLE)  # 2 us: some classes are ABCs
    if is_function:
        # Programs may pass a function in each step. A look at the code often spares a look at the signature, which takes 10 us.
        code = getattr(policy, "__code__", None)
        if code is None or code.co_argcount > 2 or code.co_kwonlyargcount or not code.co_flags & CO_VARARGS:
            check_signature(policy, argument, PARAMETERS)
        return _TorchsFunction(policy) if as_torch else _Function(policy)
    if isinstance(policy, str) and (meant := _made.get(policy, NAMED.get(policy))) is not None:
        return policy_from(meant, argument, as_torch=as_torch)
    raise _no_policy(policy, argument)


#: Classes of objects that can be called, but are no policies.
_OPERATORS: Any = (*OPERATORS, OPERATOR_PACKET)
_CALLABLE: Any = (*_OPERATORS, type)
#: The modules whose functions return policies.
_FACTORIES = (f"{__package__}.ready_made", f"{__package__}.by_module")


def _no_policy(policy: Any, argument: str) -> TypeError:
    advice = "Write {argument}=ckpt_hooks.policies.dots_saveable, say, or a list of operators, [torch.ops.aten.mm.default]."
    if isinstance(policy, _OPERATORS):
        advice = "Write a list of operators: {argument}=[torch.ops.aten.mm.default]."
    elif getattr(policy, "__module__", None) in _FACTORIES:
        advice = f"This function makes policies. Call it: {{argument}}={policy.__name__}(...)."
    elif isinstance(policy, str):
        import difflib

        near = {name: repr(name) if isinstance(meant, Policy) else f"{name}(...)" for name, meant in NAMED.items()}
        close = " or ".join(near[name] for name in difflib.get_close_matches(policy, near))
        names = ", ".join(name for name, meant in NAMED.items() if isinstance(meant, Policy))
        advice = f"{f'Is {close} meant? ' if close else ''}Give one of these names: {names}."
    words = str(policy) if isinstance(policy, _OPERATORS) else described_as(policy)
    return TypeError(
        f"{argument} must be either a function or a list of ops, or a policy of ckpt_hooks.policies, but got {words}. "
        f"{advice.format(argument=argument)}"
    )


_MOST_LISTS = 1_000
# Policies by the ``id`` of their operators, since an operator's own hash takes a call of Python. Policies keep their operators
# alive, so no ``id`` is used twice.
_lists: dict[tuple[int, ...], Policy] = {}


def _from_ops(ops: Collection[Any], argument: str, as_torch: bool) -> Policy:
    # Programs make a new list for each region, but a policy caches its decisions, so equal lists share a policy.
    key = tuple(map(id, ops))
    known = _lists.get(key)
    if known is None:
        checked = checked_operators(ops, argument) if ops or not as_torch else []  # torch's form takes an empty list
        if len(_lists) >= _MOST_LISTS:
            _lists.clear()
        known = _lists[key] = saving(checked)
    return known


def in_words(ops: list[Any]) -> str:
    """Returns the names of at most four operators, and the number of others."""
    names = sorted({str(op) for op in ops})
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:4])} and {len(names) - 4} more"


#: Public policies, and functions that make policies, by name.
NAMED: dict[str, Any] = {}

# Policies by key. They are never dropped, since compiled code, which has the key as a constant, may be traced again.
_made: dict[str, Any] = {}


def makes_policies(make: F) -> F:
    """Decorates a function that makes policies, to return a key while Dynamo traces."""

    @while_tracing
    def key_of(*args: Any, **kwargs: Any) -> str:
        named = {name: made_while_tracing(value) for name, value in kwargs.items()}
        return key_for(make(*map(made_while_tracing, args), **named))

    @functools.wraps(make)
    def policy(*args: Any, **kwargs: Any) -> Any:
        return key_of(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else make(*args, **kwargs)

    return cast("F", policy)


@while_tracing
def key_for(policy: Any) -> str:
    """Returns a new key for a policy, a list of operators, or a function; for Dynamo to call."""
    made = made_while_tracing(policy)
    key = f"policy {len(_made)}: {made!r}"
    _made[key] = made
    return key


def made_while_tracing(value: Any) -> Any:
    """Returns the policy of a key; any other value as it is."""
    return _made.get(value, value) if isinstance(value, str) else value
