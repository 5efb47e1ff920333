"""Policies: which operators' outputs a region keeps, to spare a recompute these operators.

A region asks its policy once for each operator, in forward, right after the operator ran::

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

The policies below are small objects with the same call, under names known from JAX and torchtitan. They hold no state: a policy
which counts starts a count in each region (:meth:`Policy.start`). A policy that looks only at the operator says so
(:meth:`Policy.for_op`); regions ask such a policy once for each operator in the whole program.

A policy that needs no arguments may be given by its name: ``policy="dots_saveable"``.

Policies of names keep tensors named by :func:`ckpt_hooks.checkpoint_name`, in recorded regions
(:func:`ckpt_hooks.checkpoint_region`).

Sources: ``jax.checkpoint_policies`` for ``everything_saveable`` to ``save_from_both_policies``,
``offload_dot_with_no_batch_dims`` and for policies of names;
torchtitan's ``activation_checkpoint.py`` for ``save_compute_and_communication`` and for saving every second matrix product.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointPolicy

from .base import NAMED, Policy, PolicyFn, PolicyLike
from .by_module import save_indices, save_modules
from .decisions import SelectiveCheckpointContext
from .ready_made import (
    attention_saveable,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    norms_recomputed,
    nothing_saveable,
    offload_dot_with_no_batch_dims,
    offload_ops,
    routing_saveable,
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
    "PolicyLike",
    "SelectiveCheckpointContext",
    "attention_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "norms_recomputed",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "offload_ops",
    "routing_saveable",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_compute_and_communication",
    "save_every",
    "save_from_both_policies",
    "save_indices",
    "save_modules",
    "save_only_these_names",
    "save_ops",
]

NAMED.update({name: value for name, value in vars().items() if name in __all__ and name.islower()})
