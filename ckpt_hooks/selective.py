"""Selective checkpointing in torch's form: the context managers of a policy, and the frames of calls in contexts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch.utils.checkpoint
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.hooks import RemovableHandle

from ._core.call_sites import warn_user
from ._core.misuse import checked_flag, described_as
from ._core.self_check import CheckedPlace, place_of
from ._core.self_check import settings as self_check
from ._function.options import (
    ContextPair,
    PolicyContext,
    RegionOptions,
    module_of,
    name_of_function,
    policy_of,
    unwrapped,
    within,
    without_policy,
)
from ._recorded.frame import RecordedFrame
from ._recorded.tape import Tape
from ._tensors.copies import is_theirs, layout_of
from ._torch.checkpoint import SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE, is_compiled
from .policies.base import policy_from
from .policies.decisions import asks_for_torch

__all__ = ["SAC_IGNORED_OPS", "create_selective_checkpoint_contexts"]


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[PolicyContext, PolicyContext]:
    """Returns the context managers of one region whose policy keeps the outputs of some operators.

    ``functools.partial(create_selective_checkpoint_contexts, policy)`` is a ``context_fn`` for :func:`ckpt_hooks.checkpoint`:
    it makes a new pair for each region. ``checkpoint(policy=...)`` does the same.

    A region of this package takes the policy and enters neither context: it records the operators of forward, and replays
    those whose outputs are needed and were not kept, as ``checkpoint(policy=...)`` does. Entered by anyone else the contexts
    are those of torch, with the policy's answers. Outputs go through the saved-tensor hooks around the region, and live as
    long as a saved tensor depends on them. An operator with an ordered effect (``torch.library``) runs once, unless the policy
    says MUST_RECOMPUTE.

    Args:
        policy_fn_or_list: A function ``(ctx, op, *args, **kwargs) -> CheckpointPolicy``, asked once for each operator in
            forward, when the operator has run; or a list or set of operators to save; or a policy of
            :mod:`ckpt_hooks.policies`. A function is asked about views and operators which write in place too, with
            ``ctx.index`` None, so that a function which counts its calls counts as under torch. (``checkpoint(policy=...)``
            does not ask about these.) Autocast's casts of leaves are left out.
        allow_cache_entry_mutation: Accepted as in torch, which then hands out outputs that the program modified after the
            region. Here these are a :class:`ckpt_hooks.MutationError` in either case.

    Returns:
        One context manager for forward, and one for each recompute.

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
    if is_compiled():  # the compiler asks for the contexts when it has traced the region
        create: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
        contexts: tuple[Any, Any] = create(asks_for_torch(policy))
        return contexts
    of_torch: list[Any] = []
    return PolicyContext(policy, of_torch, is_forward=True), PolicyContext(policy, of_torch, is_forward=False)


def frame_under_policy(
    function: Callable[..., Any], options: RegionOptions, given: ContextPair
) -> tuple[AbstractContextManager[Any] | None, ContextPair | None]:
    """Returns the frame of a call whose contexts have a policy; where they have none, None and the contexts to enter."""
    contexts = own_contexts(given)
    policy = policy_of(contexts[0])
    if policy is None:
        return None, contexts
    module = module_of(unwrapped(function))
    hooks = _hooks_of(module)
    inside, around = without_policy(contexts[0]), without_policy(contexts[1])
    if not _takers.isdisjoint(hooks):
        return None, None if inside is around is None else (inside or nullcontext(), around or nullcontext())
    frame = RecordedFrame(
        options.name or name_of_function(unwrapped(function)),
        policy,
        respect_hooks=options.respect_hooks,
        preserve_rng_state=options.preserve_rng_state,
        split_backward=options.split_backward,
        offload_from=options.offload_from,
        debug=options.debug,
        compares_values=options.check.fingerprint is not None,
        place=_place_of(unwrapped(function) if module is None else module, options),
        around_replays=around,
        at_end=functools.partial(_look_for_weights, module, hooks) if module is not None and hooks else None,
        module=module,
    )
    return frame if inside is None else within(frame, inside), None


def _place_of(function: Any, options: RegionOptions) -> CheckedPlace | None:
    is_checked = options.check.is_sampled and options.preserve_rng_state and self_check.level
    return place_of(function, None) if is_checked else None


#: The code of hooks that took parameters away after a forward under a policy.
_takers: set[Any] = set()
_NO_HOOKS: frozenset[Any] = frozenset()
_known_hooks: WeakKeyDictionary[torch.nn.Module, tuple[int, frozenset[Any]]] = WeakKeyDictionary()


def _hooks_of(module: torch.nn.Module | None) -> frozenset[Any]:
    """Returns the code of the hooks on forward in a module."""
    if module is None:
        return _NO_HOOKS
    found = _known_hooks.get(module)
    if found is None or found[0] != RemovableHandle.next_id:  # one counter for all hooks of the process
        hooks = [
            hook
            for one in module.modules()
            for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values(), vars(one).get("forward"))
            if hook is not None
        ]
        found = _known_hooks[module] = RemovableHandle.next_id, frozenset(map(_code_of, hooks))
    return found[1]


def _code_of(hook: Any) -> Any:
    hook = unwrapped(hook)
    return getattr(hook, "__code__", type(hook))


def _look_for_weights(module: torch.nn.Module, hooks: frozenset[Any], tape: Tape) -> None:
    """Notes hooks that took away weights which a region has read: they gave them other memory, or put empty ones there."""
    empty = {parameter.shape for parameter in module.parameters() if parameter.is_meta}
    are_taken = False
    for held in tape.parameters():
        parameter, memory = held.tensor, held.memory
        assert parameter is not None
        if memory is not None and held.is_elsewhere() and is_theirs(parameter, layout_of(memory)):
            held.leave(memory)
            are_taken = True
        are_taken = are_taken or parameter.shape in empty
    if are_taken:
        _takers.update(hooks)
        warn_user(
            "Hooks took away weights that a call under a policy has read, and nobody tells how to fill them again. The call "
            "holds them until its backward. From now on calls of modules with such hooks run without their policy: exact, with "
            "more to compute. Units of FSDP2 can have policies."
        )


_SELECTIVE = (PolicyContext, SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE)


def own_contexts(contexts: ContextPair) -> ContextPair:
    """Returns the contexts of a region, with the package's own in place of torch's selective contexts."""
    forward: Any
    recompute: Any
    forward, recompute = contexts
    if type(forward) is PolicyContext and forward.is_before(recompute):
        return contexts
    if type(forward) is SELECTIVE_FORWARD and type(recompute) is SELECTIVE_RECOMPUTE and forward.storage is recompute.storage:
        # Torch's reuse outputs by how often an operator ran before, and know nothing of restored buffers, of random streams or
        # of a second backward.
        return create_selective_checkpoint_contexts(forward.policy_fn)
    for context in contexts:
        if not (hasattr(type(context), "__enter__") and hasattr(type(context), "__exit__")):
            raise TypeError(
                "context_fn should return two context managers, one for forward and one for recomputes, but one of them is "
                f"{described_as(context)}. Where there is nothing to do, return contextlib.nullcontext()."
            )
    if type(forward) in _SELECTIVE or type(recompute) in _SELECTIVE:
        raise TypeError(
            "context_fn should return both contexts of one call of create_selective_checkpoint_contexts, the one for forward "
            f"first, but returned a {type(forward).__name__} and a {type(recompute).__name__}, alone, exchanged or of two "
            "calls. Return what that call returns. For other contexts around them, write checkpoint(policy=policy, "
            "context_fn=others)(function)."
        )
    return contexts
