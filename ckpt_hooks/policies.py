"""Policies: which operators' outputs a region keeps, so that a recompute need not run them again.

A policy is asked once for each operator, in forward, right after it ran::

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

Those below are small objects that can be called like that, with names that the field knows from JAX and torchtitan. They hold
no state: one that counts gets a new count for each region (:meth:`Policy.start`). Those that look at the operator alone say so
(:meth:`Policy.for_op`), and are then asked once an operator in the whole program.

Sources: ``jax.checkpoint_policies`` for ``everything_saveable`` to ``save_from_both_policies``; torchtitan's
``activation_checkpoint.py`` for ``save_compute_and_communication`` and for saving every second matrix product.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "CheckpointPolicy",
    "Policy",
    "PolicyFn",
    "SelectiveCheckpointContext",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
    "offload_ops",
    "policy_from",
    "save_compute_and_communication",
    "save_every",
    "save_from_both_policies",
    "save_ops",
]

#: Is called with a :class:`SelectiveCheckpointContext`, an operator and its arguments.
PolicyFn = Callable[..., Any]

_SAVE, _RECOMPUTE, _OFFLOAD = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_CPU_OFFLOAD


class SelectiveCheckpointContext(torch.utils.checkpoint.SelectiveCheckpointContext):
    """What a policy is told besides the operator and its arguments.

    Attributes:
        is_recompute: False: a policy is asked in forward only. (Torch has the same, for code written before that.)
        op_output: What the operator returned. A policy that keeps it keeps it alive.
    """

    is_recompute = False

    def __init__(self, *, is_recompute: bool = False, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output


class Policy(abc.ABC):
    """A policy that explains itself.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.policies import dots_saveable
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> y = checkpoint(policy=dots_saveable)(block)(torch.ones(2, 4))
    """

    #: Operators that its user named and that no region has been looked through for: one that never comes is a mistake mostly.
    expects: frozenset[Any] = frozenset()

    @functools.cached_property
    def plan(self) -> dict[int, Any]:
        """What is known of operators under this policy: for whoever asks it."""
        return {}

    @abc.abstractmethod
    def for_op(self, op: Any) -> CheckpointPolicy | None:
        """Returns what becomes of an operator whatever its arguments; None where that depends on them, or on a count."""

    def start(self) -> PolicyFn:
        """Returns what is asked in one region: the policy itself, unless it counts."""
        return self

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Decides on one run of an operator."""
        decision = self.for_op(op)
        if decision is None:
            raise TypeError(
                f"{self!r} counts operators, and a count belongs to one region: pass the policy itself to ckpt_hooks, which "
                "starts a count for each region; elsewhere, call its start() for each region and pass what that returns."
            )
        return decision


class _Uniform(Policy):
    """The same for every operator."""

    def __init__(self, name: str, decision: CheckpointPolicy, meaning: str) -> None:
        self._name, self._decision, self._meaning = name, decision, meaning

    def for_op(self, op: Any) -> CheckpointPolicy:
        return self._decision

    def __repr__(self) -> str:
        return f"<{self._name}: {self._meaning}>"


class _ForOps(Policy):
    """One decision for some operators, recompute for the others."""

    def __init__(
        self, name: str, ops: Iterable[Any], decision: CheckpointPolicy, meaning: str, *, expected: bool = False
    ) -> None:
        self._name, self._ops, self._decision, self._meaning = name, frozenset(ops), decision, meaning
        self.expects = self._ops if expected else frozenset()

    def for_op(self, op: Any) -> CheckpointPolicy:
        return self._decision if op in self._ops else _RECOMPUTE

    def __repr__(self) -> str:
        return f"<{self._name}: {self._meaning}>"


def _checked(ops: Iterable[Any], argument: str) -> list[Any]:
    """Returns operators as a list.

    Raises:
        ValueError: If one is something else, for which the message has the overloads.
    """
    ops = list(ops)
    for op in ops:
        if isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
            continue
        advice = "An operator is named like torch.ops.aten.mm.default."
        if isinstance(op, torch._ops.OpOverloadPacket):
            overloads = ", ".join(f"torch.ops.{op}.{overload}" for overload in _overloads_of(op))
            advice = f"Please update the OpOverloadPacket to a specific OpOverload, one of: {overloads}."
        raise ValueError(f"Expected op in `{argument}` to be an OpOverload but got: {op} of type {type(op).__name__}. {advice}")
    return ops


def _overloads_of(packet: Any) -> list[str]:
    names: list[str] = packet.overloads()
    return names


