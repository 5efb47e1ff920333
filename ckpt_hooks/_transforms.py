"""What to say where regions cannot be: under transforms of functions."""

from __future__ import annotations

import warnings

__all__ = ["warn_of_transform"]

_warned = False


def warn_of_transform() -> None:
    """Warns, once, that a region runs plainly."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "checkpoint was called under a torch.func transform (grad, vjp, vmap, ...), which saved-tensor hooks cannot see "
            "through. Regions run un-checkpointed there: results are right, memory is as without checkpointing.",
            stacklevel=4,
        )
