"""Checking the result of a ``context_fn``: selective contexts come in pairs, and torch's pairs are exchanged."""

from __future__ import annotations

from typing import Any

from ckpt_hooks._function.contexts import ContextPair
from ckpt_hooks._function.selective.modes import Recompute, Record
from ckpt_hooks._torch.checkpoint import SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE
from ckpt_hooks.selective import create_selective_checkpoint_contexts

__all__ = ["own_contexts"]

_SELECTIVE = (Record, Recompute, SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE)


def own_contexts(contexts: ContextPair) -> ContextPair:
    """Returns the contexts of a region, with the package's own in place of torch's selective contexts.

    Torch's contexts reuse outputs by how often an operator ran before, and know nothing of restored buffers, of random streams
    or of a second backward.

    Raises:
        TypeError: If a context is no context manager, or a selective context comes without its counterpart.
    """
    forward: Any
    recompute: Any
    forward, recompute = contexts
    if type(forward) is Record and type(recompute) is Recompute and forward.selection is recompute.selection:
        return contexts
    if type(forward) is SELECTIVE_FORWARD and type(recompute) is SELECTIVE_RECOMPUTE and forward.storage is recompute.storage:
        return create_selective_checkpoint_contexts(forward.policy_fn)
    for context in contexts:
        if not (hasattr(type(context), "__enter__") and hasattr(type(context), "__exit__")):
            raise TypeError(
                "context_fn should return two context managers, one for forward and one for recomputes, but one of them is "
                f"{context!r} of type {type(context).__name__}. Where there is nothing to do, return contextlib.nullcontext()."
            )
    if type(forward) in _SELECTIVE or type(recompute) in _SELECTIVE:
        raise TypeError(
            "context_fn should return both contexts of one call of create_selective_checkpoint_contexts, the one for forward "
            f"first, but returned {_in_words(forward)} and {_in_words(recompute)}"
            f"{', of two calls' if _are_of_two_calls(forward, recompute) else ''}. Return what that call returns. For "
            "other contexts around them, write checkpoint(policy=policy, context_fn=others)(function)."
        )
    return contexts


def _are_of_two_calls(forward: Any, recompute: Any) -> bool:
    return (type(forward), type(recompute)) in ((Record, Recompute), (SELECTIVE_FORWARD, SELECTIVE_RECOMPUTE))


def _in_words(context: Any) -> str:
    """Describes a context."""
    kind = type(context)
    if kind not in _SELECTIVE:
        return f"a {kind.__name__}"
    whose = "a " if kind in (Record, Recompute) else "torch's "
    return f"{whose}selective context for {'forward' if kind in (Record, SELECTIVE_FORWARD) else 'recomputes'}"
