"""What a policy is: how it is asked, what it may answer, and what users may give for one."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._core.words import warn_user
from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._operators.kinds import Kind
from ckpt_hooks._torch import OPERATOR_PACKET, OPERATORS

__all__ = [
    "OpsPolicy",
    "Policy",
    "PolicyFn",
    "checked_operators",
    "decision_of",
    "in_words",
    "overloads_of",
    "policy_from",
    "saving",
]

#: Is called with a :class:`~ckpt_hooks.policies.SelectiveCheckpointContext`, an operator and its arguments.
PolicyFn = Callable[..., Any]

_SAVE, _RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


class _Named:
    """An operator by its name, for pickling: operators themselves refuse."""

    def __init__(self, name: str) -> None:
        self.name = name


def operator_named(name: str) -> Any:
    """Returns the operator of a name as ``str`` has it: ``"aten.mm.default"``, or ``"flex_attention"``."""
    found: Any = torch.ops if "." in name else torch.ops.higher_order
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _exchanged(state: dict[str, Any], kinds: Any, exchange: Callable[[Any], Any]) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if isinstance(value, frozenset):
            return frozenset(map(one, value))
        return exchange(value) if isinstance(value, kinds) else value

    return {name: one(value) for name, value in state.items()}


class Policy(abc.ABC):
    """A policy that explains itself.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.policies import dots_saveable
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> y = checkpoint(policy=dots_saveable)(block)(torch.ones(2, 4))
    """

    #: Operators that its user named, until one of them has run or some regions have been looked through: a list of which none
    #: ever comes is a mistake mostly.
    expects: frozenset[Any] = frozenset()

    #: Names that its user gave, and those of them that no tensor of a region has had yet.
    names: frozenset[str] = frozenset()
    expected_names: frozenset[str] = frozenset()

    #: How many regions have been looked through.
    looked_through: int = 0

    #: Whether its user knows that views are not kept.
    has_views: bool = False

    #: Whether it is asked about views and operators that write in place too, as torch does.
    is_asked_as_torch: bool = False

    #: Whether it decides by the names that ``checkpoint_name`` gives, which recorded regions know and others do not.
    knows_names: bool = False

    @functools.cached_property
    def plan(self) -> dict[int, Any]:
        """What function frames do with each operator under this policy."""
        return {}

    @functools.cached_property
    def decisions(self) -> dict[Any, int]:
        """Its decisions on operators, for regions of both kinds (:mod:`.decisions`)."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # What is known of operators stays here, and operators travel by name.
        state = {name: value for name, value in self.__dict__.items() if name not in ("plan", "decisions")}
        return _exchanged(state, OPERATORS, lambda op: _Named(str(op)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(_exchanged(state, _Named, lambda named: operator_named(named.name)))

    @abc.abstractmethod
    def for_op(self, op: Any) -> CheckpointPolicy | None:
        """Returns what becomes of an operator whatever its arguments; None where that depends on them, or on a count."""

    def for_name(self, name: str) -> CheckpointPolicy | None:
        """Returns what becomes of a tensor named by ``checkpoint_name`` in a recorded region; None for nothing special."""
        return None

    def start(self) -> PolicyFn:
        """Returns what is asked in one region: the policy itself, unless it counts."""
        return self

    def warn_of_view(self, operator: Any) -> None:
        """Warns that a view is not kept though the policy says so; once for a policy."""
        if not self.has_views:
            self.has_views = True
            warn_user(
                f"{self!r} says that the output of {operator} must be saved, but views run again in each recompute: they take "
                "no memory and share that of their input. Return CheckpointPolicy.PREFER_RECOMPUTE for views, and MUST_SAVE "
                "for the operator that computes what is to be kept; to keep all that can be kept, pass "
                "ckpt_hooks.policies.everything_saveable."
            )

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Decides on one run of an operator."""
        decision = self.for_op(op)
        if decision is None:
            raise TypeError(
                f"{self!r} counts operators, and a count belongs to one region: pass the policy itself to ckpt_hooks, which "
                "starts a count for each region; elsewhere, call its start() for each region and pass what that returns."
            )
        return decision_of(decision, op)


def checked_operators(ops: Iterable[Any], argument: str) -> list[Any]:
    """Returns operators as a list.

    Raises:
        ValueError: If one is something else, for which the message has the overloads.
    """
    ops = list(ops)
    for op in ops:
        if isinstance(op, OPERATORS):
            continue
        advice = "Write operators like torch.ops.aten.mm.default."
        if isinstance(op, OPERATOR_PACKET):
            overloads = ", ".join(f"torch.ops.{op}.{overload}" for overload in overloads_of(op))
            advice = f"Please update the OpOverloadPacket to a specific OpOverload, and write one of: {overloads}."
        raise ValueError(f"Expected op in `{argument}` to be an OpOverload but got: {op} of type {type(op).__name__}. {advice}")
    return ops


def overloads_of(packet: Any) -> list[str]:
    """Returns the names of a packet's overloads."""
    names: list[str] = packet.overloads()
    return names


class OpsPolicy(Policy):
    """One decision for some operators, recompute for the others."""

    def __init__(
        self,
        name: str,
        ops: Iterable[Any],
        decision: CheckpointPolicy,
        meaning: str,
        *,
        names: Iterable[str] = (),
        expected: bool = False,
    ) -> None:
        """Makes a policy.

        Args:
            name: What it is called.
            ops: The operators.
            decision: What becomes of them.
            meaning: The same in words.
            names: Operators of operators by name: they are there only when the module that defines them was imported.
            expected: Whether the user named the operators, and is to hear of those that never come.
        """
        self._name, self._ops, self._decision, self._meaning = name, frozenset(ops), decision, meaning
        self._names = frozenset(names)
        self.expects, self._views = frozenset(), []
        if expected:
            self.has_views = True
            ignored = (Kind.IGNORED, Kind.RANGE)
            views = {op for op in self._ops if (facts := facts_of(op)).is_never_kept or facts.kind in ignored}
            self._views, self.expects = sorted(map(str, views)), self._ops - views

    def warn_of_views(self) -> OpsPolicy:
        """Warns of views that the user named; returns the policy."""
        if self._views:
            warn_user(
                f"{self!r} names views, which are not kept: {', '.join(self._views)}. Views run again in each recompute; they "
                "take no memory and share that of their input. Leave them out, and name the operator that computes what is to "
                "be kept."
            )
        return self

    def for_op(self, op: Any) -> CheckpointPolicy:
        """Returns the decision for an operator."""
        return self._decision if op in self._ops or str(op) in self._names else _RECOMPUTE

    def __repr__(self) -> str:
        return f"<{self._name}: {self._meaning}>"


def saving(ops: list[Any]) -> OpsPolicy:
    """Returns the policy that keeps the outputs of operators which the user named."""
    return OpsPolicy("save_ops", ops, _SAVE, f"keeps the outputs of {in_words(ops)}", expected=True)


#: Of functions that are policies, the code of those that said to keep views.
_warned: set[Any] = set()


class _Function(Policy):
    """A function of the user's, which has to be asked each time."""

    #: The same for all functions: none of them decides on an operator alone.
    plan: dict[int, Any] = {}  # noqa: RUF012 -- a cache of the class, meant to be shared
    decisions: dict[Any, int] = {}  # noqa: RUF012 -- likewise

    def __init__(self, function: PolicyFn) -> None:
        self._function = function

    def for_op(self, op: Any) -> None:
        return None

    def start(self) -> PolicyFn:
        return self._function

    def warn_of_view(self, operator: Any) -> None:
        # A function is given anew with each region, and often made anew: its code is what stays.
        function = self._function
        while isinstance(function, functools.partial):
            function = function.func
        key = getattr(function, "__code__", type(function))
        if key not in _warned:
            _warned.add(key)
            super().warn_of_view(operator)

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return decision_of(self._function(ctx, op, *args, **kwargs), op)

    def __repr__(self) -> str:
        return f"<policy: asks {getattr(self._function, '__qualname__', self._function)}>"


class _TorchsFunction(_Function):
    """A function that was given in torch's form. It may count its calls, so it is asked about all that torch asks about."""

    is_asked_as_torch = True
    plan: dict[int, Any] = {}  # noqa: RUF012 -- as above


def decision_of(answer: Any, op: Any = None) -> CheckpointPolicy:
    """Returns what a policy answered; True is to save and False to recompute, as torch has it.

    Raises:
        TypeError: If the answer is something else.
    """
    if isinstance(answer, CheckpointPolicy):
        return answer
    if isinstance(answer, bool):
        return _SAVE if answer else _RECOMPUTE
    name = getattr(answer, "name", None)
    if isinstance(name, str) and name in CheckpointPolicy.__members__:  # an enum of the same names
        return CheckpointPolicy[name]
    raise TypeError(
        f"the policy should return a CheckpointPolicy for each operator, but returned {answer!r} for {op}. To have it "
        "recomputed, return CheckpointPolicy.PREFER_RECOMPUTE."
    )


def policy_from(policy: Any, argument: str = "policy", *, as_torch: bool = False) -> Policy:
    """Returns what is given as a policy as one of those here.

    Args:
        policy: A policy of this module, a list or set of operators to save, or a function.
        argument: What to call it in an error.
        as_torch: Whether to ask a function about all that torch asks about.

    Raises:
        TypeError: If it is none of these.
        ValueError: If what is in the list is not an operator.
    """
    if isinstance(policy, (list, tuple, set, frozenset)):
        return _from_ops(policy)
    if isinstance(policy, Policy):
        return policy
    if type(policy) is FunctionType:
        if policy.__module__ != _FACTORIES:
            return _TorchsFunction(policy) if as_torch else _Function(policy)
    elif callable(policy) and not isinstance(policy, _CALLABLE):  # which takes 2 us, as ABC classes do
        return _TorchsFunction(policy) if as_torch else _Function(policy)
    raise _no_policy(policy, argument)


#: Operators, which can be called and are no policies.
_CALLABLE: Any = (*OPERATORS, OPERATOR_PACKET)
#: The module whose functions return policies.
_FACTORIES = f"{__package__}.ready_made"


def _no_policy(policy: Any, argument: str) -> TypeError:
    """Returns the error for something that is given as a policy and is none."""
    expected = f"{argument} must be either a function or a list of ops, or a policy of ckpt_hooks.policies, but got"
    if isinstance(policy, OPERATORS):
        place = "torch.ops" if "." in str(policy) else "torch.ops.higher_order"
        return TypeError(f"{expected} the operator {policy}. Write a list: {argument}=[{place}.{policy}].")
    if isinstance(policy, OPERATOR_PACKET):
        overload = f"torch.ops.{policy}.{overloads_of(policy)[0]}"
        return TypeError(f"{expected} {policy}, which has several operators. Write a list of them: {argument}=[{overload}].")
    if getattr(policy, "__module__", None) == _FACTORIES and callable(policy):
        name = policy.__name__
        return TypeError(f"{expected} {name}, which makes policies. Call it: {argument}={name}(...).")
    name = policy if isinstance(policy, str) and policy.isidentifier() else "dots_saveable"
    return TypeError(
        f"{expected} {policy!r} of type {type(policy).__name__}. Write {argument}=ckpt_hooks.policies.{name}, say, or a list "
        f"of operators, {argument}=[torch.ops.aten.mm.default]."
    )


_MOST_LISTS = 1_000
# By the identity of the operators, which the policy keeps alive: they hash by a function of Python.
_lists: dict[tuple[int, ...], Policy] = {}


def _from_ops(ops: Iterable[Any]) -> Policy:
    # A list of operators is given anew with each region, and what is known of operators under it hangs on the policy.
    key = tuple(map(id, ops))
    known = _lists.get(key)
    if known is None:
        checked = checked_operators(ops, "op_list")
        if len(_lists) >= _MOST_LISTS:
            _lists.clear()
        known = _lists[key] = saving(checked)
        return known.warn_of_views()
    return known


def in_words(ops: list[Any]) -> str:
    """Returns the names of at most four operators, and how many there are besides."""
    names = sorted({str(op) for op in ops})
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:4])} and {len(names) - 4} more"
