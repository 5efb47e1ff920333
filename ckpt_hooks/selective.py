"""Selective checkpointing: a policy says of each operator whether its output is kept or computed again."""

from __future__ import annotations

from typing import Any

from ._function.selective.modes import Recompute, Record
from ._function.selective.selection import Selection
from ._operators.kinds import SAC_IGNORED_OPS
from .policies.base import policy_from

__all__ = ["SAC_IGNORED_OPS", "create_selective_checkpoint_contexts"]


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[Record, Recompute]:
    """Returns the two context managers by which a region keeps the outputs of some operators.

    For ``context_fn`` of :func:`ckpt_hooks.checkpoint`, as ``functools.partial(create_selective_checkpoint_contexts, policy)``,
    which makes a new pair for each region. ``checkpoint(policy=...)`` does the same.

    An operator with an ordered effect (``torch.library``) runs once: its output is kept unless the policy says MUST_RECOMPUTE.
    An operator whose output is kept does not run in a recompute. Views and operators that write to their inputs always run
    again; so do those whose output was modified since. A random operator that is skipped leaves the random stream where it
    would have. What is kept lives as long as the region, and goes as it is used in a backward that does not retain the graph.
    It is kept by way of the saved-tensor hooks that are active around the region.

    Args:
        policy_fn_or_list: A function ``(ctx, op, *args, **kwargs) -> CheckpointPolicy``, which is asked once for each operator
            in forward, when it has run; or a list or set of operators to save; or a policy of :mod:`ckpt_hooks.policies`. As
            torch does, this asks a function about views and operators that write in place too (``checkpoint(policy=...)``
            does not): one that counts its calls counts the same here as there. ``ctx.index`` is None for these. It does not
            ask about autocast's casts of leaves, which the rerun of a region around may find made.
        allow_cache_entry_mutation: Accepted as in torch, where it hands out outputs that were modified since. Here their
            operators run again in either case.

    Returns:
        What to enter around forward, and around each recompute.

    Raises:
        TypeError: If the policy is neither a function nor a list; in forward, if it returns no ``CheckpointPolicy``.
        ValueError: If something in the list is not an operator, or the policy is one of names, for recorded regions.

    Example:
        >>> import functools, torch
        >>> from ckpt_hooks import checkpoint, create_selective_checkpoint_contexts
        >>> save_products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        >>> layer = torch.nn.Linear(4, 4)
        >>> y = checkpoint(lambda x: layer(x).sin(), torch.ones(2, 4), context_fn=save_products)
    """
    policy = policy_from(policy_fn_or_list, "policy_fn_or_list", as_torch=True)
    if policy.knows_names:
        raise ValueError(
            f"{policy!r} decides by names, which only recorded regions know: use `with checkpoint_region(policy=...):`, or a "
            "policy of operators here."
        )
    selection = Selection()
    return Record(selection, policy), Recompute(selection)
