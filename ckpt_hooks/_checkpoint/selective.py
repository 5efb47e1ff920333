"""Selective checkpointing in torch's form: the context managers of a policy, and the frames of calls under a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch.utils.checkpoint
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.hooks import RemovableHandle

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.misuse import checked_flag, described_as, module_of, name_of_function, unwrapped
from ckpt_hooks._core.self_check import CheckedPlace, place_of
from ckpt_hooks._core.settings import self_check
from ckpt_hooks._function.contexts import ContextPair, PolicyContext, both, call_context_fn, noop_context_fn, within
from ckpt_hooks._options import RegionOptions
from ckpt_hooks._recorded.frame import RecordedFrame
from ckpt_hooks._recorded.tape import Tape
from ckpt_hooks._tensors.copies import is_theirs, layout_of
from ckpt_hooks._torch.checkpoint import SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE, is_compiled
from ckpt_hooks.policies.base import Policy, PolicyLike, policy_from
from ckpt_hooks.policies.decisions import asks_for_torch

__all__ = ["SAC_IGNORED_OPS", "create_selective_checkpoint_contexts"]


def create_selective_checkpoint_contexts(
    policy_fn_or_list: PolicyLike, allow_cache_entry_mutation: bool = False
) -> tuple[PolicyContext, PolicyContext]:
    """Makes a pair of context managers for ``context_fn``, so that a policy decides which outputs a region keeps.

    Use ``functools.partial(create_selective_checkpoint_contexts, policy)`` as ``context_fn``, as with torch.
    ``checkpoint(policy=...)`` does the same in fewer words. A region of this package reads the policy and enters neither
    context: it records the operators of forward and replays those that backward needs and that were not kept. If other code
    enters the contexts, they act as torch's.

    Kept outputs pass through the saved-tensor hooks around the region and live while a saved tensor depends on them. An
    operator with an ordered effect (``torch.library``) runs once unless the policy says MUST_RECOMPUTE.

    Args:
        policy_fn_or_list: A function ``(ctx, op, *args, **kwargs) -> CheckpointPolicy``, called after each operator of forward;
            a list or set of operators to save; or a policy of :mod:`ckpt_hooks.policies` or its name. A function is also asked
            about views and in-place operators, with ``ctx.index`` None, so that functions that count calls count as under
            torch. ``checkpoint(policy=...)`` does not ask about these. Autocast's casts of leaves are never asked about.
        allow_cache_entry_mutation: Accepted for torch's sake. A kept output that was modified after the region is a
            :class:`ckpt_hooks.MutationError` in either case, where torch would use the modified values.

    Returns:
        A context manager for forward, and a context manager for recomputes.

    Raises:
        TypeError: If the policy is neither a function nor a list; in forward, if it returns no ``CheckpointPolicy``.
        ValueError: If the list has something else than operators.

    Example:
        >>> import functools, torch
        >>> from ckpt_hooks import checkpoint, create_selective_checkpoint_contexts
        >>> save_products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        >>> layer = torch.nn.Linear(4, 4)
        >>> y = checkpoint(lambda x: layer(x).sin(), torch.ones(2, 4), context_fn=save_products)
    """
    policy = policy_from(policy_fn_or_list, "policy_fn_or_list", as_torch=True)
    checked_flag(allow_cache_entry_mutation, "allow_cache_entry_mutation")
    if is_compiled():  # the compiler itself enters the contexts, after it has traced the region, so they are torch's
        create: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
        contexts: tuple[Any, Any] = create(asks_for_torch(policy))
        return contexts
    of_torch: list[Any] = []
    return PolicyContext(policy, of_torch, is_forward=True), PolicyContext(policy, of_torch, is_forward=False)


def contexts_with(policy: Policy, context_fn: Callable[[], ContextPair] = noop_context_fn) -> ContextPair:
    """Returns the contexts of a policy and of a ``context_fn`` in torch's form, the only form known to compilers."""
    own = create_selective_checkpoint_contexts(policy)
    return own if context_fn is noop_context_fn else both(own, own_contexts(call_context_fn(context_fn)))


def policy_among(pair: ContextPair) -> tuple[Policy | None, ContextPair | None]:
    """Returns the policy of a pair of selective contexts, and None; for other contexts, None and the contexts to enter."""
    contexts: Any = own_contexts(pair)
    return (contexts[0].policy, None) if type(contexts[0]) is PolicyContext else (None, contexts)


def with_contexts(options: RegionOptions, context_fn: Callable[[], ContextPair]) -> tuple[RegionOptions, ContextPair | None]:
    """Returns the options, with a policy if ``context_fn`` returns selective contexts, and other contexts to enter."""
    policy, contexts = policy_among(call_context_fn(context_fn))
    if policy is None:
        return options, contexts
    if options.policy is not None:
        raise TypeError(
            "checkpoint got policy and a context_fn that returns the contexts of another policy, but a region has one policy. "
            "Pass ckpt_hooks.policies.save_from_both_policies(one, other) as policy, and let context_fn return no selective "
            "contexts."
        )
    return options.replaced(policy=policy), None


