"""Ready-made policies: which outputs to keep."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_hooks._core.misuse import check_is, checked_integer, wrong
from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._torch.functions import Operator

from .base import (
    Operators,
    OpsPolicy,
    Policy,
    PolicyFn,
    PolicyLike,
    checked_operators,
    decision_of,
    in_words,
    makes_policies,
    policy_from,
    saving,
    spread,
)

_SAVE, _RECOMPUTE, _OFFLOAD = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_CPU_OFFLOAD


class _Uniform(Policy):
    """Makes the same decision for every operator."""

    def __init__(self, title: str, decision: CheckpointPolicy, meaning: str) -> None:
        self.title, self._decision, self.meaning = title, decision, meaning

    def for_op(self, op: Any) -> CheckpointPolicy:
        return self._decision


def _named(names: Iterable[str]) -> list[Any]:
    """Returns the functional overloads of operators by name, without operators that this torch lacks."""
    functional: list[Any] = []
    for name in names:
        namespace, _, operator = name.rpartition("::")
        packet = getattr(getattr(torch.ops, namespace or "aten"), operator, None)
        if packet is not None:
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            functional += [overload for overload in overloads if not overload._schema.is_mutable]
    return functional


#: Keeps the output of every operator, even if backward does not need it, so it keeps more than a run without checkpointing.
everything_saveable: Policy = _Uniform("everything_saveable", _SAVE, "keeps the output of every operator")

#: Keeps nothing, like checkpointing without a policy.
nothing_saveable: Policy = _Uniform("nothing_saveable", _RECOMPUTE, "recomputes every operator")

_DOTS = ["mm", "addmm", "mv", "addmv", "dot", "vdot", "linear", "_scaled_mm", "_int_mm", "_addmm_activation"]
_BATCHED_DOTS = ["bmm", "baddbmm", "addbmm", "_grouped_mm", "_scaled_grouped_mm"]

#: Keeps the outputs of matrix products.
dots_saveable: Policy = OpsPolicy(
    "dots_saveable", _named(_DOTS + _BATCHED_DOTS), _SAVE, "keeps the outputs of matrix products, batched ones included"
)

#: Keeps the outputs of matrix products without batch dimensions: those of linear layers, but not the scores of attention.
dots_with_no_batch_dims_saveable: Policy = OpsPolicy(
    "dots_with_no_batch_dims_saveable", _named(_DOTS), _SAVE, "keeps the outputs of matrix products without batch dimensions"
)

#: Moves the outputs of matrix products without batch dimensions to the host until backward. Outputs on the host stay.
offload_dot_with_no_batch_dims: Policy = OpsPolicy(
    "offload_dot_with_no_batch_dims",
    _named(_DOTS),
    _OFFLOAD,
    "moves the outputs of matrix products without batch dimensions to the host",
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
    "_cudnn_attention_forward",
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

#: Keeps the outputs which cost most to compute, those of matrix products, attention, convolutions and collectives. Keeps top-k
#: too, since a recompute should not change the choice of experts.
save_compute_and_communication: Policy = OpsPolicy(
    "save_compute_and_communication",
    _named(_DOTS + _BATCHED_DOTS + _ATTENTION + _CONVOLUTIONS + _COLLECTIVES + ["topk"]),
    _SAVE,
    "keeps the outputs of matrix products, attention, convolutions, collectives and top-k",
    names=["flex_attention"],
)


class _ByName(Policy):
    """Keeps the results of operators and custom functions by their names."""

    def __init__(self, title: str, meaning: str, names: str, *, keeps: bool) -> None:
        self.title, self.meaning, self._expression, self._keeps = title, meaning, names, keeps

    def for_op(self, op: Any) -> CheckpointPolicy | None:
        return _SAVE if self._is_kept(facts_of(op).full_name) else _RECOMPUTE

    def for_function(self, function: Any) -> bool:
        return self._is_kept(function.__name__.lower())

    def _is_kept(self, name: str) -> bool:
        return (re.search(self._expression, name) is None) is not self._keeps


class _Attention(_ByName):
    """Keeps attention by name, or if attention is written out, the first batched product after a softmax."""

    def for_op(self, op: Any) -> CheckpointPolicy | None:
        return None if op in _SOFTMAX or op in _BATCHED else super().for_op(op)

    def start(self) -> PolicyFn:
        has_weights = False

        def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal has_weights
            is_kept, has_weights = has_weights and op in _BATCHED, op in _SOFTMAX or (has_weights and op not in _BATCHED)
            return _SAVE if is_kept else super(_Attention, self).for_op(op) or _RECOMPUTE

        return decide


_SOFTMAX, _BATCHED = frozenset(_named(["_softmax", "_safe_softmax"])), frozenset(_named(["bmm", "baddbmm"]))

#: Keeps the outputs of attention, so attention kernels run only once: of ``scaled_dot_product_attention`` of every kind, of
#: ``flex_attention``, and of operators and custom functions with ``attention``, ``attn`` or ``flash`` in their names. If
#: attention is written out, keeps the first batched product after a softmax. A softmax runs again, since backward reads its
#: output.
attention_saveable: Policy = _Attention(
    "attention_saveable", "keeps the outputs of attention", "attention|attn|flash", keeps=True
)

#: Keeps the outputs of every operator but norms, activations and dropouts, which cost next to nothing to compute, and whose
#: outputs are as large as those of products (Megatron's "output discarding"). Operators of a written-out norm run again too:
#: elementwise products, quotients, differences, means, powers, roots, casts. Custom functions are matched by name.
norms_recomputed: Policy = _ByName(
    "norms_recomputed",
    "keeps the output of every operator but norms, activations and dropouts",
    r"norm|dropout|bernoulli|elu|glu|silu|swish|mish|sigmoid|tanh|softplus|shrink|threshold"
    r"|\.(_to_copy|div|mean|mul|pow|rsqrt|sqrt|sub|var|var_mean)\.",
    keeps=False,
)


class _Routing(Policy):
    title = "routing_saveable"
    meaning = "keeps results on which routes and shapes depend (top-k, sort, nonzero, item, ...)"

    def for_op(self, op: Any) -> CheckpointPolicy | None:
        routing = facts_of(op).is_routing
        if routing is None:
            return None
        return _SAVE if routing else _RECOMPUTE

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return _SAVE if facts_of(op).routes(args, kwargs) else _RECOMPUTE


#: Keeps results on which routes and shapes depend, for mixtures of experts. A recompute then takes the routes of forward, even
#: if a router has a tie. Keeps choices among values (top-k, sort, argmax, multinomial, searchsorted), counts
#: (bincount, histc), results with a shape from data (nonzero, unique, masked_select, repeat_interleave), numbers read by Python
#: (item, copies to the host), and comparisons of floating-point numbers. Operators of other libraries are known by their tags
#: (``torch.Tag.dynamic_output_shape``, ``torch.Tag.data_dependent_output``). Add operators by :func:`save_from_both_policies`.
routing_saveable: Policy = _Routing()


@makes_policies
def save_ops(*ops: Operator | Operators) -> Policy:
    """Returns a policy that keeps the outputs of some operators.

    Args:
        *ops: Operators, such as ``torch.ops.aten.mm.default``, or lists of them.

    Raises:
        ValueError: If an argument is neither an ``OpOverload`` nor a higher-order operator.

    Example:
        >>> import torch
        >>> from ckpt_hooks.policies import save_ops
        >>> save_ops(torch.ops.aten.mm.default)
        <save_ops: keeps the outputs of aten.mm.default>
    """
    return saving(checked_operators(spread(ops), "ops"))


@makes_policies
def offload_ops(*ops: Operator | Operators) -> Policy:
    """Returns a policy that moves the outputs of some operators to host memory until backward. Outputs on the host stay there.

    Args:
        *ops: Operators, such as ``torch.ops.aten.mm.default``, or lists of them.

    Raises:
        ValueError: If an argument is neither an ``OpOverload`` nor a higher-order operator.
    """
    checked = checked_operators(spread(ops), "ops")
    meaning = f"moves the outputs of {in_words(checked)} to the host"
    return OpsPolicy("offload_ops", checked, _OFFLOAD, meaning, expected=True)


class _SaveEvery(Policy):
    """Keeps every n-th output of an operator."""

    title = "save_every"

    def __init__(self, op: Any, n: int) -> None:
        self._op, self._n = op, n
        self.meaning = f"keeps the output of one in {n} runs of {op}, counted in each region"

    def for_op(self, op: Any) -> CheckpointPolicy | None:
        return None if op is self._op else _RECOMPUTE

    def count_runs(self) -> Callable[[Any], bool]:
        numbers = itertools.count(1)
        return lambda op: op is self._op and next(numbers) % self._n == 0


@makes_policies
def save_every(op: Operator, n: int) -> Policy:
    """Returns a policy that keeps the output of every n-th run of an operator in a region.

    Args:
        op: The operator, such as ``torch.ops.aten.mm.default``.
        n: Keeps the runs n, 2n, 3n and so on.

    Raises:
        ValueError: If ``op`` is not an operator, or ``n`` is not a positive integer.

    Example:
        >>> import torch
        >>> from ckpt_hooks.policies import save_every
        >>> save_every(torch.ops.aten.mm.default, 2)
        <save_every: keeps the output of one in 2 runs of aten.mm.default, counted in each region>
    """
    (checked,) = checked_operators([op], "op")
    return _SaveEvery(checked, checked_integer(n, "n", "Pass 2 to keep every second output."))


# ``save_from_both_policies`` takes the decision with the higher number. PREFER_RECOMPUTE is not listed, and counts as 1.
_STRENGTH = {"MUST_SAVE": 5, "PREFER_SAVE": 4, "MUST_CPU_OFFLOAD": 3, "PREFER_CPU_OFFLOAD": 2, "MUST_RECOMPUTE": 0}


def _stronger(first_answer: Any, second_answer: Any) -> CheckpointPolicy:
    first, second = decision_of(first_answer), decision_of(second_answer)
    return first if _STRENGTH.get(first.name, 1) >= _STRENGTH.get(second.name, 1) else second


class _EitherPolicy(Policy):
    """Takes the stronger decision of two policies; asks both about every operator, since either may count."""

    title = "save_from_both_policies"

    def __init__(self, first: Policy, second: Policy) -> None:
        self._first, self._second, self.meaning = first, second, f"{first!r} or {second!r}"
        for policy in (first, second):
            if policy.kind == "tensors":
                self.expects, self.kind, self.advice = self.expects | policy.expects, policy.kind, policy.advice

    def for_op(self, op: Any) -> CheckpointPolicy | None:
        first, second = self._first.for_op(op), self._second.for_op(op)
        return None if first is None or second is None else _stronger(first, second)

    def for_function(self, function: Any) -> bool:
        return self._first.for_function(function) or self._second.for_function(function)

    def for_name(self, name: str) -> CheckpointPolicy | None:
        decisions = [decision for policy in (self._first, self._second) if (decision := policy.for_name(name)) is not None]
        return functools.reduce(_stronger, decisions) if decisions else None

    def start(self) -> PolicyFn:
        first, second = self._first.start(), self._second.start()
        if first is self._first and second is self._second:
            return self

        def decide(*args: Any, **kwargs: Any) -> CheckpointPolicy:
            return _stronger(first(*args, **kwargs), second(*args, **kwargs))

        return decide

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return _stronger(self._first(ctx, op, *args, **kwargs), self._second(ctx, op, *args, **kwargs))


@makes_policies
def save_from_both_policies(one: PolicyLike, other: PolicyLike) -> Policy:
    """Returns a policy that keeps all outputs that either of two policies keeps. If one says device and the other host: device.

    Args:
        one: A policy of this package or its name, a function, or a list or set of operators.
        other: Another policy.

    Raises:
        TypeError: If an argument is not a policy.
    """
    return _EitherPolicy(policy_from(one, "one"), policy_from(other, "other"))


class _Names(Policy):
    """Decides by names, and recomputes tensors without a name."""

    kind = "tensors"
    advice = "Name a tensor by checkpoint_name(tensor, name), inside the region."

    def __init__(
        self, title: str, decisions: dict[str, CheckpointPolicy], others: CheckpointPolicy | None, meaning: str
    ) -> None:
        if not decisions and others is None:
            raise ValueError(f"{title} got no names. Give one, or write ckpt_hooks.policies.nothing_saveable to keep nothing.")
        self.title, self._decisions, self._others, self.meaning = title, decisions, others, meaning
        self.expects = frozenset(decisions)

    def for_op(self, op: Any) -> CheckpointPolicy:
        return _RECOMPUTE

    def for_name(self, name: str) -> CheckpointPolicy | None:
        return self._decisions.get(name, self._others)


def _checked_names(names: Iterable[str], argument: str) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise wrong(names, argument, "a list of names", "Pass a list: ['hidden'].")
    names = [*names]
    for name in names:
        check_is(name, str, f"a name in {argument}", "a string", "Pass the names that checkpoint_name gives.")
    return names


@makes_policies
def save_only_these_names(*names: str | Sequence[str] | Set[str]) -> Policy:
    """Returns a policy that keeps tensors with the given names and nothing else. Applies in recorded regions.

    Args:
        *names: Names given to tensors by :func:`ckpt_hooks.checkpoint_name`, or lists of them.

    Raises:
        TypeError: If a name is not a string.

    Example:
        >>> from ckpt_hooks.policies import save_only_these_names
        >>> save_only_these_names("attention")
        <save_only_these_names: keeps what is named 'attention'>
    """
    checked = _checked_names(spread(names), "names")
    meaning = f"keeps what is named {', '.join(map(repr, checked))}"
    return _Names("save_only_these_names", dict.fromkeys(checked, _SAVE), None, meaning)


@makes_policies
def save_any_names_but_these(*names: str | Sequence[str] | Set[str]) -> Policy:
    """Returns a policy that keeps all named tensors except those with the given names. Applies in recorded regions.

    Args:
        *names: Names of tensors to recompute, or lists of them.

    Raises:
        TypeError: If a name is not a string.
    """
    checked = _checked_names(spread(names), "names")
    meaning = f"keeps what has a name other than {', '.join(map(repr, checked)) or 'none'}"
    return _Names("save_any_names_but_these", dict.fromkeys(checked, _RECOMPUTE), _SAVE, meaning)


@makes_policies
def save_and_offload_only_these_names(
    *, names_which_can_be_saved: Iterable[str], names_which_can_be_offloaded: Iterable[str]
) -> Policy:
    """Returns a policy that keeps tensors with some names on their device, and tensors with other names on the host.

    Applies in recorded regions.

    Args:
        names_which_can_be_saved: Names of tensors to keep.
        names_which_can_be_offloaded: Names of tensors to move to the host until backward.

    Raises:
        TypeError: If a name is not a string.
        ValueError: If a name is in both.
    """
    saved = _checked_names(names_which_can_be_saved, "names_which_can_be_saved")
    offloaded = _checked_names(names_which_can_be_offloaded, "names_which_can_be_offloaded")
    both = sorted(set(saved) & set(offloaded))
    if both:
        raise ValueError(
            f"names_which_can_be_saved and names_which_can_be_offloaded should have no name in common, but both have {both}. "
            "Leave each name in only one of the two."
        )
    decisions = {**dict.fromkeys(saved, _SAVE), **dict.fromkeys(offloaded, _OFFLOAD)}
    meaning = f"keeps what is named {', '.join(map(repr, saved))}, and on the host {', '.join(map(repr, offloaded))}"
    return _Names("save_and_offload_only_these_names", decisions, None, meaning)
