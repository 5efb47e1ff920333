"""Selective checkpointing in torch's form: the context managers of a policy."""

from __future__ import annotations

from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ._function.selective.modes import Recompute, Record
from ._function.selective.selection import Selection
from ._torch.checkpoint import is_compiled
from .policies.base import policy_from
from .policies.decisions import asks_for_torch

__all__ = ["SAC_IGNORED_OPS", "create_selective_checkpoint_contexts"]


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[Record, Recompute]:
    """Returns the context managers of one region whose policy keeps the outputs of some operators.

    ``functools.partial(create_selective_checkpoint_contexts, policy)`` is a ``context_fn`` for :func:`ckpt_hooks.checkpoint`:
    it makes a new pair for each region. ``checkpoint(policy=...)`` does the same.

    An operator whose output is kept does not run in a recompute. Views, operators which write to their inputs, and operators
    whose output was modified since, always run again. An operator with an ordered effect (``torch.library``) runs once, unless
    the policy says MUST_RECOMPUTE. A skipped random operator moves the random stream on. Outputs go through the saved-tensor
    hooks around the region. They live as long as the region, and go with their use in a backward without ``retain_graph``.

    A recompute runs the operators of forward in their order. Operators of one run alone (a table kept by
    ``functools.lru_cache``) are passed over if no gradient flows through them and they draw no random numbers: the recompute
    then runs every operator, and compares kept outputs with the results. Two runs of the same operators on other tensors (two
    tables of one kind, built in another order) are taken for equal. A policy of a region inside a recomputed region has to
    decide the same again: a function which counts across regions does not.

    Args:
        policy_fn_or_list: A function ``(ctx, op, *args, **kwargs) -> CheckpointPolicy``, asked once for each operator in
            forward, when the operator has run; or a list or set of operators to save; or a policy of
            :mod:`ckpt_hooks.policies`. A function is asked about views and operators which write in place too, with
            ``ctx.index`` None, so that a function which counts its calls counts as under torch. (``checkpoint(policy=...)``
            does not ask about these.) Autocast's casts of leaves are left out, since the rerun of a region around may find them
            made.
        allow_cache_entry_mutation: Accepted as in torch, which then hands out modified outputs. Here their operators run again
            in either case.

    Returns:
        One context manager for forward, and one for each recompute.

    Raises:
        TypeError: If the policy is neither a function nor a list; in forward, if it returns no ``CheckpointPolicy``.
        ValueError: If the list has something else than operators, or the policy goes by names, which recorded regions alone
            have.

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
    if policy.knows_names:
        raise ValueError(
            f"{policy!r} decides by names, which only recorded regions know: use `with checkpoint_region(policy=...):`, or a "
            "policy of operators here."
        )
    selection = Selection()
    return Record(selection, policy), Recompute(selection)
