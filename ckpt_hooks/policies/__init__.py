"""Policies: which operators' outputs a region keeps, so that a recompute need not run them again.

A policy is asked once for each operator, in forward, right after it ran::

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

Those below are small objects that can be called like that, with names that the field knows from JAX and torchtitan. They hold
no state: one that counts gets a new count for each region (:meth:`Policy.start`). Those that look at the operator alone say so
(:meth:`Policy.for_op`), and are then asked once an operator in the whole program.

Policies of names keep what :func:`ckpt_hooks.checkpoint_name` has named. They are for recorded regions
(:func:`ckpt_hooks.checkpoint_region`).

Sources: ``jax.checkpoint_policies`` for ``everything_saveable`` to ``save_from_both_policies`` and
for those of names; torchtitan's ``activation_checkpoint.py`` for
``save_compute_and_communication`` and for saving every second matrix product.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointPolicy

from .base import Policy, PolicyFn
from .context import SelectiveCheckpointContext
from .ready_made import (
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    offload_ops,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_compute_and_communication,
    save_every,
    save_from_both_policies,
    save_only_these_names,
    save_ops,
)

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
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_compute_and_communication",
    "save_every",
    "save_from_both_policies",
    "save_only_these_names",
    "save_ops",
]