def _named(names: Iterable[str]) -> list[Any]:
    """Returns the operators of some names that this torch has, all functional overloads of each."""
    found: list[Any] = []
    for name in names:
        namespace, _, operator = name.rpartition("::")
        packet = getattr(getattr(torch.ops, namespace or "aten"), operator, None)
        if packet is not None:
            overloads = [getattr(packet, overload) for overload in _overloads_of(packet)]
            found += [overload for overload in overloads if not overload._schema.is_mutable]
    return found


#: Keeps the output of every operator, whether backward needs it or not: more than no checkpointing does.
everything_saveable: Policy = _Uniform("everything_saveable", _SAVE, "keeps the output of every operator")

#: Keeps nothing: what checkpointing without a policy does.
nothing_saveable: Policy = _Uniform("nothing_saveable", _RECOMPUTE, "recomputes every operator")

_DOTS = ["mm", "addmm", "mv", "addmv", "dot", "vdot", "linear", "_scaled_mm", "_int_mm", "_addmm_activation"]
_BATCHED_DOTS = ["bmm", "baddbmm", "addbmm", "_grouped_mm", "_scaled_grouped_mm"]

#: Keeps the outputs of matrix products.
dots_saveable: Policy = _ForOps(
    "dots_saveable", _named(_DOTS + _BATCHED_DOTS), _SAVE, "keeps the outputs of matrix products, batched ones included"
)

#: Keeps the outputs of matrix products without batch dimensions: of linear layers, and not of attention's scores.
dots_with_no_batch_dims_saveable: Policy = _ForOps(
    "dots_with_no_batch_dims_saveable", _named(_DOTS), _SAVE, "keeps the outputs of matrix products without batch dimensions"
)

