"""Selective checkpointing in torch's form: the context managers of a policy."""

from __future__ import annotations

from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ._function.options import PolicyContext
from ._torch.checkpoint import is_compiled
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
        allow_cache_entry_mutation: Accepted as in torch, which then hands out modified outputs. Here their operators run again
            in either case.

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
    if is_compiled():  # the compiler asks for the contexts when it has traced the region
        create: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
        contexts: tuple[Any, Any] = create(asks_for_torch(policy))
        return contexts
    of_torch: list[Any] = []
    return PolicyContext(policy, of_torch, is_forward=True), PolicyContext(policy, of_torch, is_forward=False)