def frame_under_policy(
    function: Callable[..., Any], options: RegionOptions, contexts: ContextPair | None
) -> AbstractContextManager[Any] | None:
    """Returns the frame of a call under a policy; None if the frame would hold weights that the module's hooks free."""
    module = module_of(unwrapped(function))
    hooks = _hooks_of(module)
    if not _takers.isdisjoint(hooks):
        return None
    frame = RecordedFrame(
        options.name or name_of_function(unwrapped(function)),
        options,
        place=_place_of(unwrapped(function) if module is None else module, options),
        around_replays=None if contexts is None else contexts[1],
        at_end=functools.partial(_look_for_weights, module, hooks) if module is not None and hooks else None,
        module=module,
    )
    return frame if contexts is None else within(frame, contexts[0])


def _place_of(function: Any, options: RegionOptions) -> CheckedPlace | None:
    is_checked = options.check.is_sampled and options.preserve_rng_state and self_check.level
    return place_of(function, None) if is_checked else None


#: The code of hooks that freed weights after a forward under a policy. Calls of modules with such hooks run without a policy.
_takers: set[Any] = set()
_NO_HOOKS: frozenset[Any] = frozenset()
_known_hooks: WeakKeyDictionary[torch.nn.Module, tuple[int, frozenset[Any]]] = WeakKeyDictionary()


def _hooks_of(module: torch.nn.Module | None) -> frozenset[Any]:
    """Returns the code of the hooks on forward, in a module and its submodules."""
    if module is None:
        return _NO_HOOKS
    known = _known_hooks.get(module)
    if known is None or known[0] != RemovableHandle.next_id:  # a changed id: the process has registered more hooks
        hooks = [
            hook
            for part in module.modules()
            for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values(), vars(part).get("forward"))
            if hook is not None
        ]
        known = _known_hooks[module] = RemovableHandle.next_id, frozenset(map(_code_of, hooks))
    return known[1]


def _code_of(hook: Any) -> Any:
    hook = unwrapped(hook)
    return getattr(hook, "__code__", type(hook))


def _look_for_weights(module: torch.nn.Module, hooks: frozenset[Any], tape: Tape) -> None:
    """Notes hooks that freed weights read by a region, by giving them other memory or putting meta tensors in their place."""
    empty = {parameter.shape for parameter in module.parameters() if parameter.is_meta}
    are_taken = False
    for saved in tape.parameters():
        parameter, memory = saved.tensor, saved.memory
        assert parameter is not None
        if memory is not None and saved.is_elsewhere() and is_theirs(parameter, layout_of(memory)):
            saved.leave(memory)
            are_taken = True
        are_taken = are_taken or parameter.shape in empty
    if are_taken:
        _takers.update(hooks)
        warn_user(
            "Module hooks, such as those of DeepSpeed ZeRO-3, freed weights that a call under a policy has read, and the "
            "library cannot bring them back. The call "
            "holds them until its backward. From now on calls of modules with such hooks run without their policy: results "
            "stay exact, and backward computes more. To silence this, pass no policy for these modules, or shard with FSDP2, "
            "whose units can have policies."
        )


_SELECTIVE = (PolicyContext, SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE)


def own_contexts(contexts: ContextPair) -> ContextPair:
    """Returns the contexts of a region, with the package's contexts in place of torch's selective contexts."""
    forward: Any
    recompute: Any
    forward, recompute = contexts
    if type(forward) is PolicyContext and forward.is_before(recompute):
        return contexts
    if type(forward) is SELECTIVE_FORWARD and type(recompute) is SELECTIVE_RECOMPUTE and forward.storage is recompute.storage:
        # The package's contexts go in place of torch's, which find outputs by the count of an operator's earlier runs, and
        # do not know of restored buffers, random sources or a second backward.
        return create_selective_checkpoint_contexts(forward.policy_fn)
    for context in contexts:
        if not (hasattr(type(context), "__enter__") and hasattr(type(context), "__exit__")):
            raise TypeError(
                "context_fn should return two context managers, one for forward and one for recomputes, but one of them is "
                f"{described_as(context)}. Where there is nothing to do, return contextlib.nullcontext()."
            )
    if type(forward) in _SELECTIVE or type(recompute) in _SELECTIVE:
        raise TypeError(
            "context_fn should return the two contexts of one call of create_selective_checkpoint_contexts, in that order, but "
            f"returned a {type(forward).__name__} and a {type(recompute).__name__}: they are swapped, or not from one call. "
            "Return the pair as that call returns it. To add other contexts, write checkpoint(policy=policy, "
            "context_fn=others)(function)."
        )
    return contexts