_ATTENTION = [
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
    "_flash_attention_forward",
    "_efficient_attention_forward",
]
_CONVOLUTIONS = ["convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "cudnn_convolution"]
_COLLECTIVES = [
    f"_c10d_functional::{name}"
    for name in (
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_reduce_coalesced",
        "all_to_all_single",
        "broadcast",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    )
]

#: Keeps what costs most to have again: matrix products, attention, convolutions, collectives, and top-k, whose choice of
#: experts a recompute should not be able to change.
save_compute_and_communication: Policy = _ForOps(
    "save_compute_and_communication",
    [
        *_named(_DOTS + _BATCHED_DOTS + _ATTENTION + _CONVOLUTIONS + _COLLECTIVES + ["topk"]),
        *filter(None, [getattr(torch.ops.higher_order, "flex_attention", None)]),
    ],
    _SAVE,
    "keeps the outputs of matrix products, attention, convolutions, collectives and top-k",
)


def save_ops(*ops: Any) -> Policy:
    """Returns a policy that keeps the outputs of some operators.

    Args:
        *ops: Operators, as in ``torch.ops.aten.mm.default``.

    Raises:
        ValueError: If one is not an ``OpOverload`` or a higher-order operator.

    Example:
        >>> import torch
        >>> from ckpt_hooks.policies import save_ops
        >>> save_ops(torch.ops.aten.mm.default)
        <save_ops: keeps the outputs of aten.mm.default>
    """
    checked = _checked(ops, "ops")
    return _ForOps("save_ops", checked, _SAVE, f"keeps the outputs of {_in_words(checked)}", expected=True)


def offload_ops(*ops: Any) -> Policy:
    """Returns a policy that moves the outputs of some operators to the host until backward; those on the host are kept.

    Args:
        *ops: Operators, as in ``torch.ops.aten.mm.default``.

    Raises:
        ValueError: If one is not an ``OpOverload`` or a higher-order operator.
    """
    checked = _checked(ops, "ops")
    meaning = f"moves the outputs of {_in_words(checked)} to the host"
    return _ForOps("offload_ops", checked, _OFFLOAD, meaning, expected=True)


class _SaveEvery(Policy):
    """Counts in what :meth:`start` returns."""

    def __init__(self, op: Any, n: int) -> None:
        self._op, self._n = op, n

    def for_op(self, op: Any) -> CheckpointPolicy | None:
        return None if op is self._op else _RECOMPUTE

    def start(self) -> PolicyFn:
        count = 0
        wanted, n = self._op, self._n

        def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal count
            if op is not wanted:
                return _RECOMPUTE
            count += 1
            return _RECOMPUTE if count % n else _SAVE

        return decide

    def __repr__(self) -> str:
        return f"<save_every: keeps the output of one in {self._n} runs of {self._op}, counted in each region>"


def save_every(op: Any, n: int) -> Policy:
    """Returns a policy that keeps the output of every n-th run of an operator in a region: the n-th, the 2n-th, and so on.

    Args:
        op: The operator, as in ``torch.ops.aten.mm.default``.
        n: How many runs to count for one that is kept.

    Raises:
        ValueError: If ``op`` is not an operator, or ``n`` not a positive integer.

    Example:
        >>> import torch
        >>> from ckpt_hooks.policies import save_every
        >>> save_every(torch.ops.aten.mm.default, 2)
        <save_every: keeps the output of one in 2 runs of aten.mm.default, counted in each region>
    """
    (checked,) = _checked([op], "op")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n should be a positive integer, but got {n!r}.")
    return _SaveEvery(checked, n)


# From what keeps most, and costs least to have again, to what keeps least.
_STRENGTH = {"MUST_SAVE": 5, "PREFER_SAVE": 4, "MUST_CPU_OFFLOAD": 3, "PREFER_CPU_OFFLOAD": 2, "MUST_RECOMPUTE": 0}


def _stronger(one: Any, other: Any) -> CheckpointPolicy:
    first, second = decision_of(one), decision_of(other)
    return first if _STRENGTH.get(first.name, 1) >= _STRENGTH.get(second.name, 1) else second


class _Both(Policy):
    """Asks two policies, both of which see every operator."""

    def __init__(self, one: Policy, other: Policy) -> None:
        self._one, self._other = one, other

    def for_op(self, op: Any) -> CheckpointPolicy | None:
        first, second = self._one.for_op(op), self._other.for_op(op)
        return None if first is None or second is None else _stronger(first, second)

    def start(self) -> PolicyFn:
        one, other = self._one.start(), self._other.start()
        if one is self._one and other is self._other:
            return self

        def decide(*args: Any, **kwargs: Any) -> CheckpointPolicy:
            return _stronger(one(*args, **kwargs), other(*args, **kwargs))

        return decide

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return _stronger(self._one(ctx, op, *args, **kwargs), self._other(ctx, op, *args, **kwargs))

    def __repr__(self) -> str:
        return f"<save_from_both_policies: {self._one!r} or {self._other!r}>"


def save_from_both_policies(one: Any, other: Any) -> Policy:
    """Returns a policy that keeps what either of two policies keeps; on the device rather than on the host.

    Args:
        one: A policy: a function, a list or set of operators, or one of those here.
        other: Another one.

    Raises:
        TypeError: If one of them is not a policy.
    """
    return _Both(policy_from(one, "one"), policy_from(other, "other"))


class _Function(Policy):
    """A function of the user's, which has to be asked each time."""

    #: The same for all functions: none of them decides on an operator alone.
    plan: dict[int, Any] = {}  # noqa: RUF012 -- a cache of the class, meant to be shared

    def __init__(self, function: PolicyFn) -> None:
        self._function = function

    def for_op(self, op: Any) -> None:
        return None

    def start(self) -> PolicyFn:
        return self._function

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return decision_of(self._function(ctx, op, *args, **kwargs), op)

    def __repr__(self) -> str:
        return f"<policy: asks {getattr(self._function, '__qualname__', self._function)}>"


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


def policy_from(policy: Any, argument: str = "policy") -> Policy:
    """Returns what is given as a policy as one of those here.

    Args:
        policy: A policy of this module, a list or set of operators to save, or a function.
        argument: What to call it in an error.

    Raises:
        TypeError: If it is none of these.
        ValueError: If what is in the list is not an operator.
    """
    if isinstance(policy, (list, tuple, set, frozenset)):
        return _from_ops(policy)
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return _Function(policy)
    raise TypeError(
        f"{argument} must be either a function or a list of ops, or a policy of ckpt_hooks.policies, but got {policy!r} of "
        f"type {type(policy).__name__}."
    )


_MOST_LISTS = 1_000
# By the identity of the operators, which the policy keeps alive: they hash by a function of Python.
_lists: dict[tuple[int, ...], Policy] = {}


def _from_ops(ops: Iterable[Any]) -> Policy:
    # A list of operators is given anew with each region, and what is known of operators under it hangs on the policy.
    key = tuple(map(id, ops))
    known = _lists.get(key)
    if known is None:
        checked = _checked(ops, "op_list")
        if len(_lists) >= _MOST_LISTS:
            _lists.clear()
        known = _lists[key] = save_ops(*checked)
    return known


def _in_words(ops: list[Any]) -> str:
    names = sorted({str(op) for op in ops})
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:4])} and {len(names) - 4} more"
